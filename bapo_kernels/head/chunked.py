"""The driver of the head: one loop over slices of the vocabulary, shared by every backend.

A slice is a block of rows of the weight. Forward, its logits are folded into running statistics of each row (online softmax);
backward, the same logits are made again, turned into their gradient, and multiplied into d_hidden and d_weight. Nothing here is
ever [N, V]: what lives at once is one tile of (rows of a block) x (columns of a slice).

Rows are what `ops.py` selected: forward only rows that count, backward only rows that have a gradient.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from bapo_kernels.head.precision import accumulation_dtype, full_precision
from bapo_kernels.head.products import gradient_dtype, multiply_add

# A tile of 4096 columns stays in a CPU's shared cache at the row counts of a micro-batch, and is wide enough for full GEMM speed. On a
# GPU, where d_hidden is read and written for each slice, twice that. With very wide heads the slice of the weight, not the tile, is what
# takes memory: a slice has at most as many numbers as a square of that size.
MAX_COLUMNS, MAX_COLUMNS_GPU = 4096, 8192
# Slices begin at multiples of this: the column tiles of GPU kernels divide it, and no slice is left a column or two wide.
COLUMN_UNIT = 128
# BLAS libraries switch to kernels with another order of summation for odd or few rows (and for a single column). With rows and row
# blocks in multiples of this, the bits of a row's logits do not depend on how many rows stand beside it.
ROW_UNIT = 16


@dataclass(frozen=True)
class LogitSpec:
    """How a product hidden . weight becomes a logit: (+ bias) * scale, softcap, / temperature; columns from vocab_size on are absent."""

    vocab_size: int
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class Weight:
    """The head's weight as tensors (V, D_i) side by side: what torch.cat(parts, 1) would be, which is made for some rows at a time."""

    parts: tuple[Tensor, ...]

    @classmethod
    def of(cls, given: Tensor | tuple[Tensor, ...]) -> "Weight":
        """From the argument of a public function."""
        return cls(tuple(given) if isinstance(given, tuple | list) else (given,))

    @property
    def shape(self) -> tuple[int, int]:
        return self.parts[0].shape[0], sum(p.shape[1] for p in self.parts)

    @property
    def columns(self) -> list[slice]:
        """Of each part."""
        edges = [0, *accumulate(p.shape[1] for p in self.parts)]
        return [slice(a, b) for a, b in pairwise(edges)]

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Of each part."""
        return [p.dtype for p in self.parts]

    def rows(self, which: slice | Tensor, dtype: torch.dtype) -> Tensor:
        chosen = [p[which].to(dtype) for p in self.parts]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen, 1)


@dataclass
class _PerRow:
    """Fields are contiguous tensors whose first axis is the row, or None."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(*(None if v is None else function(v) for v in vars(self).values()))

    def rows(self, which: slice | Tensor) -> Self:
        return self.map(lambda t: t[which])

    def put(self, which: slice | Tensor, values: Self) -> None:
        for into, value in zip(vars(self).values(), vars(values).values(), strict=True):
            if into is not None:
                into[which] = value


@dataclass
class Rows(_PerRow):
    hidden: Tensor  # (n, D)
    ids: Tensor  # (n, P) int64: the vocabulary ids whose logits are wanted; column 0 is the target, -1 is no id
    inv_temperature: Tensor | None  # (n,) accumulation dtype; None: 1


@dataclass
class State(_PerRow):
    """Running statistics of the logits x seen so far."""

    max: Tensor  # (n,) m = max x, -inf at the start
    sum: Tensor  # (n,) sum exp(x - m)
    spread: Tensor | None  # (n,) sum exp(x - m) (x - m); only where the entropy is wanted
    picked: Tensor  # (n, P) x at ids; NaN until its slice came by: an id outside the vocabulary never gets a number

    @classmethod
    def start(cls, ids: Tensor, entropy: bool, acc: torch.dtype) -> "State":
        nothing = torch.zeros(ids.shape[0], dtype=acc, device=ids.device)
        picked = torch.full(ids.shape, torch.nan, dtype=acc, device=ids.device)
        return cls(torch.full_like(nothing, -torch.inf), nothing, nothing.clone() if entropy else None, picked)

    def statistics(self) -> "Statistics":
        """Once every slice was folded in."""
        log_sum = self.sum.log()
        entropy = None if self.spread is None else log_sum - self.spread / self.sum
        return Statistics(self.max, log_sum, entropy, self.picked)


