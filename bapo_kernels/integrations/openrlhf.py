"""OpenRLHF: our losses in the place of its PolicyLoss.

    from bapo_kernels.integrations.openrlhf import use_policy_loss

    use_policy_loss("bapo")                    # in the actor's process, before the actor is made

The name `PolicyLoss` in OpenRLHF's actor is replaced by a subclass of what it stood for: the constructor, its checks, what the forward
takes, and those numbers of the answer that do not hang on the loss stay the installed version's.
"""

import inspect
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from bapo_kernels import losses
from bapo_kernels.corrections import Correction
from bapo_kernels.integrations.packages import Package
from bapo_kernels.losses.base import Tokens
from bapo_kernels.policy import policy_loss

OPENRLHF = Package("openrlhf", "0.11.0", "0.11.2")
ACTOR = "openrlhf.trainer.ray.ppo_actor"
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")

# Arguments of the constructor that are honoured here: of every version, and of one or the other.
SHARED = {"clip_eps_low", "clip_eps_high", "dual_clip", "token_level_loss", "policy_loss_type"}
CORRECTION = {"is_correction_level", "is_correction_mode", "is_correction_gating", "is_correction_threshold"}
CORRECTION_UNTIL_0_11_1 = {"enable_vllm_is_correction", "vllm_is_truncated_threshold", "vllm_is_correction_type"}
FORWARD = [
    "log_probs", "old_log_probs", "advantages", "action_mask", "rollout_log_probs",
    "dp_size", "batch_num_tokens", "global_batch_size",
]  # fmt: skip
DEFAULT_CLIP = 0.2


@dataclass(frozen=True)
class Gate(Correction):
    """OpenRLHF's correction for engines that disagree, rho = exp(old_logprobs - rollout_logprobs):

    mode "mask": rho where the statistic is within [low, high], else 0; "clip": rho, clamped to [low, high].
    The statistic is rho, or the divergence of the two Bernoulli distributions; of the token, or its mean over the sequence (of rho: the
    geometric one).
    """

    unit: str  # "token", "seq": what the statistic is of
    mode: str  # "mask", "clip"
    gating: str  # "ratio", "binary_kl", "tv"
    low: float
    high: float

    def weight(self, x: Tokens) -> Tensor:
        log_rho = x.old_logprobs - x.rollout_logprobs
        if self.mode == "clip":
            return log_rho.exp().clamp(self.low, self.high)
        statistic = log_rho if self.gating == "ratio" else self._divergence(x)
        if self.unit == "seq":
            statistic = x.sequence_mean(statistic)
        if self.gating == "ratio":
            statistic = statistic.exp()
        outside = (statistic < self.low) | (statistic > self.high)  # NaN is not outside: it stays, and shows
        return torch.where(outside, 0.0, log_rho.exp())

    def _divergence(self, x: Tokens) -> Tensor:
        p, q = (t.exp().clamp(1e-6, 1 - 1e-6) for t in (x.rollout_logprobs, x.old_logprobs))
        if self.gating == "tv":
            return (p - q).abs()
        return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def use_policy_loss(loss: str | losses.Loss = "bapo", *, aggregation: str | None = None, dp_group: Any = None) -> None:
    """Let OpenRLHF's actors that are made from now on, in this process, train with `loss`.

    Ray's workers are processes of their own: name a function that calls this as their setup hook,
    `ray.init(runtime_env={"worker_process_setup_hook": function})`, or as "module.function" in the runtime environment of the job.

    OpenRLHF's options keep their meaning. `--actor.eps_clip_low_high` and `--actor.dual_clip` go to a loss that is given by name and has
    such parameters, where they are not at their defaults; a loss given as an object has its own. Where an option would have no
    effect, making the actor is a ValueError that names it. The correction for mismatch weighs the policy term.

    BAPO's batch is the micro-batch of this rank (`--train.micro_batch_size`), and with `dp_group` that of all ranks together: the
    larger it is, the closer to the paper; or give the bounds, `BAPO.fixed(c_low, c_high)`.

    Args:
        loss: a name of `bk.losses.available()`, or a loss object.
        aggregation: "token-mean", "seq-mean-token-mean" or "seq-mean-token-sum"; None: OpenRLHF's `--actor.loss_agg_mode`, and the mean
            over sequences for GSPO, as there.
        dp_group: torch.distributed group over which BAPO's bounds are found, or a function without arguments that returns it, called at
            each step.

    Raises:
        ValueError: for a loss that needs what OpenRLHF does not record. ImportError: where it is missing. RuntimeError: where its
            actor or PolicyLoss are not what was tested.
    """
    rule = losses.resolve(loss)
    if "rollout_topk_ids" in rule.needs:
        raise ValueError(f"loss {rule} needs rollout_topk_ids, which OpenRLHF does not record")
    if aggregation is not None and aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation must be None or one of {', '.join(AGGREGATIONS)}, got {aggregation!r}")
    current = OPENRLHF.hook(ACTOR, "PolicyLoss")
    OPENRLHF.check_version()
    installed = getattr(current, "replaces", current)
    OPENRLHF.module(ACTOR).PolicyLoss = policy_loss_class(installed, loss, aggregation=aggregation, dp_group=dp_group)  # type: ignore[attr-defined]


