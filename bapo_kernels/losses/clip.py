"""PPO's clipped surrogate and the losses that are it with other bounds: PPO, GRPO, DAPO, DCPO.

    loss = -min(r A, clip(r, low, high) A)          coef = -A r, and 0 where clipped:  A > 0 and r > high,  or  A < 0 and r < low

Schulman et al. 2017 (PPO, arXiv 1707.06347); Shao et al. 2024 (GRPO, 2402.03300); Yu et al. 2025 (DAPO, 2503.14476). The dual clip (Ye
et al. 2020, 1912.09729) bounds the loss of A < 0 by dual_clip |A|. Clipping is strict: a token exactly on a bound keeps its gradient
(`torch.min` would split it between its two equal branches).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bapo_kernels.losses.base import Loss, TokenLoss, Tokens, clip_flags


def clipped_surrogate(
    x: Tokens,
    low: float | Tensor,
    high: float | Tensor,
    *,
    dual_clip: float | None = None,
    ratio: Tensor | None = None,
    metrics: dict[str, Tensor] | None = None,
) -> TokenLoss:
    """The surrogate with bounds on the ratio (the token's, if not another is given): numbers, or tensors that broadcast over tokens."""
    ratio, advantage = x.ratio if ratio is None else ratio, x.advantages
    inside = ratio.detach().clamp(low, high)  # type: ignore[arg-type]
    upper = (advantage > 0) & (ratio > inside)
    lower = (advantage < 0) & (ratio < inside)
    used = torch.where(upper | lower, inside, ratio)
    if dual_clip is not None:
        stopped = (advantage < 0) & (ratio > dual_clip)
        used = torch.where(stopped, dual_clip, used)
        upper = upper | stopped
    return TokenLoss(-advantage * used, clip_flags(upper, lower), metrics or {})


@dataclass(frozen=True)
class GRPO(Loss):
    """Clipped surrogate on the token ratio, bounds 1 - clip_low and 1 + clip_high; each sequence weighs the same.

    GRPO (Shao et al. 2024, arXiv 2402.03300). `dual_clip` (> 1, off by default as in the paper): where A < 0 and r > dual_clip the
    loss stays at dual_clip |A|, without gradient. Some trainers have it always on, at 3.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    name: ClassVar[str] = "grpo"
    aggregation: ClassVar[str] = "seq-mean-token-mean"
    token_local: ClassVar[bool] = True

    def __post_init__(self):
        self._require_numbers("clip_low", "clip_high")
        self._require_numbers("dual_clip", low=1.0, strict=True, optional=True)

    def rule(self, x: Tokens) -> TokenLoss:
        return clipped_surrogate(x, 1.0 - self.clip_low, 1.0 + self.clip_high, dual_clip=self.dual_clip)


@dataclass(frozen=True)
class PPO(GRPO):
    """GRPO's rule with every token weighing the same (Schulman et al. 2017, arXiv 1707.06347)."""

    name: ClassVar[str] = "ppo"
    aggregation: ClassVar[str] = "token-mean"


@dataclass(frozen=True)
class DAPO(GRPO):
    """GRPO's rule with the higher upper bound and token mean of DAPO (Yu et al. 2025, arXiv 2503.14476)."""

    clip_high: float = 0.28

    name: ClassVar[str] = "dapo"
    aggregation: ClassVar[str] = "token-mean"


@dataclass(frozen=True)
class DCPO(Loss):
    """The clipped surrogate with bounds of each token's own, wider the rarer the token was: |r - 1| p <= eps, solved for r.

        low = (1 + sqrt(max(0, 1 - 4 eps_low / q))) / 2,   high = min((1 + sqrt(1 + 4 eps_high / q)) / 2, ratio_cap),   q = exp(old)

    DCPO (Yang et al. 2025, arXiv 2509.02333). `low` is never below 1/2. The authors' scripts and README give other values for eps.
    """

    eps_low: float = 0.16
    eps_high: float = 0.2
    ratio_cap: float = 10.0
    dual_clip: float | None = None

    name: ClassVar[str] = "dcpo"
    token_local: ClassVar[bool] = True

    def __post_init__(self):
        self._require_numbers("eps_low", "eps_high")
        self._require_numbers("ratio_cap", low=1.0)
        self._require_numbers("dual_clip", low=1.0, strict=True, optional=True)

    def rule(self, x: Tokens) -> TokenLoss:
        q = x.old_logprobs.exp().clamp(min=torch.finfo(x.old_logprobs.dtype).tiny)  # 0 / 0 is no bound
        wide_low, wide_high = (torch.full_like(q, 4.0 * eps) / q for eps in (self.eps_low, self.eps_high))
        low = (1.0 + (1.0 - wide_low).clamp(min=0.0).sqrt()) / 2.0
        high = ((1.0 + (1.0 + wide_high).sqrt()) / 2.0).clamp(max=self.ratio_cap)
        return clipped_surrogate(x, low, high, dual_clip=self.dual_clip)
