"""verl (0.9.1): every loss under a name of verl's registry, BAPO's bounds over a whole mini-batch, and verl's fused heads replaced.

    actor_rollout_ref.actor.policy_loss.loss_mode=bapo
    actor_rollout_ref.actor.policy_loss._target_=bapo_kernels.integrations.verl.PolicyLossConfig
    +actor_rollout_ref.actor.policy_loss.loss_kwargs.target=0.45
    actor_rollout_ref.rollout.calculate_log_probs=True

`import verl` registers the losses in every process, by its plugins (verl_plugin.py). They are named bk-<name>, and <name> where verl has
none like it. Without the second line they work with verl's own configuration, on what verl hands to a policy loss: log-probs, old
log-probs, advantages and mask of one micro-batch. With it they also get the sampler's log-probs of the batch (`rollout_log_probs`, there
with `calculate_log_probs`), BAPO's bounds are those of all ranks, and parameters can be set.

What verl has a setting for is taken from there, as verl's own losses read it, unless `loss_kwargs` has it: clip_ratio_low and
clip_ratio_high for the bounds (1 -/+ them for CISPO; the divergence for DPPO; DAPO's 0.28 and GSPO's 3e-4, 4e-4 have to be set there,
too), clip_ratio_c for the dual clip and DPPO's cap, tau_pos, tau_neg, dro_beta, clip_cov_*, kl_cov_ratio, ppo_kl_coef. Aggregation is
verl's `loss_agg_mode`, by verl's own `agg_loss`; entropy bonus and KL are added by verl.

Where both have a loss it is the same, but for this: `dppo_*` compares with the old policy, ours with the sampler; `sapo` always averages
over sequences, ours as `loss_agg_mode` says; `gspo` clamps its log-ratio to 10, ours to 20; `geo_mean` (ours: `gmpo`) takes the mean
over the micro-batch, whatever the mode, and gives `rollout_is_weights` to sequences, ours to tokens; `clip_cov` draws its tokens from
torch's global generator, ours from one of its own. A token of `cispo` that keeps its gradient is not counted as clipped here.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from bapo_kernels import losses
from bapo_kernels.controller import BapoBounds
from bapo_kernels.head.api import linear_logprobs
from bapo_kernels.integrations.batches import bounds_of
from bapo_kernels.integrations.heads import under_autocast
from bapo_kernels.integrations.packages import Package
from bapo_kernels.losses import (
    BAPO,
    BPO,
    CISPO,
    DCPO,
    DPPO,
    DRO,
    GMPO,
    GRPO,
    GSPO,
    SAPO,
    TOPR,
    ClipCov,
    KLCov,
    Loss,
)
from bapo_kernels.policy import policy_loss

VERL = Package("verl", "0.9.1", "0.9.1", "verl")
PREFIX = "bk-"

# Fields of the BAPO authors' recipe, by their names there.
RECIPE = (
    "adv_ratio_target", "ratio_lower_start", "ratio_lower_max", "ratio_lower_step",
    "ratio_upper_start", "ratio_upper_max", "ratio_upper_step", "eps",
)  # fmt: skip

if TYPE_CHECKING:
    from bapo_kernels.integrations.verl_config import PolicyLossConfig

__all__ = [
    "FusedLinearForPPO", "PolicyLossConfig", "hook_in", "linear_cross_entropy", "loss_of", "register", "use_fused_head",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The configuration class is a subclass of verl's: it is made when asked for."""
    if name == "PolicyLossConfig":
        VERL.module("verl.workers.config")
        from bapo_kernels.integrations.verl_config import PolicyLossConfig

        return PolicyLossConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Names


