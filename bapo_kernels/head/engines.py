"""Which way a call takes through the head, and what it costs there.

A pass is one product of hidden states and weight, 2 N V D operations. Where a share m of the N tokens counts, and a has a gradient:

    recompute   m + 3a   the logits are made once for the statistics and again for the gradient, of hidden and of weight
    one-pass    m + 2a   logits are kept until the coefficients are known; needs memory for some rows of them, and a loss whose
                         coefficients follow from the token alone (for BAPO: of almost all tokens)
    frozen      2m       d logprob / d hidden is made in the forward; for a weight without gradient, where the others take one pass less

The unfused path pays 3, and 2 with a weight without gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

from bapo_kernels.head.chunked import ROW_UNIT, Backend, round_up, slice_edges, tile_budget, widest
from bapo_kernels.head.products import gradient_dtype

ENGINES = ("auto", "recompute", "one-pass", "frozen")
# With fewer rows in a block, reading the weight for each takes longer than the pass that is saved. On a GPU, reading and writing the
# fp32 sum of d_weight for a block takes as long as a product of 700 to 1000 rows.
LEAST_ROWS, LEAST_ROWS_GPU = 64, 2048
NEAR = 1.05  # of two engines with so nearly the same passes, the one that holds less
CAPTURED = "rows are not counted while a CUDA graph is captured"
TRACED = "rows are not counted while a graph is compiled"
NOT_KEPT = "its backend does not keep the products of a tile"
TRAINED = "weight or bias requires a gradient"


class Plan(NamedTuple):
    engine: str
    passes: float  # in products of 2 N V D operations, N all tokens
    memory_bytes: int  # at most, beyond the inputs and their gradients
    reason: str


def check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the choice looks at."""

    tokens: int
    unmasked: float  # share of tokens that count
    active: float  # share of tokens expected to have a gradient
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype  # of logits and sums
    narrow_hidden: bool  # held in fewer bits than that
    widened: bool  # slices of the weight are copied, to another dtype or from several tensors
    hidden_grad: bool
    trained_columns: int  # of the weight
    summed_columns: int  # those of them whose gradient is summed up beside its place, being of fewer bits
    bias_grad: bool
    late_because: str | None  # coefficients hang on more than the token; None: they are known early
    topk: bool
    entropy_grad: bool
    captured: bool  # by a CUDA graph: rows cannot be counted
    traced: bool  # into a graph that is compiled, whose rows are counted when it runs
    tiles: int  # of the backend
    gpu: bool
    keeps: bool  # the backend can keep products
    budget: int

    @classmethod
    def of(
        cls,
        backend: Backend,
        hidden: torch.dtype,
        parts: Sequence[tuple[int, torch.dtype, bool]],  # of the weight: columns, dtype, whether trained
        dtype: torch.dtype,
        **known,
    ) -> "Work":
        operand = backend.operand(dtype, hidden, [part for _, part, _ in parts])
        multiplied = (operand, gradient_dtype(operand, dtype))
        return cls(
            dtype=dtype,
            hidden_size=sum(columns for columns, _, _ in parts),
            narrow_hidden=hidden != dtype,
            widened=len(parts) > 1 or any(part != factor for _, part, _ in parts for factor in multiplied),
            trained_columns=sum(columns for columns, _, trained in parts if trained),
            summed_columns=sum(columns for columns, part, trained in parts if trained and part != dtype),
            tiles=max(backend.tiles),
            gpu=backend.gpu,
            keeps=backend.keeps,
            **known,
        )

    @property
    def trains(self) -> bool:
        return self.hidden_grad or self.head_grad

    @property
    def head_grad(self) -> bool:
        return self.trained_columns > 0 or self.bias_grad

    @property
    def counted(self) -> int:
        return round(self.tokens * self.unmasked)

    @cached_property
    def columns(self) -> int:
        return widest(slice_edges(self.vocab_size, self.hidden_size, self.gpu))

    @property
    def copied(self) -> int:
        """Rows of the weight in copies: of a slice, and of the one before it, which goes when that is made."""
        return 2 * self.columns if self.widened else 0

    def bytes(self, *shape: float) -> int:
        return int(prod(shape) * self.dtype.itemsize)

    @cached_property
    def capacity(self) -> int:
        """Rows whose products the one-pass engine can keep within the budget."""
        beside = self.one_pass_bytes(0)
        each = self.one_pass_bytes(1) - beside
        fit = max(self.budget - beside, 0) // each
        return min(fit // ROW_UNIT * ROW_UNIT, round_up(self.counted))

    def one_pass_bytes(self, capacity: int) -> int:
        """The pool, a tile to rearrange it or those of the backend, the rows at work, and the sums that wait for the backward in full
        precision."""
        d, height = self.hidden_size, capacity + ROW_UNIT
        pool = self.bytes(height, self.vocab_size + max(self.tiles - 1, 1) * self.columns + 4 * d)
        waiting = self.bytes(self.summed_columns, self.vocab_size)
        if self.narrow_hidden and self.hidden_grad:
            waiting += self.bytes(self.tokens, d)
        return pool + waiting + self.bytes(self.copied, d)

    def frozen_bytes(self) -> int:
        """d logprob / d hidden, the rows and their padded copy, and the tile."""
        return self._looped(self.counted, 3)

    def recompute_bytes(self) -> int:
        """The tile, the rows that are picked out or widened and their padded copy, and their gradient before it is put in its place."""
        rows = round(self.tokens * self.active)
        return max(self.forward_bytes(), self._looped(rows, 3 if self._picked(rows) else 0))

    def forward_bytes(self) -> int:
        return self._looped(self.counted, 2 if self._picked(self.counted) else 0)

    def _picked(self, rows: int) -> bool:
        """Whether these rows are copied: not all of them, not of the dtype, or not of whole units."""
        return rows < self.tokens or self.narrow_hidden or rows % ROW_UNIT != 0

    def _looped(self, rows: int, copies: int) -> int:
        """Of a loop over slices of the vocabulary that holds so many copies of its rows."""
        held = self.bytes(copies, rows, self.hidden_size)
        each = self.bytes(self.tiles, self.columns)
        tile = min(each * round_up(rows), max(tile_budget(self.budget, held), each * ROW_UNIT))
        return tile + held + self.bytes(self.copied, self.hidden_size) + self.bytes(self.columns, self.summed_columns)


def choose(engine: str, work: Work) -> Plan:
    """The engine for `work`; ValueError where the one that is asked for cannot serve."""
    m, a = work.unmasked, work.active
    if not work.trains:
        return Plan("recompute", m, work.forward_bytes(), "no gradient is wanted")
    refusals = {"recompute": None, "one-pass": _refuse_one_pass(work), "frozen": _refuse_frozen(work)}
    if engine != "auto" and (reason := refusals[engine]):
        raise ValueError(f"engine={engine!r} cannot serve this call: {reason}")
    products = work.hidden_grad + work.trained_columns / max(work.hidden_size, 1)
    # The gradient of an entropy is not prepared: its rows are made again.
    again = 2 * a if work.entropy_grad else 0.0
    plans = {
        "recompute": Plan("recompute", m + (1 + products) * a, work.recompute_bytes(), ""),
        "one-pass": Plan("one-pass", m + products * a, work.one_pass_bytes(work.capacity), ""),
        "frozen": Plan("frozen", 2 * m + again, max(work.frozen_bytes(), work.recompute_bytes() if again else 0), ""),
    }
    if engine != "auto":
        return plans[engine]._replace(reason="asked for")
    least = LEAST_ROWS_GPU if work.gpu else LEAST_ROWS
    if refusals["one-pass"] is None and work.capacity < min(least, work.counted):
        refusals["one-pass"] = (
            f"memory_budget={work.budget} holds the products of {work.capacity} rows, and fewer than {least} do not pay"
        )
    if refusals["frozen"] is None and work.frozen_bytes() > work.budget:
        refusals["frozen"] = f"d logprob / d hidden takes more than memory_budget={work.budget}"
    served = [plan for name, plan in plans.items() if refusals[name] is None]
    fewest = min(plan.passes for plan in served)
    # Without a gradient of the head, d logprob / d hidden and kept products come out nearly alike where most tokens are active.
    near = fewest if work.head_grad else NEAR * fewest
    best = min((plan for plan in served if plan.passes <= near), key=lambda plan: plan.memory_bytes)
    why = "fewest passes" if best.passes == fewest else "nearly the fewest passes, in less memory"
    others = [f"{name}: {reason}" for name, reason in refusals.items() if reason and reason != TRAINED]
    return best._replace(reason="; ".join([why, *others]))


def _refuse_one_pass(work: Work) -> str | None:
    if work.late_because:
        return work.late_because
    if work.captured:
        return CAPTURED
    if work.traced:
        return TRACED
    if not work.keeps:
        return NOT_KEPT
    if work.capacity < min(ROW_UNIT, work.counted):
        waits = " and the fp32 sum of d_weight" if work.summed_columns else ""
        take = f"which take {work.one_pass_bytes(ROW_UNIT)}"
        return f"memory_budget={work.budget} does not hold the products of {ROW_UNIT} rows{waits}, {take}"
    return None


def _refuse_frozen(work: Work) -> str | None:
    if work.head_grad:
        return TRAINED
    if work.topk:
        return "log-probs of recorded ids are wanted"
    if work.captured:
        return CAPTURED
    return None if work.keeps else NOT_KEPT
