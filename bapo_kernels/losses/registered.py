"""Losses that users add under a name of their own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bapo_kernels.losses.base import Loss, TokenLoss, Tokens

INPUTS = ("old_logprobs", "rollout_logprobs")


@dataclass(frozen=True)
class RegisteredLoss(Loss):
    """A rule given as a function, with its parameters; `losses.register` makes the template of a name, `losses.get` its variants."""

    name: str  # type: ignore[misc]
    function: Callable[..., Tensor]
    parameters: tuple[tuple[str, Any], ...]
    aggregation: str  # type: ignore[misc]
    needs: tuple[str, ...]  # type: ignore[misc]

    def with_parameters(self, overrides: Mapping[str, Any]) -> "RegisteredLoss":
        defaults = dict(self.parameters)
        if unknown := sorted(set(overrides) - set(defaults)):
            known = ", ".join(defaults) or "none"
            raise TypeError(f"loss {self.name!r} has no parameter {unknown[0]!r}; it has {known}")
        parameters = tuple({**defaults, **overrides}.items())
        return RegisteredLoss(self.name, self.function, parameters, self.aggregation, self.needs)

    def rule(self, x: Tokens) -> TokenLoss:
        loss = self.function(x, **dict(self.parameters))
        if not isinstance(loss, Tensor) or loss.shape != x.logprobs.shape:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"the rule of loss {self.name!r} must return {tuple(x.logprobs.shape)}, got {got}")
        return TokenLoss(loss)
