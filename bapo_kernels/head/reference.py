"""The head in plain PyTorch on materialised logits: the oracle, and the documentation of the arithmetic."""

import torch
from torch import Tensor

from bapo_kernels.head.chunked import Weight
from bapo_kernels.head.inputs import Problem
from bapo_kernels.head.precision import full_precision


def run(
    problem: Problem, entropy: bool, hidden: Tensor, weight: Weight, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """hidden (N, D) -> log-probs at the ids (N, P) and entropy (N,) or None; 0 in rows that do not count."""
    selection, spec, acc = problem.selection, problem.spec, problem.dtype
    with full_precision(hidden.device.type):
        z = selection.take(hidden).to(acc) @ weight.rows(slice(spec.vocab_size), acc).t()
        if bias is not None:
            z = z + bias[: spec.vocab_size].to(acc)
        z = z * spec.scale
        if spec.softcap is not None:
            z = spec.softcap * torch.tanh(z / spec.softcap)
        if problem.inv_temperature is not None:
            z = z * problem.inv_temperature[:, None]
        log_p = torch.log_softmax(z, dim=-1)

        known = (problem.ids >= 0) & (problem.ids < spec.vocab_size)
        picked = log_p.gather(1, problem.ids.clamp(0, spec.vocab_size - 1)).masked_fill(~known, torch.nan)
        logprobs = selection.put(picked if problem.padding is None else picked.masked_fill(problem.padding, 0.0))
        if not entropy:
            return logprobs, None
        # A column of probability 0 adds 0 to the entropy and to its gradient, not 0 * -inf.
        finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
        return logprobs, selection.put(-(log_p.exp() * finite).sum(-1))
