"""Score centering: REINFORCE whose drift under a stale sampler is removed with recorded top-k log-probs."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bapo_kernels.losses.base import Loss, TokenLoss, Tokens, bounded_exp

WEIGHTS = ("none", "tis", "mis")


@dataclass(frozen=True)
class ScoreCentering(Loss):
    """REINFORCE minus the mean of its score under the sampler, which is not 0 once the policy has moved.

        loss = -A [sg(f(p_y/q_y)) logprob - sum_{v in H} sg(c_v) topk_logprob_v],   c_v = q_v f(p_v/q_v) - alpha p_v
        rho = (1 - sum_H q) / (1 - sum_H p), both tails at least `tail_floor`,      alpha = rho f(1/rho)

    H are the recorded ids of the token (`rollout_topk_ids`, `rollout_topk_logprobs`), q the sampler's probabilities, normalised over the
    whole vocabulary, p the policy's; outside H the sampler is taken to be rho p. `weight` is f: "none" 1, "tis" min(r, tis_cap), "mis"
    r inside [mis_low, mis_high], else 0. Score centering (Marek & Ryabinin, arXiv 2609.20807): no clip, group-centred rewards without std,
    token mean. Coefficients: -A f on logprob and +A c_v on each topk_logprob_v; `tokens.coef` is the first. The value of the loss
    means nothing by itself, only its gradient. Padding (id -1) has no weight, and an id that comes twice counts once.

    Record what was sampled from: temperature applied, no top-p or top-k (vLLM: logprobs_mode="processed_logprobs").
    """

    weight: str = "none"
    tis_cap: float = 2.0
    mis_low: float = 0.5
    mis_high: float = 5.0
    tail_floor: float = 1e-6

    name: ClassVar[str] = "score-centering"
    needs: ClassVar[tuple[str, ...]] = ("rollout_topk_ids", "rollout_topk_logprobs")
    token_local: ClassVar[bool] = True

    def __post_init__(self):
        self._require("weight", self.weight in WEIGHTS, f"one of {', '.join(WEIGHTS)}")
        self._require_numbers("tis_cap", "tail_floor", strict=True)
        self._require("tail_floor", self.tail_floor < 1, "a number in (0, 1)")
        self._require_numbers("mis_low", "mis_high")
        self._require("mis_high", self.mis_high >= self.mis_low, f"at least mis_low={self.mis_low}")

    def rule(self, x: Tokens) -> TokenLoss:
        assert x.topk is not None
        f_y = self._weighted(torch.ones_like(x.logprobs), bounded_exp((x.logprobs - x.rollout_logprobs).detach()))
        p = x.topk.logprobs.detach().exp() * x.topk.valid
        q = x.topk.rollout_logprobs.exp()  # 0 where not valid
        tail_p, tail_q = (1.0 - p.sum(-1)).clamp(min=self.tail_floor), (1.0 - q.sum(-1)).clamp(min=self.tail_floor)
        alpha = self._weighted(tail_q / tail_p, tail_p / tail_q)
        c = torch.where(x.topk.valid, self._head(p, q) - alpha[..., None] * p, 0.0)
        # A coefficient of 0 before a log-prob of -inf adds nothing.
        centre = torch.where(c != 0, c * x.topk.logprobs, 0.0).sum(-1)
        # Where the policy excludes an id of the sampler's, the centre is infinite; without an advantage its part is still 0.
        centre = torch.where((x.advantages == 0) & centre.isinf(), 0.0, x.advantages * centre)
        return TokenLoss(x.score(-x.advantages * f_y) + centre)

    def _weighted(self, scale: Tensor, ratio: Tensor) -> Tensor:
        """scale * f(ratio)"""
        if self.weight == "none":
            return scale
        if self.weight == "tis":
            return scale * ratio.clamp(max=self.tis_cap)
        return torch.where((ratio < self.mis_low) | (ratio > self.mis_high), 0.0, scale * ratio)

    def _head(self, p: Tensor, q: Tensor) -> Tensor:
        """q f(p/q) without the quotient, which q = 0 would spoil."""
        if self.weight == "none":
            return q
        if self.weight == "tis":
            return torch.minimum(p, self.tis_cap * q)
        return torch.where((p < self.mis_low * q) | (p > self.mis_high * q), 0.0, p)
