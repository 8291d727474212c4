"""Objectives of whole trajectories, without the approximations of a per-token loss."""

import torch
from torch import Tensor

from bapo_kernels.checks import check_floating, check_shape, is_number
from bapo_kernels.head.precision import accumulation_dtype
from bapo_kernels.layout import layout_and_mask


def exact_bpo_loss(
    logprobs: Tensor,  # (B, T) or (N,)
    rollout_logprobs: Tensor,  # layout
    kl: Tensor,  # layout
    rewards: Tensor,  # (B,) or (S,)
    values: Tensor,  # (B,) or (S,)
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    eta: float = 1.0,
    phi: float | Tensor = 1.0,
) -> Tensor:
    """BPO's residual of the Bellman equation, squared: the objective that the loss `bpo` linearises at pi = mu (arXiv 2609.15987).

        delta = eta (R - V) - sum_t [logprobs - rollout_logprobs + KL(mu || pi)]           of each sequence
        loss  = mean over sequences with an active token of phi delta^2 / (2 eta)

    Args:
        kl: KL(mu || pi) of each token over the full vocabulary, from `linear_kl`.
        rewards, values: R of each sequence, and the sampler's expected reward V (in practice the mean of its group).
        eta: inverse strength of the pull to the sampler, > 0.
        phi: weight of each sequence, or one number (in practice 1 / std of the group's rewards).

    Returns:
        A 0-d tensor, fp32 (fp64 for fp64 log-probs), differentiable in `logprobs` and `kl`.
    """
    layout, active = layout_and_mask(logprobs, mask, cu_seqlens)
    device = logprobs.device
    for name, t in (("rollout_logprobs", rollout_logprobs), ("kl", kl)):
        check_shape(name, t, tuple(layout.shape), "logprobs", device)
        check_floating(name, t)
    if not is_number(eta) or eta <= 0:
        raise ValueError(f"eta must be a finite number > 0, got {eta!r}")
    per_sequence = {"rewards": rewards, "values": values}
    if isinstance(phi, Tensor):
        per_sequence["phi"] = phi
    elif not is_number(phi):
        raise ValueError(f"phi must be a finite number or a tensor of one for each sequence, got {phi!r}")
    for name, t in per_sequence.items():
        check_shape(name, t, (layout.sequences,), f"the {layout.sequences} sequences of logprobs", device)
    acc = accumulation_dtype(logprobs)
    moved = logprobs.to(acc) - rollout_logprobs.detach().to(acc) + kl.to(acc)
    total = layout.sequence_sum(torch.where(active, moved, 0.0))
    counted = layout.sequence_sum(active.to(acc)) > 0
    # A sequence that does not count may hold anything in its reward and value, too.
    constants = {name: torch.where(counted, t.detach().to(acc), 0.0) for name, t in per_sequence.items()}
    delta = eta * (constants["rewards"] - constants["values"]) - total
    weight = constants.get("phi", phi)
    residual = torch.where(counted, weight * delta.square() / (2.0 * eta), 0.0)
    return residual.sum() / counted.sum().clamp(min=1)
