"""What trainers know of their batches, in terms of this package: weights of their own on tokens, and BAPO's bounds of a batch in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bapo_kernels.controller import BapoBounds
from bapo_kernels.corrections import Correction
from bapo_kernels.losses import BAPO
from bapo_kernels.losses.base import Tokens
from bapo_kernels.policy import bapo_bounds


@dataclass(frozen=True, eq=False)
class Weighted(Correction):
    """A constant weight of each token or sequence that the trainer has, times what a correction finds."""

    factor: Tensor  # of the batch's layout, or one that expands to it
    correction: Correction | None = None

    def weight(self, x: Tokens) -> Tensor:
        factor = x.active(self.factor.detach().to(x.logprobs.dtype).expand(x.mask.shape))
        return factor if self.correction is None else factor * self.correction.weight(x)


def bounds_of(pieces: Sequence[dict[str, Tensor | None]], loss: BAPO, dp_group: object) -> BapoBounds:
    """The bounds of all `pieces` together: per-token arguments of `bapo_bounds`, the advantages too. None where no piece has one."""
    columns = {
        name: None if first is None else torch.cat([piece[name].flatten() for piece in pieces])  # type: ignore[union-attr]
        for name, first in pieces[0].items()
    }
    return bapo_bounds(**columns, loss=loss, dp_group=dp_group)  # type: ignore[arg-type]
