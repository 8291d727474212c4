"""What TRL's configuration says about the loss, in terms of this package: a loss object, an aggregation. What cannot be said is refused."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from bapo_kernels import losses
from bapo_kernels.losses import BPO, CISPO, GMPO, GRPO, GSPO, SAPO, VESPO, ClipCov, Loss

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # one loss with five normalisers
OF_ONE_LOSS: Mapping[str, type[Loss]] = {"cispo": CISPO, "sapo": SAPO, "vespo": VESPO}

# A field of TRL's and the parameter that it is, of which losses.
_SURROGATES = (GRPO, GSPO, BPO, ClipCov)
_PARAMETERS: tuple[tuple[str, str, tuple[type[Loss], ...]], ...] = (
    ("epsilon", "clip_low", _SURROGATES),
    ("epsilon_high", "clip_high", _SURROGATES),
    ("epsilon_high", "ratio_high", (CISPO,)),
    ("delta", "dual_clip", (GRPO,)),
    ("sapo_temperature_pos", "tau_pos", (SAPO,)),
    ("sapo_temperature_neg", "tau_neg", (SAPO,)),
    ("vespo_k_pos", "k_pos", (VESPO,)),
    ("vespo_lambda_pos", "lambda_pos", (VESPO,)),
    ("vespo_k_neg", "k_neg", (VESPO,)),
    ("vespo_lambda_neg", "lambda_neg", (VESPO,)),
)
_REFUSED = {
    "use_adaptive_entropy": "set entropy_coef, from a callback with bapo_kernels.TargetEntropy if it is to move",
}


def loss_for(policy_loss: str | Loss, args: Any) -> Loss:
    """The loss object of a trainer with the configuration `args` (a GRPOConfig).

    A field of TRL's that was left at its default says nothing. One that was set goes into the loss where `policy_loss` is a name and the
    loss has such a parameter; an object has its parameters already, and the field may only agree with them. Anything else is a ValueError
    that names the field: no field of TRL's is dropped.
    """
    loss = losses.resolve(policy_loss)
    for field, why in _REFUSED.items():
        if _is_set(args, field):
            raise ValueError(f"{field}={getattr(args, field)!r} cannot be honoured by bapo_kernels' trainers: {why}")
    loss = _with_fields(loss, args, named=isinstance(policy_loss, str))
    _check_loss_type(loss, args.loss_type)
    return _of_level(loss, args.importance_sampling_level)


def aggregation_for(
    loss_type: str, *, sequences: int, tokens: Tensor, items: Tensor, accumulation: int, share: float, max_length: int
) -> tuple[str, float | Tensor]:
    """`aggregation` and `normalizer` that make a micro-batch's loss the one that TRL has under `loss_type`.

    Args:
        sequences: of the micro-batch; those without a token that counts are counted.
        tokens: 0-d, that count in the micro-batch.
        items: 0-d, tokens that count in the generation batch, of all ranks.
        accumulation: micro-batches of an optimizer step, over which TRL takes a mean.
        share: of `items`, what belongs to one optimizer step and one rank.
        max_length: of a completion.
    """
    if loss_type in ("grpo", "sapo"):
        return "seq-mean-token-mean", sequences * accumulation
    if loss_type == "luspo":
        return "seq-mean-token-sum", sequences * accumulation
    if loss_type == "bnpo":
        return "token-mean", tokens.clamp(min=1) * accumulation
    if loss_type == "dr_grpo":
        return "token-mean", sequences * max_length * accumulation
    return "token-mean", items.clamp(min=1) * share


def is_global(loss_type: str) -> bool:
    """Whether the normaliser is that of the whole batch already, and not the mean of its micro-batches'."""
    return loss_type in ("dapo", "cispo", "vespo")


def _is_set(args: Any, field: str) -> bool:
    fields = type(args).__dataclass_fields__
    return field in fields and getattr(args, field) != fields[field].default


def _with_fields(loss: Loss, args: Any, *, named: bool) -> Loss:
    wanted: dict[str, float] = {}
    for field in dict.fromkeys(field for field, _, _ in _PARAMETERS):
        if not _is_set(args, field):
            continue
        parameters = [p for f, p, owners in _PARAMETERS if f == field and isinstance(loss, owners)]
        if not parameters:
            raise ValueError(
                f"{field}={getattr(args, field)!r} is no parameter of {loss}: set the loss's own, in policy_loss"
            )
        wanted[parameters[0]] = getattr(args, field)
    if "clip_low" in wanted:  # TRL's epsilon is both bounds, if no other upper one is given
        wanted.setdefault("clip_high", wanted["clip_low"])
    if not named and (unlike := {k: v for k, v in wanted.items() if getattr(loss, k) != v}):
        raise ValueError(
            f"policy_loss={loss} and the configuration do not agree on {', '.join(f'{k}={v}' for k, v in unlike.items())} "
            f"({', '.join(f for f, p, _ in _PARAMETERS if p in unlike)}): give it in one of them"
        )
    loss = replace(loss, **wanted) if wanted else loss  # type: ignore[type-var]
    if isinstance(loss, GRPO) and args.delta is not None and args.delta <= 1 + loss.clip_high:
        raise ValueError(
            f"delta={args.delta} must be above 1 + epsilon_high = {1 + loss.clip_high}: it bounds the loss where A < 0"
        )
    return loss


def _check_loss_type(loss: Loss, loss_type: str) -> None:
    if loss_type in OF_ONE_LOSS:
        if not isinstance(loss, OF_ONE_LOSS[loss_type]):
            raise ValueError(
                f"loss_type={loss_type!r} is another loss than policy_loss={loss.name!r}: the trainer's policy_loss is the loss, and "
                f"loss_type only how it is averaged, one of {', '.join(CLIPPED)}; or set policy_loss={loss_type!r}"
            )
    elif loss_type not in CLIPPED:
        raise ValueError(f"loss_type must be one of {', '.join((*CLIPPED, *OF_ONE_LOSS))}, got {loss_type!r}")


def _of_level(loss: Loss, level: str) -> Loss:
    if level == "token" or isinstance(loss, GSPO | GMPO):
        return loss
    if level != "sequence":
        raise ValueError(f"importance_sampling_level must be 'token' or 'sequence', got {level!r}")
    if not isinstance(loss, GRPO) or loss.dual_clip is not None:
        raise ValueError(
            f"importance_sampling_level='sequence' cannot be honoured by {loss}: it makes GSPO of a clipped surrogate without delta"
        )
    return GSPO(clip_low=loss.clip_low, clip_high=loss.clip_high)
