"""The functions as modules: options at construction, data at the call."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from bapo_kernels.evaluation import PolicyLossOutput
from bapo_kernels.head import backends
from bapo_kernels.head.api import TokenStatistics, linear_logprobs
from bapo_kernels.head.engines import check_engine
from bapo_kernels.losses import Loss, resolve
from bapo_kernels.options import PolicyOptions
from bapo_kernels.policy import linear_policy_loss


def _check_names(owner: str, function: Any, given: dict[str, Any]) -> None:
    known = [n for n, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in given:
        if name not in known:
            raise TypeError(f"{owner} has no option {name!r}; it has {', '.join(known)}")


class LinearLogprobs(nn.Module):
    """`linear_logprobs` with its keyword options given once: `LinearLogprobs(temperature=0.7)(hidden, weight, targets, mask=mask)`."""

    def __init__(self, **options: Any):
        super().__init__()
        _check_names("LinearLogprobs", linear_logprobs, options)
        self.options = options

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor, **inputs: Any) -> TokenStatistics:
        return linear_logprobs(hidden, weight, targets, **{**self.options, **inputs})

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self.options.items())


class LinearPolicyLoss(nn.Module):
    """`linear_policy_loss` with its keyword options given once.

    criterion = LinearPolicyLoss(loss="dapo", temperature=0.7)
    out = criterion(hidden, lm_head.weight, targets, advantages, mask=mask, old_logprobs=old)
    """

    def __init__(self, loss: str | Loss = "bapo", **options: Any):
        super().__init__()
        self.options = {"loss": loss, **options}
        _check_names("LinearPolicyLoss", linear_policy_loss, self.options)
        backends.check_name(options.get("backend", "auto"))
        check_engine(options.get("engine", "auto"))
        backends.resolve_budget(options.get("memory_budget"), torch.device("cpu"))
        shared = {k: v for k, v in options.items() if k in PolicyOptions.__dataclass_fields__}
        PolicyOptions(loss=resolve(loss), **shared)  # a mistake shows here, not at the first batch

    def forward(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor, **inputs: Any
    ) -> PolicyLossOutput:
        return linear_policy_loss(hidden, weight, targets, advantages, **{**self.options, **inputs})

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self.options.items())
