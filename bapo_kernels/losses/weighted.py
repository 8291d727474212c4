"""Losses -sg(weight) A logprob with a weight of each token: Reinforce, CISPO, DPPO, BPO; and two that bend the ratio: SAPO, DRO."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bapo_kernels.losses.base import Loss, TokenLoss, Tokens, binary_kl, bounded_exp, clip_flags


@dataclass(frozen=True)
class Reinforce(Loss):
    """loss = -A logprob, coef = -A. No ratio, no clip (Williams 1992)."""

    name: ClassVar[str] = "reinforce"
    token_local: ClassVar[bool] = True

    def rule(self, x: Tokens) -> TokenLoss:
        return TokenLoss(x.score(-x.advantages))


@dataclass(frozen=True)
class CISPO(Loss):
    """REINFORCE with a truncated importance weight; no token is ever dropped.

        loss = -sg(clip(r, ratio_low, ratio_high)) A logprob          coef = -A clip(r)

    CISPO (MiniMax-M1, arXiv 2506.13585). The bounds are ratios: some trainers write offsets from 1 instead (1 + eps), and some clip
    below at 1 - eps by default, which the paper does not. No token counts as clipped.
    """

    ratio_low: float | None = None
    ratio_high: float = 5.0

    name: ClassVar[str] = "cispo"
    token_local: ClassVar[bool] = True

    def __post_init__(self):
        self._require_numbers("ratio_low", optional=True)
        self._require_numbers("ratio_high", strict=True)
        self._require(
            "ratio_high", self.ratio_low is None or self.ratio_high >= self.ratio_low, f"at least {self.ratio_low}"
        )

    def rule(self, x: Tokens) -> TokenLoss:
        weight = x.ratio.detach().clamp(self.ratio_low, self.ratio_high)
        return TokenLoss(x.score(-weight * x.advantages))


@dataclass(frozen=True)
class DPPO(Loss):
    """A trust region in probability instead of ratio: tokens that moved too far from the sampler, in the direction of A, are masked.

        loss = -A M sg(min(p/q, ratio_cap)) logprob          coef = -A M min(p/q, ratio_cap)

        tv:  M = 0 where A > 0 and p - q > delta_high,   or A < 0 and q - p > delta_low
        kl:  M = 0 where A > 0, p > q and D > delta_high, or A < 0, p < q and D > delta_low,   D = KL of the Bernoullis (q || p)
        topk-tv, topk-kl: as kl, with D the total variation, or KL(q || p), over the recorded ids and the rest as one

    DPPO (arXiv 2602.04879); q is the sampler's probability (`rollout_logprobs`), not the proximal policy's as in one public port. The
    truncation at `ratio_cap` keeps its gradient, so only masked tokens count as clipped. The top-k forms read `rollout_topk_ids` and
    `rollout_topk_logprobs`, which should hold the sampled token, as samplers return it; their direction is that token's.
    """

    divergence: str = "tv"
    delta_low: float = 0.15
    delta_high: float = 0.15
    ratio_cap: float = 20.0

    name: ClassVar[str] = "dppo-tv"
    token_local: ClassVar[bool] = True

    def __post_init__(self):
        self._require("divergence", self.divergence in DIVERGENCES, f"one of {', '.join(DIVERGENCES)}")
        self._require_numbers("delta_low", "delta_high")
        self._require_numbers("ratio_cap", strict=True)

    def rule(self, x: Tokens) -> TokenLoss:
        logprobs = x.logprobs.detach()
        p, q = logprobs.exp(), x.rollout_logprobs.exp()
        divergence = self._divergence(logprobs, x)
        upper = (x.advantages > 0) & (p > q) & (divergence > self.delta_high)
        lower = (x.advantages < 0) & (p < q) & (divergence > self.delta_low)
        weight = bounded_exp(logprobs - x.rollout_logprobs).clamp(max=self.ratio_cap)
        weight = torch.where(upper | lower, 0.0, weight)
        weight = torch.where(divergence.isnan(), torch.nan, weight)  # of a record that is NaN
        return TokenLoss(x.score(-weight * x.advantages), clip_flags(upper, lower))

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("rollout_topk_ids", "rollout_topk_logprobs") if self.divergence.startswith("topk") else ()

    def _divergence(self, logprobs: Tensor, x: Tokens) -> Tensor:
        if self.divergence == "tv":
            return (logprobs.exp() - x.rollout_logprobs.exp()).abs()
        if self.divergence == "kl":
            return binary_kl(x.rollout_logprobs, logprobs)
        assert x.topk is not None
        p_head, q_head = x.topk.logprobs.detach().exp() * x.topk.valid, x.topk.rollout_logprobs.exp()
        p_rest, q_rest = ((1.0 - t.sum(-1)).clamp(min=1e-12) for t in (p_head, q_head))
        if self.divergence == "topk-tv":
            return ((p_head - q_head).abs().sum(-1) + (p_rest - q_rest).abs()) / 2.0
        terms = torch.where(q_head == 0, 0.0, q_head * torch.log(q_head / p_head))
        return terms.sum(-1) + q_rest * torch.log(q_rest / p_rest)


DIVERGENCES = ("tv", "kl", "topk-tv", "topk-kl")


@dataclass(frozen=True)
class DPPOKL(DPPO):
    """DPPO with the KL divergence and the bounds published for it."""

    divergence: str = "kl"
    delta_low: float = 0.05
    delta_high: float = 0.05

    name: ClassVar[str] = "dppo-kl"


@dataclass(frozen=True)
class BPO(Loss):
    """Bellman policy optimization: REINFORCE weighted by the ratio of the tails, smoothed.

        omega = (1 + smoothing - q) / (1 + smoothing - p)
        loss = -A M sg(min(omega, cap)) logprob          coef = -A M min(omega, cap)
        M = 0 where A > 0 and omega > 1 + clip_high, or A < 0 and omega < 1 - clip_low

    BPO (arXiv 2609.15987), q the sampler's probability. Without smoothing, omega = (1 - q) / (1 - p) makes this the gradient of
    logprob + KL of the Bernoullis (q || p). The paper gives no clip bounds: 0.2 is TRL's default. The cap binds only where A < 0, and
    keeps its gradient. For partial rollouts of several policies, q is that of the policy which made the token.
    """

    smoothing: float = 0.1
    cap: float = 3.0
    clip_low: float = 0.2
    clip_high: float = 0.2

    name: ClassVar[str] = "bpo"
    aggregation: ClassVar[str] = "seq-mean-token-mean"
    token_local: ClassVar[bool] = True

    def __post_init__(self):
        self._require_numbers("smoothing", "cap", strict=True)
        self._require_numbers("clip_low", "clip_high")

    def rule(self, x: Tokens) -> TokenLoss:
        # 1 - p from the log-prob: near p = 1 the difference of rounded probabilities would be mostly rounding.
        tail_p, tail_q = -torch.expm1(x.logprobs.detach()), -torch.expm1(x.rollout_logprobs)
        omega = (self.smoothing + tail_q) / (self.smoothing + tail_p)
        upper = (x.advantages > 0) & (omega > 1.0 + self.clip_high)
        lower = (x.advantages < 0) & (omega < 1.0 - self.clip_low)
        weight = torch.where(upper | lower, 0.0, omega.clamp(max=self.cap))
        return TokenLoss(x.score(-weight * x.advantages), clip_flags(upper, lower))


@dataclass(frozen=True)
class SAPO(Loss):
    """A soft gate instead of a clip.

        loss = -A (4 / tau) sigmoid(tau (r - 1))          coef = -A 4 s (1 - s) r,   s = sigmoid(tau (r - 1))

    tau = `tau_pos` where A > 0, else `tau_neg`. SAPO (Qwen, arXiv 2511.20347). On-policy the coefficient is -A.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    name: ClassVar[str] = "sapo"
    aggregation: ClassVar[str] = "seq-mean-token-mean"
    token_local: ClassVar[bool] = True

    def __post_init__(self):
        self._require_numbers("tau_pos", "tau_neg", strict=True)

    def rule(self, x: Tokens) -> TokenLoss:
        tau = x.choose(x.advantages > 0, self.tau_pos, self.tau_neg)
        return TokenLoss(-x.advantages * (4.0 / tau) * torch.sigmoid(tau * (x.ratio - 1.0)))


@dataclass(frozen=True)
class DRO(Loss):
    """REINFORCE with a quadratic pull to the old policy.

        loss = -(A logprob - beta/2 (logprob - old)^2)          coef = -A + beta (logprob - old)

    DRO (Richemond et al. 2024, arXiv 2405.19107), in the per-token form of verl.
    """

    beta: float = 0.1

    name: ClassVar[str] = "dro"
    token_local: ClassVar[bool] = True

    def __post_init__(self):
        self._require_numbers("beta")

    def rule(self, x: Tokens) -> TokenLoss:
        loss = x.score(-x.advantages)
        return TokenLoss(loss if self.beta == 0 else loss + self.beta / 2 * x.log_ratio.square())
