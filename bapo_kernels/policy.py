"""The policy loss: per-token statistics -> rule -> aggregation -> total, with its coefficients and metrics.

Everything here is vectors of N numbers under plain autograd; whatever is V-sized happened before, in the head.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from bapo_kernels import aggregation as agg
from bapo_kernels import losses, regularizers
from bapo_kernels.checks import (
    check_flag,
    check_floating,
    check_group,
    check_ignore_index,
    check_mask,
    check_shape,
    check_tensor,
)
from bapo_kernels.controller import BapoBounds, find_bounds
from bapo_kernels.corrections import Correction
from bapo_kernels.head.api import linear_logprobs
from bapo_kernels.head.precision import accumulation_dtype
from bapo_kernels.layout import Layout, layout_and_mask
from bapo_kernels.losses import triton as fused
from bapo_kernels.losses.base import Loss, TokenLoss, Tokens
from bapo_kernels.metrics import metrics
from bapo_kernels.topk import check_topk, make_topk

ENGINES = ("auto", "recompute")
WHAT_TO_RECORD = {
    "old_logprobs": "the log-probs of the targets under the policy before this update",
    "rollout_logprobs": "their log-probs when the sampler drew them (vLLM: SamplingParams(logprobs=0), SGLang: return_logprob=True)",
    "rollout_topk_ids": "the sampler's most likely ids at each token (vLLM: SamplingParams(logprobs=K), SGLang: top_logprobs_num=K)",
    "rollout_topk_logprobs": "their log-probs as sampled from (vLLM: logprobs_mode='processed_logprobs'; SGLang: top_logprobs_num=K)",
}


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


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """The options that both public functions share, validated."""

    loss: Loss
    correction: Correction | None = None
    aggregation: str | None = None
    normalizer: float | Tensor | None = None
    max_length: int | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    top_entropy: float | None = None
    dp_group: object = None
    return_tokens: bool = False

    def __post_init__(self):
        agg.check(self.chosen_aggregation, self.normalizer, self.max_length)
        regularizers.check(self.kl_coef, self.kl_estimator, self.entropy_coef, self.top_entropy)
        check_group("dp_group", self.dp_group)
        check_flag("return_tokens", self.return_tokens)
        if not isinstance(self.correction, Correction | None):
            allowed = ", ".join(c.__name__ for c in Correction.__subclasses__())
            raise ValueError(f"correction must be None or one of {allowed}, got {self.correction!r}")

    @property
    def chosen_aggregation(self) -> str:
        return self.loss.aggregation if self.aggregation is None else self.aggregation

    @property
    def needs_topk(self) -> bool:
        return "rollout_topk_ids" in self.loss.needs

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef != 0 or self.top_entropy is not None


def check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")


@dataclass(frozen=True)
class Recorded:
    """Constants of a batch that were recorded before this step. `of` validates them, and drops what the options do not read."""

    advantages: Tensor  # layout
    old_logprobs: Tensor | None  # layout
    rollout_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    topk_ids: Tensor | None  # layout + (K,)
    topk_logprobs: Tensor | None  # the sampler's

    @classmethod
    def of(
        cls,
        layout: Layout,
        active: Tensor,
        options: PolicyOptions,
        *,
        advantages: Tensor,
        old_logprobs: Tensor | None,
        rollout_logprobs: Tensor | None,
        ref_logprobs: Tensor | None = None,
        rollout_topk_ids: Tensor | None = None,
        rollout_topk_logprobs: Tensor | None = None,
    ) -> "Recorded":
        device = active.device
        check_tensor("advantages", advantages, device)
        if options.kl_coef == 0:
            ref_logprobs = None
        elif ref_logprobs is None:
            raise ValueError(
                f"kl_coef={options.kl_coef} needs ref_logprobs: the reference model's log-probs of the targets"
            )
        given = {"old_logprobs": old_logprobs, "rollout_logprobs": rollout_logprobs, "ref_logprobs": ref_logprobs}
        topk = {"rollout_topk_ids": rollout_topk_ids, "rollout_topk_logprobs": rollout_topk_logprobs}
        for name in options.loss.needs:
            if {**given, **topk}[name] is None:
                raise ValueError(f"loss {options.loss} needs {name}: {WHAT_TO_RECORD[name]}")
        for name, t in given.items():
            if t is not None:
                check_shape(name, t, tuple(layout.shape), "the batch", device)
                check_floating(name, t)
        if options.needs_topk:
            assert rollout_topk_ids is not None and rollout_topk_logprobs is not None
            check_topk(rollout_topk_ids, rollout_topk_logprobs, active, layout)
        else:
            rollout_topk_ids = rollout_topk_logprobs = None
        return cls(
            layout.expand("advantages", advantages),
            **given,
            topk_ids=rollout_topk_ids,
            topk_logprobs=rollout_topk_logprobs,
        )


@torch.compiler.disable
def policy_loss(
    logprobs: Tensor,  # (B, T) or (N,)
    advantages: Tensor,  # layout, (B,), (B, 1) or (S,)
    *,
    loss: str | Loss = "bapo",
    entropy: Tensor | None = None,  # layout
    topk_logprobs: Tensor | None = None,  # layout + (K,)
    mask: Tensor | None = None,  # layout
    cu_seqlens: Tensor | None = None,  # (S + 1,)
    old_logprobs: Tensor | None = None,  # layout
    rollout_logprobs: Tensor | None = None,  # layout
    ref_logprobs: Tensor | None = None,  # layout
    rollout_topk_ids: Tensor | None = None,  # layout + (K,)
    rollout_topk_logprobs: Tensor | None = None,  # layout + (K,)
    correction: Correction | None = None,
    aggregation: str | None = None,
    normalizer: float | Tensor | None = None,
    max_length: int | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
    top_entropy: float | None = None,
    dp_group=None,
    return_tokens: bool = False,
) -> PolicyLossOutput:
    """Policy loss of per-token log-probs that a trainer already has; `linear_policy_loss` starts from hidden states instead.

        total = aggregate(policy term + kl_coef * KL - entropy_coef * entropy)

    Batches are padded (B, T), or packed (N,) with `cu_seqlens`; a 1-D batch without it is one sequence. Everything but `logprobs` and
    `entropy` is a constant. Sums are fp32 (fp64 for fp64 log-probs).

    Args:
        logprobs: log pi(y) of the sampled tokens under the policy in training.
        advantages: one for each token, or for each sequence.
        loss: a name of `losses.available()` or a loss object, which holds the hyper-parameters.
        entropy: per-token entropy; needed by `entropy_coef` and `top_entropy`, otherwise only reported.
        topk_logprobs, rollout_topk_ids, rollout_topk_logprobs: the policy's and the sampler's log-probs at recorded ids (-1 is padding),
            read by score centering and the top-k forms of DPPO.
        correction: weight on the policy term against the mismatch of trainer and sampler: `TruncatedIS`, `MaskedIS`, `IcePop`, `KPop`.
        mask: tokens that count (bool or 0-1). What a masked token holds, in any input, changes nothing.
        old_logprobs: proximal policy, the denominator of the ratio; None: the current one (on-policy, ratio 1). Where a trainer does
            not recompute them, pass the sampler's here too: `rollout_logprobs` alone does not enter the ratio.
        rollout_logprobs: behaviour policy, as recorded by the sampler, for BAPO's weights, BPO, DPPO, TOPR, score centering and
            corrections; None: old_logprobs.
        aggregation: "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm" (with `max_length`) or
            "token-sum"; None: the loss's own.
        normalizer: replaces the count of tokens (token-mean) or sequences. With the global count, micro-batches and ranks add up.
        kl_coef, kl_estimator, ref_logprobs: KL to a reference policy, "k1", "k2", "k3" or "k3+"; 0 never reads ref_logprobs.
        entropy_coef: weight of the entropy bonus.
        top_entropy: keep the policy term only of this fraction of tokens, those of highest entropy; denominators stay.
        dp_group: torch.distributed group over which batch-wide quantities (BAPO's bounds, the entropy threshold) are taken.
        return_tokens: also per-token log-probs, entropy, ratio, loss, coefficient and clip flag.

    Returns:
        `PolicyLossOutput(loss, metrics, tokens)`. With no active token the loss is 0, with a `grad_fn` and zero gradients.

    Raises:
        ValueError: naming the argument, what came and what is allowed, before any work.
    """
    options = PolicyOptions(
        loss=losses.resolve(loss),
        correction=correction,
        aggregation=aggregation,
        normalizer=normalizer,
        max_length=max_length,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        entropy_coef=entropy_coef,
        top_entropy=top_entropy,
        dp_group=dp_group,
        return_tokens=return_tokens,
    )
    layout, active = layout_and_mask(logprobs, mask, cu_seqlens)
    if entropy is not None:
        check_shape("entropy", entropy, tuple(layout.shape), "logprobs", logprobs.device)
        check_floating("entropy", entropy)
    if options.needs_entropy and entropy is None:
        raise ValueError("entropy_coef and top_entropy need entropy: the per-token entropy of the policy")
    recorded = Recorded.of(
        layout,
        active,
        options,
        advantages=advantages,
        old_logprobs=old_logprobs,
        rollout_logprobs=rollout_logprobs,
        ref_logprobs=ref_logprobs,
        rollout_topk_ids=rollout_topk_ids,
        rollout_topk_logprobs=rollout_topk_logprobs,
    )
    if recorded.topk_ids is None:
        topk_logprobs = None
    elif topk_logprobs is None:
        raise ValueError(
            f"loss {options.loss} needs topk_logprobs: the policy's log-probs at rollout_topk_ids (linear_logprobs(topk_ids=...))"
        )
    else:
        check_shape("topk_logprobs", topk_logprobs, tuple(recorded.topk_ids.shape), "rollout_topk_ids", logprobs.device)
        check_floating("topk_logprobs", topk_logprobs)
    return _evaluate(logprobs, entropy, topk_logprobs, active, layout, recorded, options)


@torch.compiler.disable
def linear_policy_loss(
    hidden: Tensor,  # (B, T, D) or (N, D)
    weight: Tensor,  # (V, D)
    targets: Tensor,  # (B, T) or (N,)
    advantages: Tensor,  # layout, (B,), (B, 1) or (S,)
    *,
    loss: str | Loss = "bapo",
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_topk_ids: Tensor | None = None,
    rollout_topk_logprobs: Tensor | None = None,
    correction: Correction | None = None,
    aggregation: str | None = None,
    normalizer: float | Tensor | None = None,
    max_length: int | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
    top_entropy: float | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    dp_group=None,
    tp_group=None,
    return_tokens: bool = False,
    backend: str = "auto",
    engine: str = "auto",
    memory_budget: int | None = None,
) -> PolicyLossOutput:
    """Policy loss straight from hidden states and the head's weight: `linear_logprobs` and `policy_loss` in one call.

    The logits are made a slice of the vocabulary at a time; rows that do not count are dropped before the head, and rows without a
    gradient (masked, clipped, advantage 0) before the backward. Arguments are those of the two functions; `temperature` may also be
    one for each packed sequence, (S,).

    Args:
        engine: "auto" or "recompute", which makes the logits again in the backward of the rows that have a gradient.

    Returns:
        `PolicyLossOutput(loss, metrics, tokens)`; `loss` is differentiable in `hidden`, `weight` and `bias`.
    """
    options = PolicyOptions(
        loss=losses.resolve(loss),
        correction=correction,
        aggregation=aggregation,
        normalizer=normalizer,
        max_length=max_length,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        entropy_coef=entropy_coef,
        top_entropy=top_entropy,
        dp_group=dp_group,
        return_tokens=return_tokens,
    )
    check_engine(engine)
    check_tensor("hidden", hidden, None)
    layout = Layout.of("hidden", hidden.shape[:-1], cu_seqlens, hidden.device)
    check_shape("targets", targets, tuple(layout.shape), f"hidden {tuple(hidden.shape)}", hidden.device)
    check_ignore_index(ignore_index)
    active = targets != ignore_index
    if mask is not None:
        check_mask(mask, tuple(layout.shape), f"hidden {tuple(hidden.shape)}", hidden.device)
        active = active & (mask != 0)
    recorded = Recorded.of(
        layout,
        active,
        options,
        advantages=advantages,
        old_logprobs=old_logprobs,
        rollout_logprobs=rollout_logprobs,
        ref_logprobs=ref_logprobs,
        rollout_topk_ids=rollout_topk_ids,
        rollout_topk_logprobs=rollout_topk_logprobs,
    )
    if isinstance(temperature, Tensor):
        temperature = layout.expand("temperature", temperature)
    statistics = linear_logprobs(
        hidden,
        weight,
        targets,
        bias=bias,
        mask=mask,
        ignore_index=ignore_index,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        vocab_size=vocab_size,
        topk_ids=recorded.topk_ids,
        return_entropy=True,
        tp_group=tp_group,
        backend=backend,
        memory_budget=memory_budget,
    )
    with fused.using(backend):
        return _evaluate(
            statistics.logprobs, statistics.entropy, statistics.topk_logprobs, active, layout, recorded, options
        )


@torch.compiler.disable
def bapo_bounds(
    logprobs: Tensor,
    advantages: Tensor,
    *,
    loss: str | Loss = "bapo",
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    dp_group=None,
) -> BapoBounds:
    """The bounds that BAPO uses on this batch, found once where a trainer then calls the loss in pieces (`BAPO.fixed`).

    Arguments as in `policy_loss`; `loss` is "bapo" or a `BAPO` object. No gradient and no host synchronisation.

    Returns:
        `BapoBounds(c_low, c_high, contribution, positive, negative)`, 0-d fp64 tensors on the batch's device. With S- = 0 the
        contribution is 1 as a share and inf otherwise; with S+ = S- = 0 it is 0.
    """
    rule = losses.resolve(loss)
    if not isinstance(rule, losses.BAPO):
        raise ValueError(f"loss must be 'bapo' or a BAPO object, got {rule.name!r}")
    options = PolicyOptions(loss=rule, dp_group=dp_group)
    layout, active = layout_and_mask(logprobs, mask, cu_seqlens)
    recorded = Recorded.of(
        layout,
        active,
        options,
        advantages=advantages,
        old_logprobs=old_logprobs,
        rollout_logprobs=rollout_logprobs,
    )
    acc = accumulation_dtype(logprobs)
    x = _tokens(_clean(logprobs.detach(), active, acc), recorded, active, layout, dp_group)
    return fused.find_bounds(rule, x) or find_bounds(rule, x)


def _clean(t: Tensor, active: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(active, t.to(dtype), 0.0)


def _tokens(logprobs: Tensor, recorded: Recorded, active: Tensor, layout: Layout, dp_group) -> Tokens:
    """What the rule sees; `logprobs` are clean already."""

    def clean(t: Tensor) -> Tensor:
        return _clean(t.detach(), active, logprobs.dtype)

    old = logprobs.detach() if recorded.old_logprobs is None else clean(recorded.old_logprobs)
    rollout = old if recorded.rollout_logprobs is None else clean(recorded.rollout_logprobs)
    return Tokens(logprobs, old, rollout, clean(recorded.advantages), active, layout, dp_group)


def _evaluate(
    logprobs: Tensor,
    entropy: Tensor | None,
    topk_logprobs: Tensor | None,
    active: Tensor,
    layout: Layout,
    recorded: Recorded,
    options: PolicyOptions,
) -> PolicyLossOutput:
    acc = accumulation_dtype(logprobs)
    learned = (t for t in (logprobs, entropy, topk_logprobs) if t is not None)
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in learned)
    # Coefficients are wanted even in inference mode, whose tensors cannot take part in autograd: copies made here are ordinary.
    with torch.inference_mode(False), torch.set_grad_enabled(trains or options.return_tokens):
        active = active.clone() if active.is_inference() else active
        lp, h = _clean(logprobs, active, acc), None if entropy is None else _clean(entropy, active, acc)
        if options.return_tokens and not lp.requires_grad:
            lp = lp.detach().requires_grad_()
        x = _tokens(lp, recorded, active, layout, options.dp_group)
        if topk_logprobs is not None:
            assert recorded.topk_ids is not None and recorded.topk_logprobs is not None
            x = replace(x, topk=make_topk(topk_logprobs.to(acc), recorded.topk_ids, recorded.topk_logprobs, active))

        term = fused.evaluate(options.loss, x) or options.loss.rule(x)
        policy = term.loss if options.correction is None else term.loss * options.correction.weight(x).detach()
        if options.top_entropy is not None:
            assert h is not None
            policy = regularizers.keep_highest_entropy(x, policy, h, options.top_entropy)
        per_token, kl = policy, None
        if recorded.ref_logprobs is not None:
            kl = regularizers.kl(options.kl_estimator, lp, _clean(recorded.ref_logprobs.detach(), active, acc))
            per_token = per_token + options.kl_coef * kl
        if options.entropy_coef != 0:
            assert h is not None
            per_token = per_token - options.entropy_coef * h
        weights = agg.token_weights(
            options.chosen_aggregation, active, layout, options.normalizer, options.max_length, acc
        )
        total = x.active(weights * per_token).sum()
        reported = metrics(x, term, x.active(weights * policy).sum(), kl, h)
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
