"""Per-token statistics -> rule -> aggregation -> total, with its coefficients and metrics.

Everything here is vectors of N numbers under plain autograd; whatever is V-sized happens in the head.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from bapo_kernels import aggregation as agg
from bapo_kernels import regularizers
from bapo_kernels.layout import Layout
from bapo_kernels.losses import triton as fused
from bapo_kernels.losses.base import Loss, TokenLoss, Tokens
from bapo_kernels.metrics import metrics
from bapo_kernels.options import PolicyOptions, Recorded
from bapo_kernels.topk import make_topk


class TokenDetail(NamedTuple):
    """Per token, in the batch's layout, detached; 0 where masked."""

    logprobs: Tensor
    entropy: Tensor | None
    ratio: Tensor  # exp(logprobs - old_logprobs)
    loss: Tensor  # policy term before aggregation
    coef: Tensor  # d loss / d logprobs
    clipped: Tensor  # int8: +1 stopped by the upper bound, -1 by the lower, else 0


class PolicyLossOutput(NamedTuple):
    loss: Tensor  # 0-d, differentiable
    metrics: dict[str, Tensor]
    tokens: TokenDetail | None


@dataclass(frozen=True)
class Batch:
    """All there is to a batch but its log-probs."""

    active: Tensor  # bool, layout: tokens that count
    layout: Layout
    recorded: Recorded  # clean
    options: PolicyOptions
    weights: Tensor  # layout: of each token in the total
    correction: Tensor | None = None  # layout; None: there is none, or it hangs on the log-probs

    @classmethod
    def of(
        cls, active: Tensor, layout: Layout, recorded: Recorded, options: PolicyOptions, acc: torch.dtype
    ) -> "Batch":
        # Inference mode's tensors cannot take part in autograd, which coefficients need even there: what is made here is ordinary.
        with torch.inference_mode(False), torch.no_grad():
            active = active.clone() if active.is_inference() else active
            weights = agg.token_weights(
                options.chosen_aggregation, active, layout, options.normalizer, options.max_length, acc
            )
            recorded = recorded.clean(active, acc)
            batch = cls(active, layout, recorded, options, weights)
            if options.correction is None or recorded.old_logprobs is None:
                return batch
            x = batch.tokens(torch.zeros_like(weights))
            return replace(batch, correction=options.correction.weight(x))

    def take(self, rows: Tensor) -> "Batch":
        """Some tokens that count, by their number in the flattened layout, as a batch of their own: one sequence, but with the weights
        that they have in this batch."""

        def pick(t: Tensor) -> Tensor:
            return t.reshape(self.layout.shape.numel(), *t.shape[len(self.layout.shape) :])[rows]

        return replace(
            self,
            active=torch.ones_like(rows, dtype=torch.bool),
            layout=Layout(rows.shape, None, 1),
            recorded=self.recorded.map(pick),
            weights=pick(self.weights),
            correction=None if self.correction is None else pick(self.correction),
        )

    def clean(self, t: Tensor) -> Tensor:
        """0 where the token does not count."""
        return torch.where(self.active, t.to(self.weights.dtype), 0.0)

    def tokens(self, logprobs: Tensor, topk_logprobs: Tensor | None = None) -> Tokens:
        """What a rule sees; `logprobs` are clean already."""
        given, topk = self.recorded, None
        old = logprobs.detach() if given.old_logprobs is None else given.old_logprobs
        rollout = old if given.rollout_logprobs is None else given.rollout_logprobs
        if topk_logprobs is not None:
            assert given.topk_ids is not None and given.topk_logprobs is not None
            topk = make_topk(topk_logprobs.to(logprobs.dtype), given.topk_ids, given.topk_logprobs, self.active)
        return Tokens(logprobs, old, rollout, given.advantages, self.active, self.layout, self.options.dp_group, topk)

    def terms(self, loss: Loss, x: Tokens, entropy: Tensor | None) -> "Terms":
        """Policy, KL and entropy term of each token; `entropy` is clean already."""
        term = fused.evaluate(loss, x) or loss.rule(x)
        policy, options = term.loss, self.options
        if options.correction is not None:
            weight = options.correction.weight(x).detach() if self.correction is None else self.correction
            policy = policy * weight
        if options.top_entropy is not None:
            assert entropy is not None
            policy = regularizers.keep_highest_entropy(x, policy, entropy, options.top_entropy)
        per_token, kl = policy, None
        if self.recorded.ref_logprobs is not None:
            kl = regularizers.kl(options.kl_estimator, x.logprobs, self.recorded.ref_logprobs)
            per_token = per_token + options.kl_coef * kl
        if options.entropy_coef != 0:
            assert entropy is not None
            per_token = per_token - options.entropy_coef * entropy
        policy_loss = x.active(self.weights * policy).sum()
        total = policy_loss if per_token is policy else x.active(self.weights * per_token).sum()
        return Terms(term, policy, kl, policy_loss, total)


class Terms(NamedTuple):
    term: TokenLoss
    policy: Tensor  # layout: with correction and choice by entropy
    kl: Tensor | None
    policy_loss: Tensor  # 0-d
    total: Tensor  # 0-d


def evaluate(batch: Batch, logprobs: Tensor, entropy: Tensor | None, topk_logprobs: Tensor | None) -> PolicyLossOutput:
    options = batch.options
    learned = (t for t in (logprobs, entropy, topk_logprobs) if t is not None)
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in learned)
    with torch.inference_mode(False), torch.set_grad_enabled(trains or options.return_tokens):
        lp, h = batch.clean(logprobs), None if entropy is None else batch.clean(entropy)
        if options.return_tokens and not lp.requires_grad:
            lp = lp.detach().requires_grad_()
        x = batch.tokens(lp, topk_logprobs)
        term, policy, kl, policy_loss, total = batch.terms(options.loss, x, h)
        reported = metrics(x, term, policy_loss, kl, h)
        tokens = _detail(x, term, policy, h) if options.return_tokens else None
    return PolicyLossOutput(total if trains else total.detach(), reported, tokens)


def _detail(x: Tokens, term: TokenLoss, policy: Tensor, entropy: Tensor | None) -> TokenDetail:
    scalar = x.active(policy).sum()
    coef = torch.zeros_like(x.logprobs)
    if scalar.requires_grad:
        (coef,) = torch.autograd.grad(scalar, [x.logprobs], retain_graph=True, materialize_grads=True)
    clipped = torch.zeros_like(coef, dtype=torch.int8) if term.clipped is None else term.clipped
    return TokenDetail(
        logprobs=x.logprobs.detach(),
        entropy=None if entropy is None else entropy.detach(),
        ratio=term.ratio if isinstance(term, fused.FusedTerm) else x.active(x.ratio).detach(),
        loss=x.active(policy).detach(),
        coef=x.active(coef).detach(),
        clipped=torch.where(x.mask, clipped, 0),
    )
