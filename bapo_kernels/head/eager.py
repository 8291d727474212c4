"""The two epilogues in PyTorch operations (backend "torch"), and the backend that puts a vendor GEMM before a pair of epilogues."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from bapo_kernels.head.chunked import Coefficients, LogitSpec, Rows, Slice, State, Statistics, dz_dtype
from bapo_kernels.head.products import multiply, operand_dtype


class Epilogues(Protocol):
    """Each is one pass over a tile z (n, w) of products hidden . weight. `fold` leaves it as it is, `dlogits` may overwrite it."""

    name: str
    tiles: tuple[int, int]  # tiles alive at once, forward and backward, z included

    def fold(self, z: Tensor, rows: Rows, part: Slice, spec: LogitSpec, state: State) -> None: ...

    def dlogits(
        self, z: Tensor, rows: Rows, part: Slice, spec: LogitSpec, stats: Statistics, coef: Coefficients, out: Tensor
    ) -> None:
        """Write the gradient of the products into `out` (n, w): z itself, or a tile in fewer bits."""


class GemmBackend:
    """The vendor's GEMM into a tile, then an epilogue over it. `fold` leaves the products in the tile, for whoever keeps it."""

    keeps = True

    def __init__(self, epilogues: Epilogues, narrow: bool = False, gpu: bool = False, design: str = ""):
        """`narrow`: 16-bit operands are multiplied as they are (`head/products.py`)."""
        self.epilogues, self.narrow, self.gpu, self.design = epilogues, narrow, gpu, design
        self.name, self.tiles = epilogues.name, epilogues.tiles

    def operand(self, acc: torch.dtype, hidden: torch.dtype, weight: Iterable[torch.dtype]) -> torch.dtype:
        return operand_dtype(self.narrow, acc, hidden, weight)

    def fold(self, rows: Rows, part: Slice, spec: LogitSpec, state: State, tile: Tensor | None) -> None:
        assert tile is not None
        multiply(rows.hidden, part.weight.t(), tile)
        self.epilogues.fold(tile, rows, part, spec, state)

    def dlogits(
        self, rows: Rows, part: Slice, spec: LogitSpec, stats: Statistics, coef: Coefficients, tile: Tensor
    ) -> Tensor:
        multiply(rows.hidden, part.weight.t(), tile)
        return self.turn(tile, rows, part, spec, stats, coef)

    def turn(
        self, z: Tensor, rows: Rows, part: Slice, spec: LogitSpec, stats: Statistics, coef: Coefficients
    ) -> Tensor:
        """`dlogits` of the products z, which it may overwrite."""
        dtype = dz_dtype(rows, part, z.dtype)
        out = z if dtype == z.dtype else torch.empty_like(z, dtype=dtype)
        self.epilogues.dlogits(z, rows, part, spec, stats, coef, out)
        return out


class TorchEpilogues:
    name = "torch"
    tiles = (3, 4)

    def fold(self, z: Tensor, rows: Rows, part: Slice, spec: LogitSpec, state: State) -> None:
        x = logits_(z.clone(), part.bias, spec, rows.inv_temperature)
        column = rows.ids - part.first
        inside = (column >= 0) & (column < x.shape[1])
        picked = x.gather(1, column.clamp(0, x.shape[1] - 1))
        state.picked.copy_(torch.where(inside, picked, state.picked))

        new_max = torch.maximum(state.max, x.amax(1))
        # Only -inf so far: any finite reference gives exp(-inf) = 0, where -inf - -inf would be NaN.
        reference = new_max.clamp(min=torch.finfo(x.dtype).min)
        shift = (state.max - reference).clamp_(min=FLOOR)
        keep = shift.exp()
        x.sub_(reference[:, None])
        if state.spread is None:
            state.sum.mul_(keep).add_(x.exp_().sum(1))
        else:
            x.clamp_(min=FLOOR)  # a logit of -inf: 0 * finite, not 0 * inf
            e = x.exp()
            state.spread.addcmul_(shift, state.sum).mul_(keep).add_(x.mul_(e).sum(1))
            state.sum.mul_(keep).add_(e.sum(1))
        state.max.copy_(new_max)

    def dlogits(
        self, z: Tensor, rows: Rows, part: Slice, spec: LogitSpec, stats: Statistics, coef: Coefficients, out: Tensor
    ) -> None:
        x = logits_(z, part.bias, spec, rows.inv_temperature)
        slope = logit_slope(x, spec, rows.inv_temperature)
        log_p = x.sub_(stats.max[:, None]).sub_(stats.log_sum[:, None]).clamp_(min=FLOOR)
        p = log_p.exp()
        if coef.entropy is None:
            g = p.mul_(-coef.probability[:, None])
        else:
            assert stats.entropy is not None
            inner = log_p.add_(stats.entropy[:, None]).mul_(coef.entropy[:, None])
            g = p.neg_().mul_(inner.add_(coef.probability[:, None]))
        column = rows.ids - part.first
        inside = (column >= 0) & (column < z.shape[1])
        g.scatter_add_(1, column.clamp(0, z.shape[1] - 1), coef.picked.masked_fill(~inside, 0.0))
        if slope is not None:
            g.mul_(slope)
        out.copy_(g)


FLOOR = -1e30  # stands for -inf below an exp: exp gives exactly 0, and 0 * FLOOR is 0


def logits_(z: Tensor, bias: Tensor | None, spec: LogitSpec, inv_temperature: Tensor | None) -> Tensor:
    if bias is not None:
        z.add_(bias)
    if spec.scale != 1.0:
        z.mul_(spec.scale)
    if spec.softcap is not None:
        z.div_(spec.softcap).tanh_().mul_(spec.softcap)
    if inv_temperature is not None:
        z.mul_(inv_temperature[:, None])
    return z


def logit_slope(x: Tensor, spec: LogitSpec, inv_temperature: Tensor | None) -> Tensor | None:
    """dx/dz of logits x (n, k) with respect to the products z; None where it is 1."""
    slope = None
    if spec.softcap is not None:
        t = x if inv_temperature is None else x / inv_temperature[:, None]
        slope = 1.0 - (t / spec.softcap).square()
    if inv_temperature is not None:
        slope = inv_temperature[:, None] if slope is None else slope * inv_temperature[:, None]
    if spec.scale != 1.0:
        slope = x.new_full((1, 1), spec.scale) if slope is None else slope * spec.scale
    return slope