@dataclass
class Statistics(_PerRow):
    """What the forward leaves for the backward. Maximum and log-sum stay apart: their sum would lose a common offset of the logits."""

    max: Tensor  # (n,)
    log_sum: Tensor  # (n,)
    entropy: Tensor | None  # (n,)
    picked: Tensor  # (n, P)

    @property
    def logprobs(self) -> Tensor:  # (n, P)
        return (self.picked - self.max[:, None]) - self.log_sum[:, None]

    def logprobs_or_zero(self, padding: Tensor | None) -> Tensor:
        """0 at `padding`, where no id was recorded."""
        return self.logprobs if padding is None else self.logprobs.masked_fill(padding, 0.0)


@dataclass
class Coefficients(_PerRow):
    """The gradient of a row's logits x: sum_k picked_k (e_k - p) - entropy p (log p + H)."""

    probability: Tensor  # (n,) the sum of picked_k, what multiplies -p
    entropy: Tensor | None  # (n,)
    picked: Tensor  # (n, P) upstream gradients of the log-probs at ids

    @classmethod
    def of(cls, picked: Tensor, entropy: Tensor | None) -> "Coefficients":
        return cls(picked.sum(1), entropy, picked.contiguous())

    def wanted(self) -> Tensor:
        """(n,) True where a row has a gradient."""
        wanted = (self.picked != 0).any(1)
        return wanted if self.entropy is None else wanted | (self.entropy != 0)


class Needs(NamedTuple):
    """Which of them want a gradient."""

    hidden: bool
    weight: tuple[bool, ...]  # one for each part
    bias: bool


@dataclass
class Gradients:
    """Sums in the accumulation dtype, where they are wanted. d_weight may be in the weight's, if it is written once for each slice."""

    hidden: Tensor | None  # (n, D)
    weight: tuple[Tensor | None, ...]  # (V, D_i), one for each part
    bias: Tensor | None  # (V,)

    @classmethod
    def start(cls, needs: Needs, weight: Weight, rows: int, acc: torch.dtype, like: torch.dtype | None) -> "Gradients":
        """Sums of `rows` of hidden that are 0 so far; d_weight, whose first product overwrites it, in the dtype `like`, or its weight's."""
        (vocab, width), device = weight.shape, weight.parts[0].device
        pairs = zip(weight.parts, needs.weight, strict=True)
        return cls(
            torch.zeros(rows, width, dtype=acc, device=device) if needs.hidden else None,
            tuple(torch.empty(p.shape, dtype=like or p.dtype, device=device) if need else None for p, need in pairs),
            torch.zeros(vocab, dtype=acc, device=device) if needs.bias else None,
        )

    def trained(self, weight: Weight) -> list[tuple[Tensor, slice]]:
        """d_weight of the parts that want it, and their columns."""
        return [(d, columns) for d, columns in zip(self.weight, weight.columns, strict=True) if d is not None]

    def add(
        self, part: "Slice", dz: Tensor, hidden: Tensor, rows: slice, outs: "list[tuple[Tensor, slice]]", beta: float
    ) -> None:
        """What dz (b, w) gives, the gradient of the products of `hidden` (b, D; in `gradient_dtype`) with `part`. Of `outs`, each is where
        d_weight (w, D_i) of some columns goes, added to beta times what it holds."""
        if self.bias is not None:
            self.bias[part.first : part.last] += dz.sum(0)
        dz = dz.to(hidden.dtype)
        if self.hidden is not None:
            multiply_add(self.hidden[rows], dz, part.weight.to(dz.dtype))
        for out, columns in outs:
            multiply_add(out, dz.t(), hidden[:, columns], beta)


@dataclass(frozen=True)
class Slice:
    weight: Tensor  # (w, D)
    bias: Tensor | None  # (w,) accumulation dtype
    first: int  # vocabulary id of its first row

    @property
    def last(self) -> int:
        return self.first + self.weight.shape[0]


