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

    def __post_init__(self):
        try:
            hash(self.parameters)
        except TypeError as error:
            raise ValueError(f"the parameters of loss {self.name!r} must be hashable: {error}") from None

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.parameters)})"

    def rule(self, x: Tokens) -> TokenLoss:
        loss = self.function(x, **dict(self.parameters))
        if not isinstance(loss, Tensor) or loss.shape != x.logprobs.shape or not loss.is_floating_point():
            got = f"{loss.dtype} {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            want = f"a floating-point tensor of shape {tuple(x.logprobs.shape)}"
            raise ValueError(f"the rule of loss {self.name!r} must return {want}, got {got}")
        if x.logprobs.requires_grad and not loss.requires_grad:
            raise ValueError(
                f"the rule of loss {self.name!r} must be differentiable in x.logprobs: nothing would be trained"
            )
        return TokenLoss(loss.to(x.logprobs.dtype))
