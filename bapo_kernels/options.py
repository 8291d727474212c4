"""What the policy losses take besides log-probs: options, and the constants recorded with a batch. Validated here."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from bapo_kernels import aggregation as agg
from bapo_kernels import regularizers
from bapo_kernels.checks import check_flag, check_floating, check_group, check_shape, check_tensor
from bapo_kernels.corrections import CORRECTIONS, Correction
from bapo_kernels.layout import Layout
from bapo_kernels.losses.base import Loss
from bapo_kernels.topk import check_topk

WHAT_TO_RECORD = {
    "old_logprobs": "the log-probs of the targets under the policy before this update",
    "rollout_logprobs": "their log-probs when the sampler drew them (vLLM: SamplingParams(logprobs=0), SGLang: return_logprob=True)",
    "rollout_topk_ids": "the sampler's most likely ids at each token (vLLM: SamplingParams(logprobs=K), SGLang: top_logprobs_num=K)",
    "rollout_topk_logprobs": "their log-probs as sampled from (vLLM: logprobs_mode='processed_logprobs'; SGLang: top_logprobs_num=K)",
}


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
            allowed = ", ".join(c.__name__ for c in CORRECTIONS)
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


@dataclass(frozen=True)
class Recorded:
    """Constants of a batch that were recorded before this step. `of` validates them, and drops what the options do not read."""

    advantages: Tensor  # layout
    old_logprobs: Tensor | None  # layout
    rollout_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    topk_ids: Tensor | None  # layout + (K,)
    topk_logprobs: Tensor | None  # the sampler's

    def clean(self, active: Tensor, dtype: torch.dtype) -> "Recorded":
        """In `dtype`, and 0 where the token does not count; what is recorded at top-k ids is left to `make_topk`."""
        names = ("advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs")
        given = ((name, getattr(self, name)) for name in names)
        return replace(self, **{name: torch.where(active, t.to(dtype), 0.0) for name, t in given if t is not None})

    def map(self, function: Callable[[Tensor], Tensor]) -> "Recorded":
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: function(t) for name, t in given.items() if t is not None})

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
