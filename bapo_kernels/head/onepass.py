"""The one-pass driver: forward and backward of the head in one go, so that the logits of a row are made once and not twice.

Rows go through in blocks. The products of a block with the whole vocabulary stay in a pool of tiles until the coefficients of its rows are
known; then they become their own gradient, in place, and are multiplied into d_hidden and d_weight. Rows without a gradient
leave the pool at once, so that what goes on to the backward is as many rows as the pool holds, whatever share of a block they are.

Coefficients come from the caller twice: early, from the statistics of some rows alone, whenever the pool has to make room; and in the
end those of the whole batch, which are right by definition. Rows still in the pool use the second. A row whose early coefficients turn
out to differ, or that had to leave the pool undecided, gets the difference from the ordinary backward, which makes its logits again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from bapo_kernels.head import chunked
from bapo_kernels.head.chunked import (
    ROW_UNIT,
    Coefficients,
    Gradients,
    Needs,
    Rows,
    Slice,
    State,
    Statistics,
    Weight,
    pad,
    round_up,
)
from bapo_kernels.head.eager import GemmBackend
from bapo_kernels.head.inputs import Problem
from bapo_kernels.head.precision import full_precision
from bapo_kernels.head.products import gradient_dtype

# Coefficients computed from a block and from the whole batch are the same if they differ by the rounding of some operations.
SAME_ROUNDINGS = 64

# (numbers of some rows, their statistics) -> their coefficients, and True where no other row can change them
EarlyCoefficients = Callable[[Tensor, Statistics], tuple[Coefficients, Tensor]]


class Pool:
    """The products of up to `capacity` rows with the vocabulary, one contiguous tile for each slice."""

    def __init__(self, capacity: int, edges: Sequence[int], dtype: torch.dtype, device: torch.device):
        self.capacity = capacity
        height = capacity + ROW_UNIT  # the rows of a product are padded
        buffer = torch.empty(height * edges[-1], dtype=dtype, device=device)
        self.tiles = [buffer[height * a : height * b].view(height, b - a) for a, b in pairwise(edges)]
        self.rows = torch.empty(0, dtype=torch.int64, device=device)  # numbers of the rows at its places

    @property
    def filled(self) -> int:
        return self.rows.shape[0]

    @property
    def room(self) -> int:
        return (self.capacity - self.filled) // ROW_UNIT * ROW_UNIT

    def keep(self, places: Tensor) -> None:
        """Only the rows at `places`, in that order."""
        for tile in self.tiles:
            tile[: places.shape[0]] = tile[places]
        self.rows = self.rows[places]


class OnePass:
    """One run over the rows that count: `forward`, then `finish` with the coefficients of all of them."""

    def __init__(
        self,
        problem: Problem,
        backend: GemmBackend,
        hidden: Tensor,  # (N, D)
        weight: Weight,
        bias: Tensor | None,
        *,
        needs: Needs,
        entropy: bool,  # whether the entropy has a coefficient
        capacity: int,  # rows whose products may be alive at once
    ):
        self.problem, self.backend, self.hidden, self.weight, self.bias = problem, backend, hidden, weight, bias
        n, acc, device = problem.selection.rows, problem.dtype, hidden.device
        self.operand = backend.operand(acc, hidden.dtype, weight.dtypes)
        self.edges = chunked.slice_edges(problem.spec.vocab_size, weight.shape[1], backend.gpu)
        self.pool = Pool(min(capacity, round_up(n)), self.edges, acc, device)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=acc, device=device)

        self.one_block = 0 < n <= capacity
        if not self.one_block:  # what is known of each row is collected here
            ids = problem.ids.shape
            self.stats = Statistics(zeros(n), zeros(n), zeros(n), zeros(*ids))
            self.used = Coefficients(zeros(n), zeros(n) if entropy else None, zeros(*ids))
            self.settled = torch.zeros(n, dtype=torch.bool, device=device)
        self.gradients = Gradients.start(needs, weight, hidden.shape[0], acc, acc)
        self.needs, self.beta = needs, 0.0  # d_weight holds nothing yet

    def forward(self, early: EarlyCoefficients) -> Statistics:
        """Statistics of all rows; and on the way, the gradients of those that leave the pool."""
        start, n = 0, self.problem.selection.rows
        while start < n:
            left = n - start
            blocks = -(-left // self.pool.room)  # of nearly equal size
            stop = start + min(left, round_up(-(-left // blocks)))
            block = torch.arange(start, stop, device=self.hidden.device)
            self._fold(block)
            if stop < n:
                self._make_room(block, early)
            start = stop
        return self.stats

    def finish(self, final: Coefficients, budget: int) -> Gradients:
        """The gradients, given the coefficients of all rows."""
        held = self.pool.rows
        if self.one_block:
            self.used = final
        else:
            self.used.put(held, final.rows(held))
        wanted = self.used.wanted()[held].nonzero().squeeze(1)
        if wanted.shape[0] < held.shape[0]:
            self.pool.keep(wanted)
        self._turn(first=0)
        del self.pool  # what follows has the budget for itself
        for d, _ in self.gradients.trained(self.weight):
            d[self.problem.spec.vocab_size if self.beta else 0 :].zero_()
        if not self.one_block:
            self._correct(final, budget)
        return self.gradients

    def _fold(self, block: Tensor) -> None:
        """Fold the rows `block` into their statistics; their products stay at the end of the pool."""
        rows, first = self._rows(block).map(pad), self.pool.filled
        state = State.start(rows.ids, True, self.problem.dtype)
        for part, tile in self._slices():
            self.backend.fold(rows, part, self.problem.spec, state, tile[first : first + rows.ids.shape[0]])
        stats = state.rows(slice(0, block.shape[0])).statistics()
        if self.one_block:
            self.stats = stats
        else:
            self.stats.put(block, stats)
        self.pool.rows = torch.cat([self.pool.rows, block])

    def _make_room(self, block: Tensor, early: EarlyCoefficients) -> None:
        """After the rows `block` came in: rows without a gradient go; the others, when they fill half of the pool. Undecided rows may
        wait in the other half."""
        coef, settled = early(block, self.stats.rows(block))
        self.used.put(block[settled], coef.rows(settled))
        self.settled[block] = settled
        # Of whole units: what the undecided leave has room for the next block.
        rows, half = self.pool.rows, self.pool.capacity // (2 * ROW_UNIT) * ROW_UNIT
        settled = self.settled[rows]
        undecided = (~settled).nonzero().squeeze(1)
        undecided = undecided[max(undecided.shape[0] - half, 0) :]
        ready = (settled & self.used.wanted()[rows]).nonzero().squeeze(1)
        if undecided.shape[0] or ready.shape[0] < rows.shape[0]:
            self.pool.keep(torch.cat([undecided, ready]))
        if self.pool.filled > half:
            self._turn(first=undecided.shape[0])

    def _turn(self, first: int) -> None:
        """Turn the products at places from `first` on into their gradient, use it, and free the places."""
        number, self.pool.rows = self.pool.rows[first:], self.pool.rows[:first]
        count = number.shape[0]
        if count == 0:
            return
        rows = self._rows(number).map(pad)
        stats, coef = self.stats.rows(number).map(pad), self.used.rows(number).map(pad)
        hidden, sums = rows.hidden.to(gradient_dtype(self.operand, self.problem.dtype)), self.gradients
        if sums.hidden is not None:
            sums = replace(sums, hidden=torch.zeros_like(hidden, dtype=self.problem.dtype))
        for part, tile in self._slices():
            z = tile[first : first + hidden.shape[0]]
            dz = self.backend.turn(z, rows, part, self.problem.spec, stats, coef)
            dz[count:].zero_()
            outs = [(d[part.first : part.last], columns) for d, columns in sums.trained(self.weight)]
            sums.add(part, dz, hidden, slice(None), outs, self.beta)
        self.beta = 1.0
        self._add_to_hidden(number, sums)

    def _correct(self, final: Coefficients, budget: int) -> None:
        """Add what is missing, or too much, where the coefficients used are not the final ones."""
        differs = _differ(final.picked, self.used.picked).any(1)
        rest = None
        if final.entropy is not None:
            assert self.used.entropy is not None
            differs |= _differ(final.entropy, self.used.entropy)
            rest = final.entropy - self.used.entropy
        number = differs.nonzero().squeeze(1)
        if number.shape[0] == 0:
            return
        problem, stats = self.problem, self.stats.rows(number)
        missing = Coefficients.of(final.picked - self.used.picked, rest).rows(number)
        sums = chunked.backward(
            self.backend,
            *(self._rows(number), stats, missing, self.weight, self.bias, problem.spec, self.needs, budget),
            add_to=self.gradients,
        )
        self._add_to_hidden(number, sums)

    def _add_to_hidden(self, number: Tensor, sums: Gradients) -> None:
        if self.gradients.hidden is not None and sums.hidden is not None:
            place = self.problem.selection.place(number)
            self.gradients.hidden.index_add_(0, place, sums.hidden[: number.shape[0]])

    def _rows(self, number: Tensor) -> Rows:
        """Rows by their number among those that count."""
        problem = self.problem
        inv_temperature = None if problem.inv_temperature is None else problem.inv_temperature[number]
        hidden = self.hidden[problem.selection.place(number)].to(self.operand)
        return Rows(hidden, problem.ids[number], inv_temperature)

    def _slices(self) -> Iterator[tuple[Slice, Tensor]]:
        parts = chunked.slices(self.weight, self.bias, self.edges, self.problem.dtype, self.operand)
        with full_precision(self.hidden.device.type):
            yield from zip(parts, self.pool.tiles, strict=True)


def _differ(final: Tensor, used: Tensor) -> Tensor:
    """By more than rounding. NaN differs from everything."""
    allowed = SAME_ROUNDINGS * torch.finfo(final.dtype).eps * torch.maximum(final.abs(), used.abs())
    return ~((final - used).abs() <= allowed)
