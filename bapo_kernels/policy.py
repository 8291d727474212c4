"""The public functions of the policy loss: from log-probs, or straight from hidden states."""

from torch import Tensor

from bapo_kernels import losses
from bapo_kernels.checks import (
    check_floating,
    check_ignore_index,
    check_mask,
    check_shape,
    check_tensor,
)
from bapo_kernels.compiling import compilable
from bapo_kernels.controller import BapoBounds, find_bounds
from bapo_kernels.corrections import Correction
from bapo_kernels.early import one_pass
from bapo_kernels.evaluation import Batch, PolicyLossOutput, evaluate
from bapo_kernels.head.api import Head
from bapo_kernels.head.engines import check_engine, choose
from bapo_kernels.head.precision import accumulation_dtype
from bapo_kernels.layout import Layout, layout_and_mask
from bapo_kernels.losses import triton as fused
from bapo_kernels.losses.base import Loss
from bapo_kernels.options import PolicyOptions, Recorded
from bapo_kernels.planning import work_of


@compilable
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
    batch = Batch.of(active, layout, recorded, options, accumulation_dtype(logprobs))
    return evaluate(batch, logprobs, entropy, topk_logprobs)


@compilable
def linear_policy_loss(
    hidden: Tensor,  # (B, T, D) or (N, D)
    weight: Tensor | tuple[Tensor, ...],  # (V, D)
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
        engine: "auto", or "recompute", "one-pass" or "frozen": whether the logits of rows with a gradient are made again in the backward,
            kept within `memory_budget` until their coefficients are known, or, with a weight that needs no gradient, not needed there.
            The result is the same to rounding; `plan` says which one "auto" takes and why.

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
    head = Head.of(
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
        tp_group=tp_group,
        backend=backend,
        memory_budget=memory_budget,
    )
    batch = Batch.of(active, layout, recorded, options, head.problem.dtype)
    with fused.using(backend):
        if head.backend is None:
            if engine != "auto":
                raise ValueError(f"engine={engine!r} cannot serve this call: backend='reference' holds all logits")
            return evaluate(batch, *head.statistics(entropy=True))
        work = work_of(head, head.backend, batch, engine)
        chosen = choose(engine, work).engine
        if chosen == "one-pass":
            return one_pass(head, batch, work.capacity)
        return evaluate(batch, *head.statistics(entropy=True, frozen=chosen == "frozen"))


@compilable
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
    batch = Batch.of(active, layout, recorded, options, acc)
    x = batch.tokens(batch.clean(logprobs.detach()))
    return fused.find_bounds(rule, x) or find_bounds(rule, x)
