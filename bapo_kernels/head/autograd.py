"""The one autograd path of the head: select rows, run the driver, put the results back. Shared by all backends."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bapo_kernels.head import chunked, frozen
from bapo_kernels.head.chunked import (
    Backend,
    Coefficients,
    Gradients,
    Needs,
    Rows,
    Statistics,
    Weight,
)
from bapo_kernels.head.eager import GemmBackend
from bapo_kernels.head.inputs import Problem
from bapo_kernels.head.rows import Selection


@dataclass(frozen=True)
class Call:
    problem: Problem
    backend: Backend
    entropy: bool  # wanted
    frozen: bool  # the weight needs no gradient, and the gradient of hidden is prepared in the forward
    budget: int  # bytes


def run(call: Call, hidden: Tensor, weight: Weight, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """hidden (N, D) -> log-probs at the ids (N, P) and entropy (N,) or None; 0 in rows that do not count."""
    return _Head.apply(call, hidden, bias, *weight.parts)


def refuse_second_derivatives() -> None:
    """At the start of a backward: under create_graph=True the gradient would come out as a constant, without a word."""
    if torch.is_grad_enabled():
        raise RuntimeError("bapo_kernels has no second derivatives (create_graph=True); bapo_kernels.reference does")


def coefficients(
    padding: Tensor | None, stats: Statistics, g_logprobs: Tensor | None, g_entropy: Tensor | None
) -> Coefficients:
    """From the upstream gradients of some rows: of their log-probs at the ids (n, P), where those are not `padding`, and of their entropy
    (n,)."""
    if g_logprobs is None:
        picked = torch.zeros_like(stats.picked)
    else:
        picked = g_logprobs.to(stats.max.dtype)
        if padding is not None:
            picked = picked.masked_fill(padding, 0.0)
        # The log-prob of an id outside the vocabulary is NaN, and so is then the gradient.
        picked = picked.masked_fill(stats.picked.isnan() & (picked != 0), torch.nan)
    return Coefficients.of(picked, None if g_entropy is None else g_entropy.to(stats.max.dtype).contiguous())


def placed(sums: Gradients, rows: Selection, hidden: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of hidden (N, D), bias and the parts of the weight, in their dtypes, from those of `rows` of hidden."""
    d_hidden = None if sums.hidden is None else rows.put(sums.hidden.to(hidden.dtype))
    return d_hidden, None if sums.bias is None or bias is None else sums.bias.to(bias.dtype), *sums.weight


def zeros(ctx, *inputs: Tensor | None) -> Iterator[Tensor | None]:
    """Gradients of 0 for the inputs after the first that want one."""
    for t, need in zip(inputs, ctx.needs_input_grad[1:], strict=True):
        yield torch.zeros_like(t) if need and t is not None else None


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, hidden: Tensor, bias: Tensor | None, *parts: Tensor):
        problem = call.problem
        selection, score = problem.selection, None  # score: d logprob / d hidden
        if selection.rows == 0:
            empty = hidden.new_zeros(0, dtype=problem.dtype)
            stats = Statistics(empty, empty, empty if call.entropy else None, empty.reshape(problem.ids.shape))
        else:
            # The driver may copy the rows once more, so that nothing here holds them.
            take = partial(Rows, ids=problem.ids, inv_temperature=problem.inv_temperature)
            given = (Weight(parts), bias, problem.spec, call.entropy, call.budget)
            if call.frozen:
                assert isinstance(call.backend, GemmBackend)
                stats, score = frozen.forward(call.backend, take(selection.take(hidden)), *given)
            else:
                stats = chunked.forward(call.backend, take(selection.take(hidden)), *given)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, bias, score, stats.max, stats.log_sum, stats.entropy, stats.picked, *parts)
        logprobs = stats.logprobs_or_zero(problem.padding)
        return selection.put(logprobs), None if stats.entropy is None else selection.put(stats.entropy)

    @staticmethod
    def backward(ctx, g_logprobs: Tensor | None, g_entropy: Tensor | None):
        refuse_second_derivatives()
        call: Call = ctx.call
        problem, counted = call.problem, call.problem.selection
        hidden, bias, score, *saved = ctx.saved_tensors
        stats, weight = Statistics(*saved[:4]), Weight(tuple(saved[4:]))
        needs = Needs(ctx.needs_input_grad[1], ctx.needs_input_grad[3:], ctx.needs_input_grad[2])

        if g_logprobs is not None:
            g_logprobs = counted.take(g_logprobs)
        if g_entropy is not None:
            g_entropy = counted.take(g_entropy)
        coef = coefficients(problem.padding, stats, g_logprobs, g_entropy)
        if score is not None and (coef.entropy is None or not bool((coef.entropy != 0).any())):
            g = coef.probability[:, None]
            d_hidden = score.masked_fill(g == 0, 0.0).mul_(g)
            return None, counted.put(d_hidden.to(hidden.dtype)), None, *(None for _ in weight.parts)
        inner = Selection.of(coef.wanted())
        if inner.mask is not None:  # rows cannot be compacted: those without a gradient have coefficients of 0
            inner = Selection(inner.total)
        outer = counted.then(inner)
        if outer.rows == 0:
            return None, *zeros(ctx, hidden, bias, *weight.parts)

        inv_temperature = None if problem.inv_temperature is None else inner.take(problem.inv_temperature)
        rows = Rows(outer.take(hidden), inner.take(problem.ids), inv_temperature)
        stats, coef = stats.map(inner.take), coef.map(inner.take)
        sums = chunked.backward(call.backend, rows, stats, coef, weight, bias, problem.spec, needs, call.budget)
        return None, *placed(sums, outer, hidden, bias)


def attach(
    loss: Tensor, sums: Gradients, problem: Problem, hidden: Tensor, weight: Weight, bias: Tensor | None
) -> Tensor:
    """`loss` (0-d), with `sums` for its gradients, those of hidden for all N rows."""
    return _WithGradients.apply(loss, sums, problem, hidden, bias, *weight.parts)


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss: Tensor, sums: Gradients, problem: Problem, *inputs: Tensor | None):
        ctx.selection, ctx.vocab_size = problem.selection, problem.spec.vocab_size
        ctx.dtypes = [None if t is None else t.dtype for t in inputs]
        # Saved as any function saves its tensors: autograd frees them with the graph, and may keep them elsewhere.
        ctx.save_for_backward(sums.hidden, sums.bias, *sums.weight)
        return loss.clone()

    @staticmethod
    def backward(ctx, upstream: Tensor):
        refuse_second_derivatives()
        gradients = ctx.saved_tensors
        if _graph_is_kept():  # they will be wanted again, as they are
            gradients = [None if t is None else t.clone() for t in gradients]
        if not (upstream.device.type == "cpu" and upstream == 1):
            hidden, *others = gradients
            # Only what counts: the gradient of the rest is 0, even times inf.
            if hidden is not None:
                counted = ctx.selection
                hidden.mul_(counted.put(upstream.to(hidden.dtype).expand(counted.rows))[:, None])
            for t in others:
                if t is not None:
                    t[: ctx.vocab_size].mul_(upstream)
        given = (None if t is None else t.to(dtype) for t, dtype in zip(gradients, ctx.dtypes, strict=True))
        return None, None, None, *given


def _graph_is_kept() -> bool:
    """Whether the running backward leaves the graph for another one (`retain_graph`). PyTorch has no public form of the question; without
    an answer, yes is right, and costs a copy."""
    return getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)()
