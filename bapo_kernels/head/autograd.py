"""The one autograd path of the head: select rows, run the driver, put the results back. Shared by all backends."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bapo_kernels.head import chunked
from bapo_kernels.head.chunked import Backend, Coefficients, Rows, Statistics
from bapo_kernels.head.eager import logit_slope
from bapo_kernels.head.inputs import HeadInputs
from bapo_kernels.head.rows import Selection


@dataclass(frozen=True)
class HeadCall:
    inputs: HeadInputs
    backend: Backend
    entropy: bool
    budget: int  # bytes


class _Head(torch.autograd.Function):
    """hidden (N, D), weight, bias -> log-probs at the ids (N, 1 + K) and entropy (N,) or None; 0 in rows that do not count."""

    @staticmethod
    def forward(ctx, call: HeadCall, hidden: Tensor, weight: Tensor, bias: Tensor | None):
        inputs = call.inputs
        selection = inputs.selection
        rows = Rows(selection.take(hidden), inputs.ids, inputs.inv_temperature)
        if selection.rows == 0:
            acc = inputs.dtype
            empty = hidden.new_zeros(0, dtype=acc)
            stats = Statistics(empty, empty, empty if call.entropy else None, empty.reshape(inputs.ids.shape))
        else:
            stats = chunked.forward(call.backend, rows, weight, bias, inputs.spec, call.entropy, call.budget)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, stats.max, stats.log_sum, stats.entropy, stats.picked)
        logprobs = stats.logprobs.masked_fill(_padding(inputs.ids), 0.0)
        return selection.put(logprobs), None if stats.entropy is None else selection.put(stats.entropy)

    @staticmethod
    @once_differentiable
    def backward(ctx, g_logprobs: Tensor | None, g_entropy: Tensor | None):
        call: HeadCall = ctx.call
        inputs, counted = call.inputs, call.inputs.selection
        hidden, weight, bias, *saved = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        stats = Statistics(*saved)
        acc = stats.max.dtype
        g_picked = stats.picked.new_zeros(inputs.ids.shape) if g_logprobs is None else counted.take(g_logprobs).to(acc)
        g_picked = g_picked.masked_fill(_padding(inputs.ids), 0.0).contiguous()
        g_entropy = None if g_entropy is None else counted.take(g_entropy).to(acc).contiguous()  # a sum's is expanded

        wanted = (g_picked != 0).any(1)
        if g_entropy is not None:
            wanted = wanted | (g_entropy != 0)
        inner = Selection.of(wanted)
        outer = counted.then(inner)
        if outer.rows == 0:
            zeros = (
                torch.zeros_like(t) if t is not None and need else None
                for t, need in zip((hidden, weight, bias), needs, strict=True)
            )
            return None, *zeros

        inv_temperature = None if inputs.inv_temperature is None else inner.take(inputs.inv_temperature, fill=1)
        stats = stats.map(inner.take)
        g_picked = inner.take(g_picked)
        slope = logit_slope(stats.picked, inputs.spec, inv_temperature)
        coef = Coefficients(
            probability=g_picked.sum(1),
            entropy=None if g_entropy is None else inner.take(g_entropy),
            picked_grad=g_picked if slope is None else g_picked * slope,
        )
        rows = Rows(outer.take(hidden), inner.take(inputs.ids), inv_temperature)
        d_hidden, d_weight, d_bias = chunked.backward(
            call.backend, rows, stats, coef, weight, bias, inputs.spec, needs, call.budget
        )
        d_hidden = None if d_hidden is None else outer.put(d_hidden.to(hidden.dtype))
        return None, d_hidden, d_weight, None if d_bias is None else d_bias.to(bias.dtype)


def _padding(ids: Tensor) -> Tensor:
    """Recorded ids of -1 are padding. A target of -1 is not: it is invalid, and its log-prob must not be a number."""
    padding = ids == -1
    padding[:, 0] = False
    return padding


def run(call: HeadCall) -> tuple[Tensor, Tensor | None]:
    return _Head.apply(call, call.inputs.hidden, call.inputs.weight, call.inputs.bias)
