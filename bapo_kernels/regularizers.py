"""What is added to the policy term: the KL estimators, and the choice of tokens by entropy."""

import torch
from torch import Tensor

from bapo_kernels.checks import is_number
from bapo_kernels.compiling import group_named, is_traced
from bapo_kernels.losses.base import Tokens, bounded_log_ratio

KL_ESTIMATORS = ("k1", "k2", "k3", "k3+")


def kl(estimator: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate of KL(pi || ref) for each token, differentiable in `logprobs`, with x = ref - logprobs (clamped before exp).

    k1  -x                 unbiased value; as a loss its expected gradient is 0
    k2  x^2 / 2            gradient of KL(pi || ref)
    k3  e^x - x - 1        unbiased value >= 0; gradient of KL(ref || pi) in expectation
    k3+                    value of k3 with the gradient of k2
    Schulman 2020, "Approximating KL divergence".
    """
    x = ref_logprobs - logprobs
    if estimator == "k1":
        return -x
    half_square = x.square() / 2
    if estimator == "k2":
        return half_square
    k3 = torch.expm1(bounded_log_ratio(x)) - x  # near 0, e^x - 1 by itself would be rounding
    if estimator == "k3":
        return k3
    return k3.detach() + torch.where(half_square.isinf(), 0.0, half_square - half_square.detach())


def keep_highest_entropy(x: Tokens, policy: Tensor, entropy: Tensor, fraction: float) -> Tensor:
    """The policy term, 0 but for the ceil(fraction * n) active tokens of highest entropy, ties at the threshold kept (Wang et al.
    2025, the 80/20 rule, arXiv 2506.01939); over the global batch with x.dp_group. NaN is not dropped, of term or entropy."""
    entropy = entropy.detach()
    threshold = _threshold(torch.where(x.mask, entropy, -torch.inf).flatten(), fraction, x.dp_group)
    kept = torch.where(x.mask & ((entropy >= threshold) | policy.isnan() | entropy.isnan()), policy, 0.0)
    return kept * torch.where(entropy.isnan(), torch.nan, 1.0)  # a product, so that the gradient is NaN as well


def _threshold(values: Tensor, fraction: float, group) -> Tensor:
    """0-d: the least of the ceil(fraction * n) highest of n values; -inf is none."""
    if group is not None and is_traced(values):
        return torch.ops.bapo_kernels.threshold_over_ranks(values, fraction, group.group_name)
    if group is not None:
        values = _gather(values, group)
    if values.numel() == 0:
        return values.new_full((), -torch.inf)
    count = (values > -torch.inf).sum()
    # A hair less, so that 0.28 * 25 = 7.000000000000001 keeps seven.
    keep = torch.ceil(count.double() * fraction - 1e-9).long().clamp(min=1)
    return values.sort(descending=True).values.gather(0, (keep - 1)[None])[0]


@torch.library.custom_op("bapo_kernels::threshold_over_ranks", mutates_args=())
def _threshold_over_ranks(values: Tensor, fraction: float, group: str) -> Tensor:
    return _threshold(values, fraction, group_named(group))


_threshold_over_ranks.register_fake(lambda values, fraction, group: values.new_empty(()))


def _gather(values: Tensor, group) -> Tensor:
    """Concatenation over ranks. Their batches may differ in size: the host has to learn the largest, and waits for it."""
    size = torch.full((1,), values.numel(), device=values.device)
    torch.distributed.all_reduce(size, torch.distributed.ReduceOp.MAX, group=group)
    longest = int(size)
    padded = torch.cat([values, values.new_full((longest - values.numel(),), -torch.inf)])
    parts = [torch.empty_like(padded) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat(parts)


def check(kl_coef: float, kl_estimator: str, entropy_coef: float, top_entropy: float | None) -> None:
    for name, value in (("kl_coef", kl_coef), ("entropy_coef", entropy_coef)):
        if not is_number(value):
            raise ValueError(f"{name} must be a finite number, got {value!r}")
    if kl_estimator not in KL_ESTIMATORS:
        raise ValueError(f"kl_estimator must be one of {', '.join(KL_ESTIMATORS)}, got {kl_estimator!r}")
    if top_entropy is not None and not (is_number(top_entropy) and 0 < top_entropy <= 1):
        raise ValueError(f"top_entropy must be a number in (0, 1] or None, got {top_entropy!r}")
