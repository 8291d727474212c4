"""The weight of each token in the total loss. Sequences with no active token do not count.

    token-mean               1 / active tokens
    seq-mean-token-mean      1 / (B * T_i)           B sequences, T_i active tokens of the token's own
    seq-mean-token-sum       1 / B
    seq-mean-token-sum-norm  1 / (B * max_length)
    token-sum                1

`normalizer` replaces the active tokens, or B: with the global count, the losses and gradients of micro-batches and ranks add up to
those of the one batch.
"""

import torch
from torch import Tensor

from bapo_kernels.checks import is_number
from bapo_kernels.layout import Layout

NAMES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum")


def check(aggregation: str, normalizer: float | Tensor | None, max_length: int | None) -> None:
    if aggregation not in NAMES:
        raise ValueError(f"aggregation must be one of {', '.join(NAMES)}, got {aggregation!r}")
    if normalizer is not None:
        if aggregation == "token-sum":
            raise ValueError("normalizer has nothing to replace with aggregation='token-sum'")
        if isinstance(normalizer, Tensor):
            if normalizer.dim() != 0:
                raise ValueError(f"normalizer must be a number or a 0-d tensor, got shape {tuple(normalizer.shape)}")
        elif not is_number(normalizer) or normalizer < 0:
            raise ValueError(f"normalizer must be a number >= 0 or a 0-d tensor, got {normalizer!r}")
    if aggregation == "seq-mean-token-sum-norm":
        if not is_number(max_length) or max_length <= 0:
            raise ValueError(f"aggregation='seq-mean-token-sum-norm' needs max_length > 0, got {max_length!r}")
    elif max_length is not None:
        raise ValueError(f"max_length is only used by aggregation='seq-mean-token-sum-norm', not by {aggregation!r}")


def token_weights(
    aggregation: str,
    mask: Tensor,
    layout: Layout,
    normalizer: float | Tensor | None,
    max_length: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """Weights in the batch's layout, 0 where `mask` is False."""
    if aggregation == "token-sum":
        return mask.to(dtype)
    counted = mask
    if aggregation != "token-mean":
        lengths = layout.sequence_sum(mask.to(dtype))
        counted = lengths > 0
    if normalizer is None:
        count = counted.sum(dtype=dtype)
    elif isinstance(normalizer, Tensor):
        count = normalizer.detach().to(dtype)
    else:
        count = torch.full((), normalizer, dtype=dtype, device=mask.device)
    # By selection: a normalizer of 0 is right where no token is active, and infinite (never a plausible number) where one is.
    weight = torch.where(mask, count.reciprocal(), 0.0)
    if aggregation == "seq-mean-token-mean":
        weight = weight / layout.to_tokens(lengths.clamp(min=1.0))
    if max_length is not None:  # seq-mean-token-sum-norm, by `check`
        weight = weight / max_length
    return weight
