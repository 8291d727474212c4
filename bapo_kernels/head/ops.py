"""What the head does with the vocabulary, forward and backward; and the same as operators, for graphs that are compiled.

While a graph is traced nobody knows how many rows count: its tensors have all N rows, and the selection is a mask. An operator gets the
tensors when the graph runs. It selects rows by number, does what an uncompiled call does, and puts the results back among N rows.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bapo_kernels.compiling import is_traced
from bapo_kernels.head import backends, chunked, frozen
from bapo_kernels.head.chunked import Backend, Coefficients, Gradients, LogitSpec, Needs, Rows, Statistics, Weight
from bapo_kernels.head.eager import GemmBackend
from bapo_kernels.head.inputs import Problem
from bapo_kernels.head.precision import accumulation_dtype
from bapo_kernels.head.rows import Selection, is_captured


@dataclass(frozen=True)
class Call:
    problem: Problem
    backend: Backend
    entropy: bool  # wanted
    frozen: bool  # the weight needs no gradient, and the gradient of hidden is prepared in the forward
    budget: int  # bytes


@dataclass(frozen=True)
class Inputs:
    """Whose gradients may be wanted."""

    hidden: Tensor  # (N, D)
    weight: Weight
    bias: Tensor | None


# Of hidden (N, D), bias and the parts of the weight, in their dtypes; None where it is not wanted.
InputGradients = tuple[Tensor | None, ...]


def statistics(call: Call, inputs: Inputs) -> tuple[Statistics, Tensor | None]:
    """Of the n selected rows; and d logprob / d hidden (n, D), if call.frozen."""
    if is_traced(inputs.hidden):
        return _traced_statistics(call, inputs)
    problem, hidden = call.problem, inputs.hidden
    if problem.selection.rows == 0:
        empty = partial(hidden.new_zeros, dtype=problem.dtype)
        score = empty(0, hidden.shape[1]) if call.frozen else None
        return Statistics(empty(0), empty(0), empty(0) if call.entropy else None, empty(problem.ids.shape)), score
    # The driver may copy the rows once more, so that nothing here holds them.
    take = partial(Rows, ids=problem.ids, inv_temperature=problem.inv_temperature)
    given = (inputs.weight, inputs.bias, problem.spec, call.entropy, call.budget)
    if call.frozen:
        assert isinstance(call.backend, GemmBackend)
        return frozen.forward(call.backend, take(problem.selection.take(hidden)), *given)
    return chunked.forward(call.backend, take(problem.selection.take(hidden)), *given), None


def gradients(
    call: Call,
    inputs: Inputs,
    needs: Needs,
    stats: Statistics,
    score: Tensor | None,
    g_logprobs: Tensor | None,  # (N, P)
    g_entropy: Tensor | None,  # (N,)
) -> InputGradients:
    if is_traced(inputs.hidden):
        return _traced_gradients(call, inputs, needs, stats, score, g_logprobs, g_entropy)
    problem, hidden, weight, bias = call.problem, inputs.hidden, inputs.weight, inputs.bias
    counted = problem.selection
    g_logprobs, g_entropy = (None if g is None else counted.take(g) for g in (g_logprobs, g_entropy))
    coef = coefficients(problem.padding, stats, g_logprobs, g_entropy)
    if score is not None and not _trains_entropy(coef.entropy):
        g = coef.probability[:, None]
        d_hidden = score.masked_fill(g == 0, 0.0).mul_(g)
        return counted.put(d_hidden.to(hidden.dtype)), None, *(None for _ in weight.parts)
    inner = Selection.of(coef.wanted())
    if inner.mask is not None:  # rows cannot be compacted: those without a gradient have coefficients of 0
        inner = Selection(inner.total)
    outer = counted.then(inner)
    if outer.rows == 0:
        pairs = zip((hidden, bias, *weight.parts), (needs.hidden, needs.bias, *needs.weight), strict=True)
        return tuple(t.new_zeros(t.shape) if need and t is not None else None for t, need in pairs)
    inv_temperature = None if problem.inv_temperature is None else inner.take(problem.inv_temperature)
    rows = Rows(outer.take(hidden), inner.take(problem.ids), inv_temperature)
    stats, coef = stats.map(inner.take), coef.map(inner.take)
    sums = chunked.backward(call.backend, rows, stats, coef, weight, bias, problem.spec, needs, call.budget)
    return placed(sums, outer, hidden, bias)


def coefficients(
    padding: Tensor | None, stats: Statistics, g_logprobs: Tensor | None, g_entropy: Tensor | None
) -> Coefficients:
    """From the upstream gradients of some rows: of their log-probs at the ids (n, P), where those are not `padding`, and of their entropy
    (n,)."""
    if g_logprobs is None:
        picked = torch.zeros_like(stats.picked)
    else:
        picked = g_logprobs.to(stats.max.dtype)
        if padding is not None:
            picked = picked.masked_fill(padding, 0.0)
        # The log-prob of an id outside the vocabulary is NaN, and so is then the gradient.
        picked = picked.masked_fill(stats.picked.isnan() & (picked != 0), torch.nan)
    return Coefficients.of(picked, None if g_entropy is None else g_entropy.to(stats.max.dtype).contiguous())


def placed(sums: Gradients, rows: Selection, hidden: Tensor, bias: Tensor | None) -> InputGradients:
    """The gradients of hidden (N, D), bias and the parts of the weight, in their dtypes, from those of `rows` of hidden."""
    d_hidden = None if sums.hidden is None else rows.put(sums.hidden.to(hidden.dtype))
    return d_hidden, None if sums.bias is None or bias is None else sums.bias.to(bias.dtype), *sums.weight


def _trains_entropy(coefficient: Tensor | None) -> bool:
    return coefficient is not None and (is_captured(coefficient) or bool((coefficient != 0).any()))


# An operator takes tensors, numbers and words. What there is none of comes back as a tensor of no element.


class Operands(NamedTuple):
    """A call and its inputs, as an operator takes them."""

    hidden: Tensor
    parts: list[Tensor]
    bias: Tensor | None
    mask: Tensor
    ids: Tensor
    inv_temperature: Tensor | None
    topk: bool
    vocab_size: int
    scale: float
    softcap: float | None
    backend: str
    entropy: bool
    frozen: bool
    budget: int

    @classmethod
    def of(cls, call: Call, inputs: Inputs) -> "Operands":
        problem, spec = call.problem, call.problem.spec
        assert problem.selection.mask is not None
        tensors = inputs.hidden, list(inputs.weight.parts), inputs.bias, problem.selection.mask, problem.ids
        logits = problem.inv_temperature, problem.topk, spec.vocab_size, spec.scale, spec.softcap
        return cls(*tensors, *logits, call.backend.name, call.entropy, call.frozen, call.budget)

    def compacted(self) -> tuple[Call, Inputs]:
        """With the rows that count selected by number."""
        selection = Selection.of(self.mask)
        inv_temperature = self.inv_temperature
        problem = Problem(
            self.mask.shape,
            selection,
            selection.take(self.ids).contiguous(),
            self.topk,
            None if inv_temperature is None else selection.take(inv_temperature, fill=1),
            LogitSpec(self.vocab_size, self.scale, self.softcap),
            self.dtype,
        )
        weight = Weight(tuple(self.parts))
        chosen = backends.choose(self.backend, self.hidden.device, self.hidden.dtype, weight.dtypes)
        assert chosen is not None
        call = Call(problem, chosen, self.entropy, self.frozen, self.budget)
        return call, Inputs(self.hidden, weight, self.bias)

    @property
    def dtype(self) -> torch.dtype:
        return accumulation_dtype(self.hidden, *self.parts, self.bias)


OPERANDS = (
    "Tensor hidden, Tensor[] parts, Tensor? bias, Tensor mask, Tensor ids, Tensor? inv_temperature, bool topk, "
    "SymInt vocab_size, float scale, float? softcap, str backend, bool entropy, bool frozen, int budget"
)
SAVED = "Tensor maximum, Tensor log_sum, Tensor? entropies, Tensor picked, Tensor? score"


def _traced_statistics(call: Call, inputs: Inputs) -> tuple[Statistics, Tensor | None]:
    maximum, log_sum, entropy, picked, score = _statistics(*Operands.of(call, inputs))
    return Statistics(maximum, log_sum, entropy if call.entropy else None, picked), score if call.frozen else None


@torch.library.custom_op(
    "bapo_kernels::head_statistics",
    mutates_args=(),
    schema=f"({OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _statistics(*given):
    call, inputs = Operands(*given).compacted()
    stats, score = statistics(call, inputs)
    put, nothing = call.problem.selection.put, stats.max.new_zeros
    return (
        put(stats.max),
        put(stats.log_sum),
        nothing(0) if stats.entropy is None else put(stats.entropy),
        put(stats.picked),
        nothing(0, inputs.hidden.shape[1]) if score is None else put(score),
    )


@_statistics.register_fake
def _(*given):
    x = Operands(*given)
    (rows, width), empty = x.hidden.shape, partial(x.hidden.new_empty, dtype=x.dtype)
    return (
        empty(rows),
        empty(rows),
        empty(rows if x.entropy else 0),
        empty(x.ids.shape),
        empty(rows if x.frozen else 0, width),
    )


def _traced_gradients(
    call: Call,
    inputs: Inputs,
    needs: Needs,
    stats: Statistics,
    score: Tensor | None,
    g_logprobs: Tensor | None,
    g_entropy: Tensor | None,
) -> InputGradients:
    wanted = [needs.hidden, needs.bias, *needs.weight]
    saved = (stats.max, stats.log_sum, stats.entropy, stats.picked, score)
    found = iter(_gradients(g_logprobs, g_entropy, wanted, *saved, *Operands.of(call, inputs)))
    return tuple(next(found) if need else None for need in wanted)


@torch.library.custom_op(
    "bapo_kernels::head_gradients",
    mutates_args=(),
    schema=f"(Tensor? g_logprobs, Tensor? g_entropy, bool[] wanted, {SAVED}, {OPERANDS}) -> Tensor[]",
)
def _gradients(g_logprobs, g_entropy, wanted, maximum, log_sum, entropies, picked, score, *given):
    call, inputs = Operands(*given).compacted()
    take = call.problem.selection.take
    stats = Statistics(maximum, log_sum, entropies, picked).map(take)
    needs = Needs(wanted[0], tuple(wanted[2:]), wanted[1])
    found = gradients(call, inputs, needs, stats, None if score is None else take(score), g_logprobs, g_entropy)
    return [t for t, need in zip(found, wanted, strict=True) if need and t is not None]


@_gradients.register_fake
def _(g_logprobs, g_entropy, wanted, maximum, log_sum, entropies, picked, score, *given):
    x = Operands(*given)
    pairs = zip((x.hidden, x.bias, *x.parts), wanted, strict=True)
    return [t.new_empty(t.shape) for t, need in pairs if need and t is not None]
