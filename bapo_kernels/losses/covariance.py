"""Clip-Cov and KL-Cov (Cui et al. 2025, "The entropy mechanism", arXiv 2505.22617): act on the tokens that take the entropy down.

The covariance of a token is (A - mean A)(logprob - mean logprob) over the active tokens of the call: as in public implementations it
depends on how a batch is split.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bapo_kernels.checks import is_whole
from bapo_kernels.compiling import is_traced
from bapo_kernels.losses.base import Loss, TokenLoss, Tokens
from bapo_kernels.losses.clip import clipped_surrogate


def _covariance(x: Tokens) -> Tensor:
    logprobs = x.logprobs.detach()
    return (x.advantages - x.mean(x.advantages)) * (logprobs - x.mean(logprobs))


def _largest(score: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
    """Mask of the `count` candidates of largest score, the earlier of equal ones first; no host synchronisation."""
    flat = torch.where(candidates, score, -torch.inf).flatten()
    order = flat.argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=order.device)
    return (rank.view_as(score) < count) & candidates


def _lottery(mask: Tensor, seed: int) -> Tensor:
    """A random number for each token, the same for a seed. An operator where a graph is compiled: a generator cannot be part of one."""
    generator = torch.Generator(mask.device).manual_seed(seed)
    return torch.rand(mask.shape, generator=generator, device=mask.device)


@torch.library.custom_op("bapo_kernels::lottery", _lottery, mutates_args=()).register_fake
def _(mask: Tensor, seed: int) -> Tensor:
    return mask.new_empty(mask.shape, dtype=torch.get_default_dtype())


def _share(fraction: float, mask: Tensor) -> Tensor:
    return (mask.sum().double() * fraction + 1e-9).long().clamp(min=1)


@dataclass(frozen=True)
class ClipCov(Loss):
    """PPO's clip, and no gradient for a few random tokens of high covariance.

        loss = PPO's; 0 for max(int(fraction n), 1) random ones of the unclipped tokens with cov_low < covariance < cov_high

    `seed` fixes the choice. The authors' scripts set the PPO clip to 1.0 / 1.0. Chosen tokens do not count as clipped.
    """

    fraction: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    seed: int = 0

    name: ClassVar[str] = "clip-cov"

    def __post_init__(self):
        self._require_numbers("fraction", "clip_low", "clip_high")
        self._require("fraction", self.fraction <= 1, "a number in [0, 1]")
        self._require_numbers("cov_low", "cov_high", low=-float("inf"))
        self._require("cov_high", self.cov_high > self.cov_low, f"above cov_low={self.cov_low}")
        self._require("seed", is_whole(self.seed) and 0 <= self.seed < 2**63, "an integer in [0, 2**63)")

    def rule(self, x: Tokens) -> TokenLoss:
        term = clipped_surrogate(x, 1.0 - self.clip_low, 1.0 + self.clip_high)
        covariance = _covariance(x)
        candidates = x.mask & (term.clipped == 0) & (covariance > self.cov_low) & (covariance < self.cov_high)
        draw = torch.ops.bapo_kernels.lottery if is_traced(x.mask) else _lottery
        chosen = _largest(draw(x.mask, self.seed), candidates, _share(self.fraction, x.mask))
        return TokenLoss(torch.where(chosen & ~term.loss.isnan(), 0.0, term.loss), term.clipped)


@dataclass(frozen=True)
class KLCov(Loss):
    """No clip; a pull to the old policy on the tokens of largest covariance.

        loss = -r A,  + beta |logprob - old| on the max(int(fraction n), 1) tokens of largest covariance
        coef = -A r,  + beta sign(logprob - old) there

    Public defaults for `fraction` run from 2e-4 (the authors' 32 B scripts, verl) to 0.2.
    """

    fraction: float = 2e-4
    beta: float = 1.0

    name: ClassVar[str] = "kl-cov"

    def __post_init__(self):
        self._require_numbers("fraction", "beta")
        self._require("fraction", self.fraction <= 1, "a number in [0, 1]")

    def rule(self, x: Tokens) -> TokenLoss:
        chosen = _largest(_covariance(x), x.mask, _share(self.fraction, x.mask))
        loss = -x.ratio * x.advantages
        return TokenLoss(loss if self.beta == 0 else loss + torch.where(chosen, self.beta * x.log_ratio.abs(), 0.0))