def register() -> list[str]:
    """Put every loss of `bk.losses.available()` into verl's registry; again after `bk.losses.register`. `import verl` calls it.

    Returns:
        Their names there: bk-<name>, and <name> where the registry has none like it ("-" and "_" are alike).
    """
    registry = VERL.hook("verl.trainer.ppo.core_algos", "POLICY_LOSS_REGISTRY")
    add = VERL.hook("verl.trainer.ppo.core_algos", "register_policy_loss")
    VERL.hook("verl.trainer.ppo.core_algos", "agg_loss")
    VERL.check_version()
    taken = {name.replace("-", "_") for name, function in registry.items() if _name_of(function) is None}
    for name in losses.available():
        function = _policy_loss_function(name)
        add(PREFIX + name)(function)
        if name.replace("-", "_") not in taken:
            add(name)(function)
    return [name for name, function in registry.items() if _name_of(function)]


def registered(loss_mode: str) -> str | None:
    """The loss of ours that verl has under this name."""
    registry = VERL.hook("verl.trainer.ppo.core_algos", "POLICY_LOSS_REGISTRY")
    return _name_of(registry.get(loss_mode))


def _name_of(function: object) -> str | None:
    return getattr(function, "bapo_kernels_loss", None)


# Parameters


def _clip_low(actor) -> float:
    return actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low


def _clip_high(actor) -> float:
    return actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high


def _clip_c(actor) -> float:
    return actor.clip_ratio_c


_CLIP: dict[str, Callable] = {"clip_low": _clip_low, "clip_high": _clip_high}
_SETTINGS: dict[type[Loss], dict[str, Callable]] = {
    GRPO: _CLIP | {"dual_clip": _clip_c},
    GSPO: _CLIP,
    BPO: _CLIP,
    GMPO: _CLIP,
    BAPO: {"dual_clip": _clip_c},
    DCPO: {"dual_clip": _clip_c},
    CISPO: {"ratio_low": lambda a: 1.0 - _clip_low(a), "ratio_high": lambda a: 1.0 + _clip_high(a)},
    DPPO: {"delta_low": _clip_low, "delta_high": _clip_high, "ratio_cap": _clip_c},
    SAPO: {"tau_pos": lambda a: a.tau_pos, "tau_neg": lambda a: a.tau_neg},
    DRO: {"beta": lambda a: a.policy_loss.dro_beta},
    ClipCov: _CLIP
    | {
        "fraction": lambda a: a.policy_loss.clip_cov_ratio,
        "cov_low": lambda a: a.policy_loss.clip_cov_lb,
        "cov_high": lambda a: a.policy_loss.clip_cov_ub,
    },
    KLCov: {"fraction": lambda a: a.policy_loss.kl_cov_ratio, "beta": lambda a: a.policy_loss.ppo_kl_coef},
}


def loss_of(name: str, actor) -> Loss:
    """The loss with the parameters that verl's `ActorConfig` sets for it.

    `policy_loss.loss_kwargs` goes before verl's own settings, and those before our defaults. Any field of the authors' recipe makes BAPO
    theirs (`BAPO.authors_recipe`).
    """
    settings = actor.policy_loss
    overrides = dict(settings.get("loss_kwargs") or {})
    recipe = {key: settings.get(key) for key in RECIPE if settings.get(key) is not None}
    if recipe:
        loss = BAPO.authors_recipe(
            **recipe, clip_ratio_low=_clip_low(actor), clip_ratio_high=_clip_high(actor), clip_ratio_c=_clip_c(actor)
        )
        return replace(loss, **overrides)
    known = losses.get(name)
    given = next((table for cls, table in _SETTINGS.items() if isinstance(known, cls)), {})
    values = {key: read(actor) for key, read in given.items() if key not in overrides}
    return losses.get(name, **{key: value for key, value in values.items() if value is not None}, **overrides)


def moves(loss: Loss) -> TypeGuard[BAPO]:
    """Whether its bounds hang on the batch."""
    return isinstance(loss, BAPO) and loss.searches


def check(loss: Loss) -> None:
    """ValueError for a loss that verl cannot feed."""
    if "rollout_topk_ids" in loss.needs:
        raise ValueError(
            f"loss {loss} needs rollout_topk_ids, rollout_topk_logprobs and the policy's log-probs at these ids, "
            "which verl does not hand to a policy loss"
        )