def restore_policy_loss() -> None:
    """OpenRLHF's own loss again, for actors that are made from now on."""
    current = OPENRLHF.hook(ACTOR, "PolicyLoss")
    OPENRLHF.module(ACTOR).PolicyLoss = getattr(current, "replaces", current)  # type: ignore[attr-defined]


def policy_loss_class(
    installed: type, loss: str | losses.Loss, *, aggregation: str | None = None, dp_group: Any = None
) -> type:
    """A subclass of OpenRLHF's PolicyLoss that trains with `loss`. RuntimeError if `installed` is not what was tested."""
    _check_signatures(installed)

    class PolicyLoss(installed):
        replaces = installed

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.rule = _with_flags(loss, self.clip_eps_low, self.clip_eps_high, self.dual_clip)
            gspo = isinstance(self.rule, losses.GSPO)
            if self.policy_loss_type == "gspo" and not gspo:
                raise ValueError(f"policy_loss_type='gspo' has no effect on loss {self.rule.name!r}: leave it at 'ppo'")
            flag = "token-mean" if self.token_level_loss and not gspo else "seq-mean-token-mean"
            self.aggregation = aggregation or flag
            self.gate = _gate(self)

        def forward(
            self,
            log_probs: Tensor,  # (B, T)
            old_log_probs: Tensor,  # (B, T)
            advantages: Tensor,  # (B, T)
            action_mask: Tensor | None = None,  # (B, T)
            rollout_log_probs: Tensor | None = None,  # (B, T)
            dp_size: int = 1,
            batch_num_tokens: float | Tensor | None = None,
            global_batch_size: float | Tensor | None = None,
        ) -> tuple[Tensor | None, ...]:
            """(loss, clip_ratio, ppo_kl, vllm_kl), and is_filter_ratio in versions that have it. The loss and the share of clipped tokens
            are ours, the others the installed version's."""
            if self.gate is not None and rollout_log_probs is None:
                raise ValueError("the correction for mismatch needs rollout_log_probs, and OpenRLHF gave none")
            normalizer = batch_num_tokens if self.aggregation == "token-mean" else global_batch_size
            # OpenRLHF's GSPO has no weight for the mismatch: it takes the ratio to the sampler instead of the old policy.
            to_sampler = self.gate is not None and self.policy_loss_type == "gspo"
            out = policy_loss(
                log_probs,
                advantages,
                loss=self.rule,
                mask=action_mask,
                old_logprobs=rollout_log_probs if to_sampler else old_log_probs,
                rollout_logprobs=rollout_log_probs,
                correction=None if to_sampler else self.gate,
                aggregation=self.aggregation,
                normalizer=normalizer,
                dp_group=dp_group() if callable(dp_group) else dp_group,
            )
            with torch.no_grad():
                mask = torch.ones_like(log_probs) if action_mask is None else action_mask
                _, _, *rest = super().forward(log_probs, old_log_probs, advantages, mask, rollout_log_probs)
            clipped = out.metrics["clip_frac_low"] + out.metrics["clip_frac_high"]
            return out.loss if normalizer is None else out.loss * dp_size, clipped, *rest

    return PolicyLoss


def _check_signatures(installed: type) -> None:
    has = set(inspect.signature(installed).parameters)
    takes = list(inspect.signature(installed.forward).parameters)[1:]  # type: ignore[attr-defined]
    if has - SHARED not in (CORRECTION, CORRECTION_UNTIL_0_11_1) or not has >= SHARED or takes != FORWARD:
        raise RuntimeError(
            f"PolicyLoss of the installed openrlhf takes {', '.join(sorted(has))} and, in its forward, {', '.join(takes)}; "
            f"this integration was tested with openrlhf {OPENRLHF.first} to {OPENRLHF.last}"
        )


def _with_flags(loss: str | losses.Loss, clip_low: float, clip_high: float, dual_clip: float | None) -> losses.Loss:
    """The loss with those of OpenRLHF's clip options that are not at their defaults. ValueError where it has no use for one."""
    rule = losses.resolve(loss)
    set_by_user = {
        **({"clip_low": clip_low} if clip_low != DEFAULT_CLIP else {}),
        **({"clip_high": clip_high} if clip_high != DEFAULT_CLIP else {}),
        **({"dual_clip": dual_clip} if dual_clip is not None else {}),
    }
    known = {f.name for f in fields(rule)}  # type: ignore[arg-type]
    for name, value in set_by_user.items():
        if isinstance(loss, str) and name in known:
            rule = replace(rule, **{name: value})  # type: ignore[type-var]
        elif getattr(rule, name, None) != value:
            option = "dual_clip" if name == "dual_clip" else "eps_clip_low_high"
            raise ValueError(
                f"--actor.{option} sets {name}={value:g}, which has no effect on loss {rule}: leave it at its default"
            )
    return rule


def _gate(flags: Any) -> Gate | None:
    if hasattr(flags, "is_correction_level"):
        level, mode, gating = flags.is_correction_level, flags.is_correction_mode, flags.is_correction_gating
        return None if level == "off" else Gate(level, mode, gating, *flags.is_correction_threshold)
    if not flags.enable_vllm_is_correction:
        return None
    modes = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
    return Gate(*modes[flags.vllm_is_correction_type], "ratio", *flags.vllm_is_truncated_threshold)
