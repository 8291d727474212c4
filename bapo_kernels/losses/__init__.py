"""The policy losses: one file for each family, each loss one rule.

`available()` lists the names, `get(name, **overrides)` builds one, `register` adds one.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from inspect import signature

from torch import Tensor

from bapo_kernels import aggregation as agg
from bapo_kernels.compiling import register_fields, register_node
from bapo_kernels.losses.bapo import BAPO
from bapo_kernels.losses.base import Loss, TokenLoss, Tokens
from bapo_kernels.losses.centering import ScoreCentering
from bapo_kernels.losses.clip import DAPO, DCPO, GRPO, PPO
from bapo_kernels.losses.covariance import ClipCov, KLCov
from bapo_kernels.losses.registered import INPUTS, RegisteredLoss
from bapo_kernels.losses.sequence import GMPO, GSPO, LUSPO, TOPR, VESPO
from bapo_kernels.losses.weighted import BPO, CISPO, DPPO, DPPOKL, DRO, SAPO, Reinforce

_BUILT_IN = (
    BAPO, BPO, ScoreCentering, GRPO, PPO, DAPO, GSPO, LUSPO, CISPO, DPPO, DPPOKL, TOPR, DCPO, SAPO, GMPO, VESPO,
    Reinforce, DRO, ClipCov, KLCov,
)  # fmt: skip
for _cls in _BUILT_IN:
    register_fields(_cls)
_LOSSES: dict[str, Loss] = {cls.name: cls() for cls in _BUILT_IN}

__all__ = [
    "Loss", "TokenLoss", "Tokens", "available", "get", "register", "resolve",
    *(cls.__name__ for cls in _BUILT_IN),
]  # fmt: skip


def available() -> list[str]:
    """The names that `get` and every `loss=` argument accept."""
    return sorted(_LOSSES)


def get(name: str, **overrides) -> Loss:
    """The loss of that name with its published defaults, or with some of them replaced: `get("dapo", clip_high=0.3)`."""
    if not isinstance(name, str) or name not in _LOSSES:
        raise ValueError(f"loss must be one of {', '.join(available())}, got {name!r}")
    known = _LOSSES[name]
    if isinstance(known, RegisteredLoss):
        return known.with_parameters(overrides)
    names = [f.name for f in fields(known)]  # type: ignore[arg-type]
    if unknown := sorted(set(overrides) - set(names)):
        raise TypeError(f"loss {name!r} has no parameter {unknown[0]!r}; it has {', '.join(names) or 'none'}")
    return replace(known, **overrides) if overrides else known  # type: ignore[type-var]


def register(
    name: str,
    rule: Callable[..., Tensor],
    *,
    needs: tuple[str, ...] = ("old_logprobs",),
    aggregation: str = "token-mean",
    **defaults,
) -> None:
    """Add a loss, for `loss=name` in every function and on every backend.

        def asymmetric(x, scale):
            weight = torch.where(x.advantages > 0, 1.0, scale)
            return -weight * x.advantages * x.ratio

        bk.losses.register("asymmetric", asymmetric, scale=0.5)
        out = bk.linear_policy_loss(hidden, weight, targets, advantages, loss="asymmetric", old_logprobs=old)
        out = bk.linear_policy_loss(..., loss=bk.losses.get("asymmetric", scale=0.1))

    Args:
        name: a new name.
        rule: `rule(x, **parameters)` returns the loss of each token, in the shape of `x.logprobs`, differentiable in it. `x` has
            `logprobs`, `ratio`, `advantages`, `old_logprobs`, `rollout_logprobs`, `mask`, and `sequence_mean(t)`, `sequence_sum(t)` over
            the active tokens of each token's sequence. Masked tokens hold harmless values.
        needs: which of old_logprobs and rollout_logprobs have to be given in a call.
        aggregation: the default of calls that ask for none.
        **defaults: the parameters of the rule. They must be hashable.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"name must be a string, got {name!r}")
    if name in _LOSSES:
        raise ValueError(f"name must be new, and there is a loss {name!r}")
    if not callable(rule):
        raise ValueError(f"rule must be a function, got {type(rule).__name__}")
    needs = (needs,) if isinstance(needs, str) else tuple(needs or ())
    if unknown := [n for n in needs if n not in INPUTS]:
        raise ValueError(f"needs may hold {' and '.join(INPUTS)}, got {unknown[0]!r}")
    if aggregation not in agg.NAMES:
        raise ValueError(f"aggregation must be one of {', '.join(agg.NAMES)}, got {aggregation!r}")
    try:
        signature(rule).bind(None, **defaults)
    except TypeError as error:
        raise ValueError(f"rule must take x and the parameters {', '.join(defaults) or 'none'}: {error}") from None
    _LOSSES[name] = RegisteredLoss(name, rule, tuple(defaults.items()), aggregation, needs)


def _parameters(loss: RegisteredLoss) -> tuple[list, tuple]:
    return [v for _, v in loss.parameters], (loss.name, *(k for k, _ in loss.parameters))


register_node(
    RegisteredLoss, _parameters, lambda values, names: get(names[0], **dict(zip(names[1:], values, strict=True)))
)


def resolve(loss: str | Loss) -> Loss:
    """The `loss=` argument of the public functions: a name or an object."""
    if isinstance(loss, str):
        return get(loss)
    if not isinstance(loss, Loss):
        raise ValueError(f"loss must be a name or a loss object, got {type(loss).__name__}: {loss!r}")
    return loss
