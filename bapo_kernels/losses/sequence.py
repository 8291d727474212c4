"""Losses whose ratio belongs to a whole sequence: GSPO and LUSPO, GMPO, VESPO, TOPR.

All are in token form: each token carries the weight of its sequence, so that token advantages and every aggregation work. The exponent
of a sequence is clamped like that of a token.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bapo_kernels.losses.base import MAX_LOG_RATIO, Loss, TokenLoss, Tokens, bounded_exp, clip_flags
from bapo_kernels.losses.clip import clipped_surrogate


def _through_token(log_ratio: Tensor, logprobs: Tensor) -> Tensor:
    """exp of a sequence's log-ratio whose gradient reaches each token's own log-prob, as if it were that token's; 0 where clamped."""
    value = bounded_exp(log_ratio).detach()
    clamped = (log_ratio.detach().abs() > MAX_LOG_RATIO) | logprobs.isinf()
    return value * (1.0 + torch.where(clamped, 0.0, logprobs - logprobs.detach()))


@dataclass(frozen=True)
class GSPO(Loss):
    """Clipped surrogate on the sequence ratio s = exp(mean over the sequence of logprobs - old_logprobs).

        loss = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)       coef = -A s, and 0 where clipped

    GSPO (Zheng et al. 2025, arXiv 2507.18071), in the form of its GSPO-token: the ratio of a token is sg(s) exp(logprob -
    sg(logprob)), with the gradient of the sequence loss under seq-mean-token-mean. Some trainers fix that aggregation and ignore what
    is asked for; under token-mean, sequences weigh by their length.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    name: ClassVar[str] = "gspo"
    aggregation: ClassVar[str] = "seq-mean-token-mean"

    def __post_init__(self):
        self._require_numbers("clip_low", "clip_high")

    def rule(self, x: Tokens) -> TokenLoss:
        ratio = _through_token(x.sequence_mean(x.log_ratio), x.logprobs)
        return clipped_surrogate(x, 1.0 - self.clip_low, 1.0 + self.clip_high, ratio=ratio)


@dataclass(frozen=True)
class LUSPO(GSPO):
    """GSPO's sequence loss times the length of the sequence, so that long answers are not discounted (as in TRL's `luspo`)."""

    name: ClassVar[str] = "luspo"
    aggregation: ClassVar[str] = "seq-mean-token-sum"


@dataclass(frozen=True)
class GMPO(Loss):
    """Geometric mean of the token ratios of a sequence, each clipped in log space on the side that its advantage makes greedy.

        m = mean over the sequence of min(log r, clip_high) where A > 0, max(log r, -clip_low) where A < 0
        loss = -A exp(m)            coef = -A exp(m), and 0 at tokens that were clipped

    GMPO (Zhao et al. 2025, arXiv 2507.20673). `clip_low`, `clip_high` are log-ratios. One public implementation clips the log-ratio to
    [1 - eps, 1 + eps], another averages over the micro-batch whatever the aggregation.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    name: ClassVar[str] = "gmpo"
    aggregation: ClassVar[str] = "seq-mean-token-mean"

    def __post_init__(self):
        self._require_numbers("clip_low", "clip_high")

    def rule(self, x: Tokens) -> TokenLoss:
        upper = (x.advantages > 0) & (x.log_ratio > self.clip_high)
        lower = (x.advantages < 0) & (x.log_ratio < -self.clip_low)
        clipped = torch.where(upper, self.clip_high, torch.where(lower, -self.clip_low, x.log_ratio))
        ratio = _through_token(x.sequence_mean(clipped), x.logprobs)
        ratio = torch.where(upper | lower, ratio.detach(), ratio)
        return TokenLoss(-ratio * x.advantages, clip_flags(upper, lower))


@dataclass(frozen=True)
class VESPO(Loss):
    """REINFORCE with a smooth weight phi(w) of the sequence ratio w = exp(sum over the sequence of logprobs - old_logprobs).

        loss = -sg(phi(w)) A logprob,   phi(w) = exp(lambda - lambda w) w^k          coef = -A phi(w)

    phi(1) = 1. log w is clamped to [log 1e-8, 20], after each of its terms to +-20. `k_pos`, `lambda_pos` where A >=
    0, `k_neg`, `lambda_neg` where A < 0. VESPO, as in TRL and Liger.
    """

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0

    name: ClassVar[str] = "vespo"
    aggregation: ClassVar[str] = "token-mean"

    def __post_init__(self):
        self._require_numbers("k_pos", "lambda_pos", "k_neg", "lambda_neg")

    def rule(self, x: Tokens) -> TokenLoss:
        log_ratio = x.log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        log_w = x.sequence_sum(log_ratio).clamp(math.log(1e-8), MAX_LOG_RATIO)
        positive = x.advantages >= 0
        k = x.choose(positive, self.k_pos, self.k_neg)
        lam = x.choose(positive, self.lambda_pos, self.lambda_neg)
        phi = torch.exp(lam + k * log_w - lam * log_w.exp())
        return TokenLoss(x.score(-phi * x.advantages))


@dataclass(frozen=True)
class TOPR(Loss):
    """Tapered REINFORCE: positives at full weight, negatives by how likely the policy still makes them.

        loss = -w A logprob,   w = 1 where A >= 0, else sg(clip(rho, floor, cap))          coef = -w A

    rho is pi / mu (`rollout_logprobs`) of the whole sequence, or of the token with ratio="token". TOPR (Le Roux et al. 2025, arXiv
    2503.14286) has the sequence ratio; two public ports take the token's. No token counts as clipped: the weight keeps its gradient.
    """

    ratio: str = "sequence"
    floor: float = 0.0
    cap: float = 1.0

    name: ClassVar[str] = "topr"
    aggregation: ClassVar[str] = "seq-mean-token-mean"

    def __post_init__(self):
        self._require("ratio", self.ratio in ("sequence", "token"), "'sequence' or 'token'")
        self._require_numbers("floor", "cap")
        self._require("cap", self.cap >= self.floor, f"at least floor={self.floor}")

    @property
    def token_local(self) -> bool:  # type: ignore[override]
        return self.ratio == "token"

    def rule(self, x: Tokens) -> TokenLoss:
        log_rho = (x.logprobs - x.rollout_logprobs).detach()
        rho = bounded_exp(x.sequence_sum(log_rho) if self.ratio == "sequence" else log_rho)
        weight = torch.where(x.advantages < 0, rho.clamp(self.floor, self.cap), 1.0)
        return TokenLoss(x.score(-weight * x.advantages))