def _reads_rollout(loss: Loss) -> bool:
    if isinstance(loss, BAPO):
        return loss.weighting == "rollout" and moves(loss)
    return isinstance(loss, BPO | DPPO | TOPR) or "rollout_logprobs" in loss.needs


# What a loss gets beyond verl's arguments


@dataclass(frozen=True)
class Handed:
    """Of the micro-batch that is being evaluated, what verl keeps from a policy loss."""

    rollout_logprobs: Tensor | None = None  # (B, T)
    dp_group: object = None
    bounds: BapoBounds | None = None  # of the mini-batch
    record: "Record | None" = None  # where a pass without gradients leaves the batch


@dataclass
class Record:
    batches: list[dict[str, Any]] = field(default_factory=list)
    dp_group: object = None


_NOTHING = Handed()
_HANDED: ContextVar[Handed] = ContextVar("bapo_kernels_verl", default=_NOTHING)


@contextmanager
def _handing(handed: Handed) -> Iterator[None]:
    token = _HANDED.set(handed)
    try:
        yield
    finally:
        _HANDED.reset(token)


def _handing_over(loss_function: Callable, bounds: BapoBounds | None = None, record: Record | None = None) -> Callable:
    """verl's loss of a micro-batch, during which ours has what that micro-batch holds."""

    def function(**call):  # model_output, data, dp_group; for distillation of top-k logits also another set
        rollout, data = None, call["data"]
        if "rollout_log_probs" in data:
            rollout = data.select("rollout_log_probs").to_padded_tensor()["rollout_log_probs"]
        with _handing(Handed(rollout, call.get("dp_group"), bounds, record)):
            return loss_function(**call)

    return function


def hook_in() -> None:
    """Let verl's engines hand the batch to our losses; `PolicyLossConfig` calls it. Losses with another configuration go on as before.

    RuntimeError where verl's `BaseEngine.train_batch` is not what it was.
    """
    engine = VERL.hook("verl.workers.engine.base", "BaseEngine")
    original = VERL.hook("verl.workers.engine.base", "BaseEngine.train_batch")
    VERL.hook("verl.workers.engine.base", "BaseEngine.forward_backward_batch")
    if hasattr(original, "bapo_kernels_original"):
        return

    @functools.wraps(original)
    def train_batch(self, data, loss_function):
        actor, name = _actor_config(loss_function)
        if name is None:
            return original(self, data, loss_function)
        bounds, loss = None, loss_of(name, actor)
        if actor.policy_loss.bapo_batch == "mini-batch" and moves(loss):
            record = Record()
            with torch.no_grad():
                self.forward_backward_batch(data, _handing_over(loss_function, record=record), forward_only=True)
            bounds = _bounds(record, loss)
        return original(self, data, _handing_over(loss_function, bounds))

    train_batch.bapo_kernels_original = original  # type: ignore[attr-defined]
    engine.train_batch = train_batch


def _actor_config(loss_function: Callable) -> tuple[Any, str | None]:
    """The configuration that verl has bound to its loss, and the loss of ours that it asks for, if it is of our class."""
    from bapo_kernels.integrations.verl_config import PolicyLossConfig

    actor = getattr(loss_function, "keywords", {}).get("config")
    settings = getattr(actor, "policy_loss", None)
    return actor, registered(settings.loss_mode) if isinstance(settings, PolicyLossConfig) else None


def _bounds(record: Record, loss: BAPO) -> BapoBounds | None:
    """Of all micro-batches on all ranks; None where this rank has none (a pipeline stage without the head)."""
    if not record.batches:
        return None
    return bounds_of(record.batches, loss, record.dp_group)


# The loss


