"""The one-pass engine of `linear_policy_loss`: the coefficients that `head/onepass.py` asks for, early of some rows, then of all."""

from dataclasses import replace

import torch
from torch import Tensor

from bapo_kernels.evaluation import Batch, PolicyLossOutput, evaluate
from bapo_kernels.head.api import Head
from bapo_kernels.head.autograd import attach
from bapo_kernels.head.chunked import Coefficients, Statistics
from bapo_kernels.head.eager import GemmBackend
from bapo_kernels.head.onepass import OnePass
from bapo_kernels.head.ops import coefficients


def one_pass(head: Head, batch: Batch, capacity: int) -> PolicyLossOutput:
    problem, options = head.problem, batch.options
    assert isinstance(head.backend, GemmBackend)
    # The coefficients of single rows hang on no other rank, and ranks may have different numbers of blocks.
    alone = replace(batch, options=replace(options, dp_group=None))
    wants_entropy = options.entropy_coef != 0

    def leaves_of(stats: Statistics, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        assert stats.entropy is not None
        return stats.logprobs_or_zero(padding).requires_grad_(), stats.entropy.detach().requires_grad_()

    def coefficients_of(total: Tensor, leaves: tuple, stats: Statistics, padding: Tensor | None) -> Coefficients:
        g_logprobs, g_entropy = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return coefficients(padding, stats, g_logprobs, g_entropy if wants_entropy else None)

    def early(number: Tensor, stats: Statistics) -> tuple[Coefficients, Tensor]:
        part = alone.take(problem.selection.place(number))
        padding = None if problem.padding is None else problem.padding[number]
        found = []
        with torch.enable_grad():
            leaves = leaves_of(stats, padding)
            logprobs, topk = leaves[0][:, 0], leaves[0][:, 1:] if problem.topk else None
            for loss in options.loss.brackets:
                total = part.terms(loss, part.tokens(logprobs, topk), leaves[1]).total
                found.append(coefficients_of(total, leaves, stats, padding))
        settled = torch.ones_like(number, dtype=torch.bool)
        for other in found[1:]:
            settled &= (found[0].picked == other.picked).all(1)
        return found[0], settled

    run = OnePass(
        *(problem, head.backend, head.hidden, head.weight, head.bias),
        needs=head.needs,
        entropy=wants_entropy,
        capacity=capacity,
    )
    with torch.no_grad():
        stats = run.forward(early)
    leaves = leaves_of(stats, problem.padding)
    out = evaluate(batch, *head.shaped(*map(problem.selection.put, leaves)))
    with torch.no_grad():
        sums = run.finish(coefficients_of(out.loss, leaves, stats, problem.padding), head.budget)
    return out._replace(loss=attach(out.loss.detach(), sums, problem, head.hidden, head.weight, head.bias))
