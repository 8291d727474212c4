"""The one-pass engine of `linear_policy_loss`: coefficients in the forward, so that the gradients are there before the backward.

`head/onepass.py` has what is V-sized. Here are the coefficients that it asks for, and the loss whose gradients are known.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from bapo_kernels.evaluation import Batch, PolicyLossOutput, evaluate
from bapo_kernels.head.api import Head
from bapo_kernels.head.autograd import coefficients, refuse_second_derivatives
from bapo_kernels.head.chunked import Coefficients, Gradients, KeepingBackend, Statistics
from bapo_kernels.head.onepass import OnePass
from bapo_kernels.head.rows import Selection


def one_pass(head: Head, batch: Batch, capacity: int) -> PolicyLossOutput:
    problem, options = head.problem, batch.options
    selection = problem.selection
    backend = cast(KeepingBackend, head.backend)  # the choice of the engine saw to it
    # The coefficients of single rows hang on no other rank, and ranks may have different numbers of blocks.
    alone = replace(batch, options=replace(options, dp_group=None))

    def early(number: Tensor, stats: Statistics) -> tuple[Coefficients, Tensor]:
        part = alone.take(number if selection.index is None else selection.index[number])
        padding = None if problem.padding is None else problem.padding[number]
        with torch.enable_grad():
            leaves = _leaves(stats, padding)
            logprobs, topk = leaves[0][:, 0], leaves[0][:, 1:] if problem.topk else None
            first, *others = (
                _gradients(part.terms(loss, part.tokens(logprobs, topk), leaves[1]).total, leaves)
                for loss in options.loss.brackets
            )
        settled = torch.ones_like(number, dtype=torch.bool)
        for other in others:
            settled &= (first[0] == other[0]).all(1) & (first[1] == other[1])
        return coefficients(padding, stats, first[0], first[1] if options.entropy_coef != 0 else None), settled

    run = OnePass(
        *(problem, backend, head.hidden, head.weight, head.bias),
        needs=head.needs,
        entropy=options.entropy_coef != 0,
        capacity=capacity,
    )
    with torch.no_grad():
        stats = run.forward(early)
    leaves = _leaves(stats, problem.padding)
    out = evaluate(batch, *head.shaped(*(selection.put(t) for t in leaves)))
    g_logprobs, g_entropy = _gradients(out.loss, leaves)
    with torch.no_grad():
        final = coefficients(problem.padding, stats, g_logprobs, g_entropy if options.entropy_coef != 0 else None)
        sums = run.finish(final, head.budget)
    inputs = (head.hidden, head.bias, *head.weight.parts)
    loss = _Known.apply(out.loss.detach(), selection, problem.spec.vocab_size, sums, *inputs)
    return out._replace(loss=loss)


def _leaves(stats: Statistics, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    assert stats.entropy is not None
    return stats.padded(padding).requires_grad_(), stats.entropy.detach().requires_grad_()


def _gradients(total: Tensor, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)


class _Known(torch.autograd.Function):
    """A loss with its gradients."""

    @staticmethod
    def forward(ctx, loss: Tensor, selection: Selection, vocab_size: int, sums: Gradients, *inputs: Tensor | None):
        ctx.selection, ctx.vocab_size = selection, vocab_size
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
        return None, None, None, None, *given


def _graph_is_kept() -> bool:
    """Whether the running backward leaves the graph for another one (`retain_graph`)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()
