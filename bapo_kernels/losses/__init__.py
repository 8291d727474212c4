"""The policy losses: one file for each family, each loss one rule. `available()` lists the names, `get(name, **overrides)` builds one."""

from dataclasses import fields

from bapo_kernels.losses.bapo import BAPO
from bapo_kernels.losses.base import Loss, TokenLoss, Tokens
from bapo_kernels.losses.clip import DAPO, GRPO, PPO

__all__ = ["BAPO", "DAPO", "GRPO", "PPO", "Loss", "TokenLoss", "Tokens", "available", "get"]

_LOSSES: dict[str, type[Loss]] = {cls.name: cls for cls in (BAPO, GRPO, PPO, DAPO)}


def available() -> list[str]:
    """The names that `get` and every `loss=` argument accept."""
    return sorted(_LOSSES)


def get(name: str, **overrides) -> Loss:
    """The loss of that name with its published defaults, or with some of them replaced: `get("dapo", clip_high=0.3)`."""
    if name not in _LOSSES:
        raise ValueError(f"loss must be one of {', '.join(available())}, got {name!r}")
    cls = _LOSSES[name]
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    if unknown := sorted(set(overrides) - set(known)):
        raise TypeError(f"loss {name!r} has no parameter {unknown[0]!r}; it has {', '.join(known)}")
    return cls(**overrides)


def resolve(loss: str | Loss) -> Loss:
    """The `loss=` argument of the public functions: a name or an object."""
    if isinstance(loss, str):
        return get(loss)
    if not isinstance(loss, Loss):
        raise ValueError(f"loss must be a name or a loss object, got {type(loss).__name__}: {loss!r}")
    return loss
