"""Corrections for the mismatch of training and inference engines: detached weights on the policy term, from old against rollout log-probs.

They look at the trainer's recomputed log-probs and the sampler's; rho = exp(old_logprobs - rollout_logprobs). They
weigh the policy term only, not the KL or the entropy bonus, and do not change denominators. Yao et al. 2025
(truncated IS for mismatched engines); IcePop: Ring-1T, and INTELLECT-3 (arXiv 2512.16144); KPop: arXiv 2606.15079.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bapo_kernels.checks import Validated
from bapo_kernels.compiling import register_fields
from bapo_kernels.losses.base import Tokens, binary_kl, bounded_exp

LEVELS = ("token", "sequence")


class Correction(Validated):
    """Base of the corrections."""

    level = "token"  # or "sequence": what the ratio is taken of

    def weight(self, x: Tokens) -> Tensor:
        """(layout) >= 0, without gradient."""
        raise NotImplementedError


def _ratio(x: Tokens, level: str) -> Tensor:
    old, rollout = x.old_logprobs, x.rollout_logprobs
    log_ratio = torch.where(old == rollout, 0.0, old - rollout)  # -inf on both sides is no mismatch
    log_ratio = log_ratio.clamp(-1e30, 1e30)  # inf and -inf in one sequence have a sum
    return bounded_exp(x.sequence_sum(log_ratio) if level == "sequence" else log_ratio)


def _inside(ratio: Tensor, low: float, high: float) -> Tensor:
    return ~((ratio < low) | (ratio > high))  # NaN is not outside: it stays, and shows


@dataclass(frozen=True)
class TruncatedIS(Correction):
    """Weight min(rho, cap); of each token, or of its sequence (the product over its active tokens)."""

    cap: float = 2.0
    level: str = "token"

    def __post_init__(self):
        self._require_numbers("cap", strict=True)
        self._require("level", self.level in LEVELS, "'token' or 'sequence'")

    def weight(self, x: Tokens) -> Tensor:
        return _ratio(x, self.level).clamp(max=self.cap)


@dataclass(frozen=True)
class MaskedIS(Correction):
    """Weight 1 where low <= rho <= high, else 0; of each token, or of its sequence."""

    low: float = 0.5
    high: float = 5.0
    level: str = "token"

    def __post_init__(self):
        _check_band(self)
        self._require("level", self.level in LEVELS, "'token' or 'sequence'")

    def weight(self, x: Tokens) -> Tensor:
        ratio = _ratio(x, self.level)
        one = torch.where(ratio.isnan(), torch.nan, torch.ones_like(ratio))
        return torch.where(_inside(ratio, self.low, self.high), one, 0.0)


@dataclass(frozen=True)
class IcePop(Correction):
    """Weight rho where low <= rho <= high, else 0 (some ports keep only the mask, which is `MaskedIS`)."""

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self):
        _check_band(self)

    def weight(self, x: Tokens) -> Tensor:
        ratio = _ratio(x, "token")
        return torch.where(_inside(ratio, self.low, self.high), ratio, 0.0)


@dataclass(frozen=True)
class KPop(Correction):
    """Weight 1 where the binary KL of the token's two probabilities is at most phi in both directions, else 0."""

    phi: float = 2.0

    def __post_init__(self):
        self._require_numbers("phi")

    def weight(self, x: Tokens) -> Tensor:
        trained, sampled = x.old_logprobs, x.rollout_logprobs
        divergence = torch.maximum(binary_kl(trained, sampled), binary_kl(sampled, trained))
        weight = torch.where(divergence > self.phi, 0.0, torch.ones_like(trained))
        return torch.where(trained.isnan() | sampled.isnan(), torch.nan, weight)


CORRECTIONS = (TruncatedIS, MaskedIS, IcePop, KPop)
for _cls in CORRECTIONS:
    register_fields(_cls)


def _check_band(correction: MaskedIS | IcePop) -> None:
    correction._require_numbers("low", "high")
    correction._require("high", correction.high >= correction.low, f"at least low={correction.low}")
