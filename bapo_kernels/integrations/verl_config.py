"""verl's configuration of a policy loss, with our parameters. `bapo_kernels.integrations.verl.PolicyLossConfig` is how to get at it."""

from dataclasses import dataclass, field
from typing import Any, Optional

from verl.workers import config as verl_config

from bapo_kernels import losses
from bapo_kernels.integrations import verl as integration

BATCHES = ("micro-batch", "mini-batch")


@dataclass
class PolicyLossConfig(verl_config.PolicyLossConfig):
    """verl's fields, and what our losses take besides; chosen by

        actor_rollout_ref.actor.policy_loss._target_=bapo_kernels.integrations.verl.PolicyLossConfig

    Making one with a loss of ours as `loss_mode` checks the parameters, and hooks into verl's engines (`hook_in`).

    Args:
        loss_kwargs: fields of the loss object, before verl's own settings: {"target": 0.45, "dual_clip": None}.
        bapo_batch: over what BAPO finds its bounds. "micro-batch": over the micro-batches that the ranks evaluate at the same time, one
            all-reduce each, as the authors' recipe does; verl gives each rank as many. "mini-batch": over all micro-batches of the
            optimizer step on all ranks, by a forward pass without gradients before it (about a third more work in the actor's update).
        old_is_rollout: the old log-probs are the sampler's, as with algorithm.rollout_correction.bypass_mode; losses that read the
            sampler's take them.
        adv_ratio_target, ratio_lower_start, ratio_lower_max, ratio_lower_step, ratio_upper_start, ratio_upper_max, ratio_upper_step,
            eps: the BAPO authors' recipe, taken as soon as one of them is given (`BAPO.authors_recipe`).

    Raises:
        ValueError: a field of ours with a loss that would not read it, or a loss that verl cannot feed.
    """

    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    bapo_batch: str = "micro-batch"
    old_is_rollout: bool = False
    # OmegaConf reads these annotations: it knows Optional in every version.
    adv_ratio_target: Optional[float] = None  # noqa: UP045
    ratio_lower_start: Optional[float] = None  # noqa: UP045
    ratio_lower_max: Optional[float] = None  # noqa: UP045
    ratio_lower_step: Optional[float] = None  # noqa: UP045
    ratio_upper_start: Optional[float] = None  # noqa: UP045
    ratio_upper_max: Optional[float] = None  # noqa: UP045
    ratio_upper_step: Optional[float] = None  # noqa: UP045
    eps: Optional[float] = None  # noqa: UP045

    def __post_init__(self):
        if self.bapo_batch not in BATCHES:
            raise ValueError(f"policy_loss.bapo_batch must be one of {', '.join(BATCHES)}, got {self.bapo_batch!r}")
        integration.register()  # where plugins of verl are turned off, too
        name = integration.registered(self.loss_mode)
        for key in ("loss_kwargs", "bapo_batch", "old_is_rollout", *integration.RECIPE):
            default = {"loss_kwargs": {}, "bapo_batch": "micro-batch", "old_is_rollout": False}.get(key)
            only_bapo = key not in ("loss_kwargs", "old_is_rollout")
            if getattr(self, key) != default and (name is None or (only_bapo and name != "bapo")):
                whose = "BAPO" if only_bapo else "a loss of bapo_kernels"
                raise ValueError(
                    f"policy_loss.{key} is only read by {whose}, not by loss_mode={self.loss_mode!r}"
                    + ("" if name else f" (of verl; ours are named {integration.PREFIX}<name>)")
                )
        if name is not None:
            integration.check(losses.get(name, **dict(self.loss_kwargs)))
            integration.hook_in()