class Backend(Protocol):
    name: str
    tiles: tuple[int, int]  # tiles of logits alive at once, forward and backward: what a memory budget counts
    gpu: bool  # slices and blocks as they suit a GPU
    keeps: bool  # the products of a tile are in memory, and may stay there (a `GemmBackend`)
    design: str  # which kernels it takes, and why; "" where there is no choice

    def operand(self, acc: torch.dtype, hidden: torch.dtype, weight: Iterable[torch.dtype]) -> torch.dtype:
        """What to hand over hidden states and weight in, if these are their dtypes: that, or the accumulation dtype."""

    def fold(self, rows: Rows, part: Slice, spec: LogitSpec, state: State, tile: Tensor | None) -> None:
        """Fold the logits of `part` into `state`. `tile` is an (n, w) buffer, or None where `tiles[0]` is 0."""

    def dlogits(
        self, rows: Rows, part: Slice, spec: LogitSpec, stats: Statistics, coef: Coefficients, tile: Tensor
    ) -> Tensor:
        """The gradient (n, w) of the products hidden . weight of `part`, in `dz_dtype`. `tile` is a buffer, and may be the result."""


def dz_dtype(rows: Rows, part: Slice, acc: torch.dtype) -> torch.dtype:
    """What the gradient of a tile is handed over in: what it is multiplied in, or, where more is to become of it before it is rounded, the
    accumulation dtype. The gradient of a bias is its sum; recorded ids add to it."""
    whole = part.bias is not None or rows.ids.shape[1] > 1
    return acc if whole else gradient_dtype(rows.hidden.dtype, acc)


