"""What a policy loss is: a frozen, validated set of parameters and one rule on per-token tensors.

Every path (log-probs in hand, fused head, reference, checks) evaluates this rule and nothing else. A rule sees clean values: tokens
that do not count hold harmless ones, ratios cannot overflow.
"""

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from bapo_kernels.checks import Validated
from bapo_kernels.layout import Layout

MAX_LOG_RATIO = 20.0


def clip_flags(upper: Tensor, lower: Tensor) -> Tensor:
    """int8: +1 where stopped by the upper bound, -1 by the lower, else 0."""
    return upper.to(torch.int8) - lower.to(torch.int8)


# Of 1 - p: in fp32 that of a sure token may round to 0, and an infinite divergence is not what it means.
MIN_TAIL = 1e-8


def binary_kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL of Bernoulli(a) against Bernoulli(b), from their log-probs."""
    a = log_a.exp()
    tail_a, tail_b = ((-torch.expm1(t)).clamp(min=MIN_TAIL) for t in (log_a, log_b))
    return torch.where(a == 0, 0.0, a * (log_a - log_b)) + tail_a * torch.log(tail_a / tail_b)


def bounded_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamped to +-20, with gradient 0 where clamped. NaN stays, in the gradient too."""
    outside = log_ratio.abs() > MAX_LOG_RATIO
    return torch.where(outside, log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), log_ratio)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to +-20: finite, and with gradient 0 where clamped. NaN stays, in the gradient too."""
    return bounded_log_ratio(log_ratio).exp()


@dataclass(frozen=True)
class Tokens:
    """What a rule sees. All tensors have the layout of the batch; where `mask` is False they hold 0 (ratio: 1)."""

    logprobs: Tensor  # log pi(y); the rule's derivative with respect to it is what trains
    old_logprobs: Tensor  # proximal policy
    rollout_logprobs: Tensor  # behaviour policy, the sampler
    advantages: Tensor
    mask: Tensor  # bool
    layout: Layout
    dp_group: object = None
    topk: "Topk | None" = None  # only for losses that need it

    @property
    def log_ratio(self) -> Tensor:
        return self.logprobs - self.old_logprobs

    # Made with their graph, whatever the mode of whoever asks first: one graph for all, and so for one backward.
    @cached_property
    @torch.enable_grad()
    def bounded_log_ratio(self) -> Tensor:
        return bounded_log_ratio(self.log_ratio)

    @cached_property
    @torch.enable_grad()
    def ratio(self) -> Tensor:
        return self.bounded_log_ratio.exp()

    @cached_property
    def count(self) -> Tensor:
        """Number of active tokens, 0-d, in the dtype of the log-probs."""
        return self.mask.sum(dtype=self.logprobs.dtype)

    def sequence_sum(self, t: Tensor) -> Tensor:
        """Sum over the active tokens of each token's sequence, in the batch's layout."""
        return self.layout.to_tokens(self.layout.sequence_sum(self.active(t)))

    def sequence_mean(self, t: Tensor) -> Tensor:
        """Mean over the active tokens of each token's sequence, in the batch's layout."""
        count = self.layout.sequence_sum(self.mask.to(t.dtype)).clamp(min=1.0)
        return self.layout.to_tokens(self.layout.sequence_sum(self.active(t)) / count)

    def active(self, t: Tensor) -> Tensor:
        """`t` where the token counts, else 0."""
        return torch.where(self.mask, t, 0.0)

    def score(self, coefficient: Tensor) -> Tensor:
        """coefficient * logprobs; 0 where the coefficient is, also before a log-prob of -inf."""
        nothing = (coefficient == 0) & self.logprobs.isinf()
        return torch.where(nothing, 0.0, coefficient * self.logprobs)

    def choose(self, condition: Tensor, yes: float, no: float) -> Tensor:
        """One of two numbers for each token, in the dtype of the log-probs (`torch.where` of two numbers would round them to fp32)."""
        return torch.where(condition, yes, self.logprobs.new_full((), no))

    def mean(self, t: Tensor) -> Tensor:
        """Mean over active tokens; 0 if there are none."""
        return self.active(t).sum() / self.count.clamp(min=1)

    def means(self, *per_token: Tensor) -> tuple[Tensor, ...]:
        """The mean of each, in one sum."""
        rows = self.active(torch.stack(per_token)).flatten(1)
        return (rows.sum(1) / self.count.clamp(min=1)).unbind()


@dataclass(frozen=True)
class Topk:
    """Recorded ids of each token, (..., K): the layout and one more axis."""

    logprobs: Tensor  # log pi; the rule's derivative with respect to it trains too. 0 where not valid
    rollout_logprobs: Tensor  # the sampler's; -inf where not valid
    valid: Tensor  # bool: not padding, and not a repetition of an earlier id


@dataclass(frozen=True)
class TokenLoss:
    """What a rule returns."""

    loss: Tensor  # per token, before aggregation
    # int8: +1 stopped by the upper bound (or the dual clip), -1 by the lower, else 0, as where A = 0; None: no token ever is.
    clipped: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)  # 0-d, detached


class Loss(Validated):
    """Base of the loss objects: frozen dataclasses, validated when made. `aggregation` is the loss's published one."""

    name: ClassVar[str]
    aggregation: ClassVar[str] = "token-mean"
    needs: ClassVar[tuple[str, ...]] = ()  # inputs that have to be given
    token_local: ClassVar[bool] = False  # a token's loss hangs on no other token

    @property
    def brackets(self) -> tuple["Loss", ...]:
        """Token-local losses that have this one between them: a token's coefficient that is the same in all of them is its coefficient
        here, whatever the rest of the batch is. Empty where only the whole batch can tell."""
        return (self,) if self.token_local else ()

    def rule(self, x: Tokens) -> TokenLoss:
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields(self))})"  # type: ignore[arg-type]