def _policy_loss_function(name: str) -> Callable:
    def function(
        old_log_prob: Tensor,  # (B, T)
        log_prob: Tensor,  # (B, T)
        advantages: Tensor,  # (B, T)
        response_mask: Tensor,  # (B, T)
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,  # (B, T)
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A policy loss as verl calls it. Returns (0-d loss, metrics as 0-d tensors on the device: nothing waits for it here)."""
        if config is None:
            raise ValueError(f"loss {name!r} needs config: verl's ActorConfig")
        loss = loss_of(name, config)
        check(loss)
        handed = _HANDED.get()
        batch: dict[str, Any] = {
            "logprobs": log_prob,
            "advantages": advantages,
            "mask": response_mask,
            "old_logprobs": old_log_prob,
            "rollout_logprobs": _rollout_logprobs(loss, config, handed, old_log_prob),
        }
        if handed.record is not None:
            handed.record.batches.append({key: t if t is None else t.detach() for key, t in batch.items()})
            handed.record.dp_group = handed.dp_group
            return log_prob.new_zeros(()), {}
        if moves(loss):
            loss = _with_bounds(loss, config, handed)
        out = policy_loss(**batch, loss=loss, dp_group=handed.dp_group, aggregation="token-sum", return_tokens=True)
        tokens, active = out.tokens, response_mask != 0
        assert tokens is not None
        # The value and the coefficient of each token: verl weighs and sums them itself.
        per_token = tokens.loss + tokens.coef * torch.where(active, log_prob - log_prob.detach(), 0.0)
        if rollout_is_weights is not None:
            per_token = per_token * rollout_is_weights
        agg_loss = VERL.hook("verl.trainer.ppo.core_algos", "agg_loss")
        total = agg_loss(
            loss_mat=per_token, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
        )
        return total, _metrics(out, active, advantages, old_log_prob, handed.bounds)

    function.bapo_kernels_loss = name  # type: ignore[attr-defined]
    function.__name__ = function.__qualname__ = f"policy_loss_{name.replace('-', '_')}"
    return function


def _rollout_logprobs(loss: Loss, config, handed: Handed, old_log_prob: Tensor) -> Tensor | None:
    if config.policy_loss.get("old_is_rollout"):
        return old_log_prob
    if handed.rollout_logprobs is None and _reads_rollout(loss):
        raise ValueError(
            f"loss {loss} needs rollout_log_probs, the sampler's log-probs, which verl does not hand to a policy loss. They come with "
            "actor_rollout_ref.rollout.calculate_log_probs=True and "
            "actor_rollout_ref.actor.policy_loss._target_=bapo_kernels.integrations.verl.PolicyLossConfig; where the old log-probs are "
            "the sampler's (algorithm.rollout_correction.bypass_mode=True), say so: "
            "+actor_rollout_ref.actor.policy_loss.old_is_rollout=True"
            + ("; without them: +...policy_loss.loss_kwargs.weighting=none" if isinstance(loss, BAPO) else "")
        )
    return handed.rollout_logprobs


def _with_bounds(loss: BAPO, config, handed: Handed) -> Loss:
    if handed.bounds is not None:
        return loss.within(handed.bounds)
    if config.policy_loss.get("bapo_batch") == "mini-batch":
        raise ValueError(
            "policy_loss.bapo_batch='mini-batch' needs bounds that were found before: this loss was called outside of "
            "BaseEngine.train_batch, or with a loss function that is no functools.partial(..., config=ActorConfig)"
        )
    return loss


def _metrics(out, active: Tensor, advantages: Tensor, old_log_prob: Tensor, bounds: BapoBounds | None) -> dict:
    """verl's metrics of its own losses, by their definition there; and BAPO's, as the authors' recipe names them."""
    tokens = out.tokens
    dual = (tokens.clipped > 0) & (advantages < 0)
    log_ratio = (tokens.logprobs - torch.where(active, old_log_prob, 0.0)).clamp(-20.0, 20.0)
    rows = torch.stack([(tokens.clipped != 0) & ~dual, dual, -log_ratio])
    clipped, lower, kl = (torch.where(active, rows, 0.0).flatten(1).sum(1) / active.sum().clamp(min=1)).unbind()
    metrics = {"actor/pg_clipfrac": clipped, "actor/ppo_kl": kl, "actor/pg_clipfrac_lower": lower}
    if "c_low" in out.metrics:
        found = out.metrics if bounds is None else bounds._asdict()
        negative = found["negative"]
        metrics |= {
            "actor/bapo_clip_low": found["c_low"],
            "actor/bapo_clip_high": found["c_high"],
            "actor/bapo_pos_neg_ratio": torch.where(negative == 0, torch.inf, found["positive"] / negative),
            "actor/bapo_contribution": found["contribution"],
        }
    return metrics


# The head


def _statistics(hidden: Tensor, weight: Tensor, labels: Tensor, **options) -> tuple[Tensor, Tensor]:
    hidden, weight = under_autocast(hidden, weight)  # verl's engines multiply in its dtype
    out = linear_logprobs(hidden, weight, labels, return_entropy=True, **options)
    assert out.entropy is not None
    return out.logprobs, out.entropy


def linear_cross_entropy(
    hidden: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (...) integer
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group=None,
) -> tuple[Tensor, Tensor]:
    """In the place of `verl.utils.kernel.linear_cross_entropy`: log-probs and entropy of each token, (N,) fp32, N the number of labels.

    Raises:
        ValueError: a reduction, which verl never asks for; a group of more than one rank: vocabulary shards.
    """
    if reduction != "none":
        raise ValueError(f"reduction must be 'none', got {reduction!r}")
    if dist_process_group is not None and torch.distributed.get_world_size(dist_process_group) == 1:
        dist_process_group = None
    rows = hidden.reshape(-1, hidden.shape[-1])
    return _statistics(rows, weight, labels.reshape(-1), temperature=temperature, tp_group=dist_process_group)


class FusedLinearForPPO(torch.nn.Module):
    """In the place of `verl.utils.experimental.torch_functional.FusedLinearForPPO`; entropy is fp32 (there: the model's dtype).

    `chunk_size` and `impl_backend` are what verl asks its own for; tiles follow the memory budget, the backend the device.
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch"):
        super().__init__()
        self.chunk_size, self.impl_backend = chunk_size, impl_backend

    def forward(
        self,
        hidden_states: Tensor,  # (..., D)
        vocab_weights: Tensor,  # (V, D)
        input_ids: Tensor,  # (...): what each position predicts
        temperature: float | Tensor = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy in the shape of `input_ids`."""
        return _statistics(hidden_states, vocab_weights, input_ids.long(), temperature=temperature)


_HEADS = (
    ("verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy", linear_cross_entropy),
    ("verl.utils.experimental.torch_functional", "FusedLinearForPPO", FusedLinearForPPO),
)
# Where Megatron's forwards have taken the name at their import.
_HOLDERS = ("verl.models.mcore.model_forward_fused", "verl.models.mcore.model_forward_1f1b_overlap")
_theirs: dict[tuple[str, str], Any] = {}


def use_fused_head(on: bool = True) -> None:
    """Replace both heads that verl's fused forwards call (`actor_rollout_ref.model.use_fused_kernels=True`, any `impl_backend`) by ours;
    `use_fused_head(False)` puts verl's back. Models that are built already follow.

    It has to be called in the workers: VERL_USE_EXTERNAL_MODULES=bapo_kernels.integrations.verl_head does. As verl's own, it sees neither a
    bias nor a softcap of the head; it asks for prompt tokens too, since verl says at this point of none that it does not count.
    """
    if not on:
        for (path, name), theirs in _theirs.items():
            setattr(VERL.module(path), name, theirs)
        _theirs.clear()
        return
    found = [(path, name, VERL.hook(path, name), ours) for path, name, ours in _HEADS]  # all, before any is replaced
    VERL.check_version()
    found += [
        (path, name, getattr(sys.modules[path], name), linear_cross_entropy)
        for path in _HOLDERS
        if path in sys.modules and hasattr(sys.modules[path], name := "linear_cross_entropy")
    ]
    for path, name, theirs, ours in found:
        if theirs is not ours:
            _theirs.setdefault((path, name), theirs)
            setattr(VERL.module(path), name, ours)
