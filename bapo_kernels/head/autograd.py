"""The one autograd path of the head, shared by all backends; ops.py has what it does."""

from collections.abc import Iterator

import torch
from torch import Tensor

from bapo_kernels.head.chunked import Gradients, Needs, Statistics, Weight
from bapo_kernels.head.inputs import Problem
from bapo_kernels.head.ops import Call, Inputs, gradients, statistics


def run(call: Call, hidden: Tensor, weight: Weight, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """hidden (N, D) -> log-probs at the ids (N, P) and entropy (N,) or None; 0 in rows that do not count."""
    return _Head.apply(call, hidden, bias, *weight.parts)


def refuse_second_derivatives() -> None:
    """At the start of a backward: under create_graph=True the gradient would come out as a constant, without a word."""
    if torch.is_grad_enabled():
        raise RuntimeError("bapo_kernels has no second derivatives (create_graph=True); bapo_kernels.reference does")


def zeros(ctx, *inputs: Tensor | None) -> Iterator[Tensor | None]:
    """Gradients of 0 for the inputs after the first that want one."""
    for t, need in zip(inputs, ctx.needs_input_grad[1:], strict=True):
        yield torch.zeros_like(t) if need and t is not None else None


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, hidden: Tensor, bias: Tensor | None, *parts: Tensor):
        stats, score = statistics(call, Inputs(hidden, Weight(parts), bias))
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, bias, score, stats.max, stats.log_sum, stats.entropy, stats.picked, *parts)
        logprobs, put = stats.logprobs_or_zero(call.problem.padding), call.problem.selection.put
        return put(logprobs), None if stats.entropy is None else put(stats.entropy)

    @staticmethod
    def backward(ctx, g_logprobs: Tensor | None, g_entropy: Tensor | None):
        refuse_second_derivatives()
        hidden, bias, score, *saved = ctx.saved_tensors
        stats, inputs = Statistics(*saved[:4]), Inputs(hidden, Weight(tuple(saved[4:])), bias)
        needs = Needs(ctx.needs_input_grad[1], ctx.needs_input_grad[3:], ctx.needs_input_grad[2])
        return None, *gradients(ctx.call, inputs, needs, stats, score, g_logprobs, g_entropy)


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