@cache
def slice_edges(vocab_size: int, hidden_size: int, gpu: bool) -> tuple[int, ...]:
    """Where slices begin and end: of nearly equal width, and on a device a function of V and D alone, as then are the bits of a result."""
    most = columns = MAX_COLUMNS_GPU if gpu else MAX_COLUMNS
    while columns > 2 * COLUMN_UNIT and columns * hidden_size > most**2:
        columns //= 2
    unit = min(COLUMN_UNIT, columns)
    units = -(-vocab_size // unit)
    count = -(-units // (columns // unit))
    return tuple(min(units * i // count * unit, vocab_size) for i in range(count + 1))


def slices(
    weight: Weight, bias: Tensor | None, edges: Sequence[int], acc: torch.dtype, operand: torch.dtype
) -> Iterator[Slice]:
    for first, last in pairwise(edges):
        w = weight.rows(slice(first, last), operand)
        yield Slice(w, None if bias is None else bias[first:last].to(acc).contiguous(), first)


def tile_budget(budget: int, held: int) -> int:
    """Bytes for tiles of logits beside copies of rows, `held` bytes. Those may exceed the budget; some tile there has to be."""
    return max(budget - held, budget // 8)


def row_blocks(rows: int, bytes_per_row: int, budget: int) -> list[slice]:
    """Row blocks of nearly equal size whose tiles fit the budget. All rows in one block is fastest, and the rule at usual sizes."""
    units = -(-rows // ROW_UNIT)
    fit = max(1, budget // max(bytes_per_row * ROW_UNIT, 1))
    count = max(1, -(-units // fit))
    edges = [min(units * i // count * ROW_UNIT, rows) for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def round_up(rows: int) -> int:
    return rows + -rows % ROW_UNIT


def widest(edges: Sequence[int]) -> int:
    return max(b - a for a, b in pairwise(edges))


def pad(t: Tensor) -> Tensor:
    """Up to a multiple of ROW_UNIT rows, by repeating the last: whatever is computed of it is as finite as there."""
    missing = -t.shape[0] % ROW_UNIT
    return t if missing == 0 else torch.cat([t, t[-1:].expand(missing, *t.shape[1:])])


def forward(
    backend: Backend, rows: Rows, weight: Weight, bias: Tensor | None, spec: LogitSpec, entropy: bool, budget: int
) -> Statistics:
    """Statistics of every row of `rows` over the whole vocabulary."""
    n, device = rows.hidden.shape[0], rows.hidden.device
    acc = accumulation_dtype(rows.hidden, *weight.parts, bias)
    operand = backend.operand(acc, rows.hidden.dtype, weight.dtypes)
    rows = replace(rows, hidden=rows.hidden.to(operand)).map(pad)
    total = rows.hidden.shape[0]
    state = State.start(rows.ids, entropy, acc)
    edges = slice_edges(spec.vocab_size, weight.shape[1], backend.gpu)
    left = tile_budget(budget, 2 * total * weight.shape[1] * operand.itemsize)
    tile, blocks = tile_and_blocks(total, widest(edges), backend.tiles[0], acc, device, left)
    with full_precision(device.type):
        for part in slices(weight, bias, edges, acc, operand):
            for block in blocks:
                view = tile_of(tile, block, part) if backend.tiles[0] else None
                backend.fold(rows.rows(block), part, spec, state.rows(block), view)
    return state.rows(slice(0, n)).statistics()


def backward(
    backend: Backend,
    rows: Rows,
    stats: Statistics,
    coef: Coefficients,
    weight: Weight,
    bias: Tensor | None,
    spec: LogitSpec,
    needs: Needs,
    budget: int,
    add_to: Gradients | None = None,
) -> Gradients:
    """Gradients of hidden (n, D; accumulation dtype), weight (V, D; its dtype) and bias (V,; accumulation dtype), where `needs` them.

    d_weight is written once for each slice, from a sum in the accumulation dtype; d_hidden sums over slices in that dtype. With
    `add_to`, those of weight and bias are added to what is there, in the accumulation dtype."""
    n, hidden_size = rows.hidden.shape
    device, acc = rows.hidden.device, accumulation_dtype(rows.hidden, *weight.parts, bias)
    # The same rows as in the forward make the same logits, so they are padded alike; a padded row has no gradient.
    rows, stats, coef = rows.map(pad), stats.map(pad), coef.map(pad)
    total = rows.hidden.shape[0]
    coef.rows(slice(n, total)).map(Tensor.zero_)
    operand = backend.operand(acc, rows.hidden.dtype, weight.dtypes)
    rows = replace(rows, hidden=rows.hidden.to(operand))
    factor = rows.hidden.to(gradient_dtype(operand, acc))
    beta = 0.0 if add_to is None else 1.0
    if add_to is None:
        sums = Gradients.start(needs, weight, total, acc, None)
    else:
        d_hidden = torch.zeros(total, hidden_size, dtype=acc, device=device) if needs.hidden else None
        sums = replace(add_to, hidden=d_hidden)
    edges = slice_edges(spec.vocab_size, hidden_size, backend.gpu)
    width, left = widest(edges), tile_budget(budget, total * hidden_size * (2 * operand.itemsize + acc.itemsize))
    tile, blocks = tile_and_blocks(total, width, backend.tiles[1], acc, device, left)
    # d_weight of a slice is summed up in `acc`: in its place, or, where that has fewer bits, beside it.
    trained = sums.trained(weight)
    beside = [None if d.dtype == acc else torch.empty(width, d.shape[1], dtype=acc, device=device) for d, _ in trained]
    with full_precision(device.type):
        for part in slices(weight, bias, edges, acc, operand):
            outs = [
                (d[part.first : part.last] if scratch is None else scratch[: part.weight.shape[0]], columns)
                for (d, columns), scratch in zip(trained, beside, strict=True)
            ]
            for i, block in enumerate(blocks):
                buffer = tile_of(tile, block, part)
                dz = backend.dlogits(rows.rows(block), part, spec, stats.rows(block), coef.rows(block), buffer)
                sums.add(part, dz, factor[block], block, outs, beta=1.0 if i else beta)
            for (d, _), (out, _) in zip(trained, outs, strict=True):
                if d.dtype != acc:
                    d[part.first : part.last].copy_(out)
    for d, _ in trained:
        d[spec.vocab_size :].zero_()
    return replace(sums, hidden=None if sums.hidden is None else sums.hidden[:n])


def tile_and_blocks(
    rows: int, columns: int, tiles: int, acc: torch.dtype, device: torch.device, budget: int
) -> tuple[Tensor, list[slice]]:
    """Room for the largest tile of (rows of a block) x `columns`, and the blocks, so that `tiles` of them fit the budget."""
    blocks = row_blocks(rows, tiles * columns * acc.itemsize, budget)
    return torch.empty(
        max(b.stop - b.start for b in blocks) * columns if tiles else 0, dtype=acc, device=device
    ), blocks


def tile_of(buffer: Tensor, block: slice, part: Slice) -> Tensor:
    rows, columns = block.stop - block.start, part.weight.shape[0]
    return buffer[: rows * columns].view(rows, columns)
