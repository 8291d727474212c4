"""KL(mu || pi) of two heads over the whole vocabulary, a slice at a time: the policy's, which learns, and the sampler's, which does not.

    KL = sum_v q_v ((x_v - m) - (y_v - m')) - log s + log s',      q = exp(x - m) / s the sampler's, y, m', s' the policy's

Both logits of a column are needed at once, so a slice makes two tiles. The backward is the driver's, with another dz: KL's gradient in
the policy's logits is p - q.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from bapo_kernels.checks import check_mask, shape_of
from bapo_kernels.head import chunked
from bapo_kernels.head.autograd import refuse_second_derivatives, zeros
from bapo_kernels.head.backends import resolve, resolve_budget
from bapo_kernels.head.chunked import (
    Coefficients,
    LogitSpec,
    Needs,
    Rows,
    Slice,
    State,
    Statistics,
    Weight,
)
from bapo_kernels.head.eager import FLOOR, logit_slope, logits_
from bapo_kernels.head.inputs import check_head_tensors, inverse_temperature, logit_spec
from bapo_kernels.head.ops import placed
from bapo_kernels.head.precision import accumulation_dtype, full_precision
from bapo_kernels.head.products import multiplies_narrow, multiply, operand_dtype
from bapo_kernels.head.rows import Selection


@torch.compiler.disable
def linear_kl(
    hidden: Tensor,  # (..., D)
    weight: Tensor | tuple[Tensor, ...],  # (V, D)
    rollout_hidden: Tensor,  # (..., D')
    rollout_weight: Tensor | tuple[Tensor, ...],  # (V, D')
    *,
    bias: Tensor | None = None,  # (V,)
    rollout_bias: Tensor | None = None,  # (V,)
    mask: Tensor | None = None,  # (...)
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    tp_group=None,
    backend: str = "auto",
) -> Tensor:
    """KL(mu || pi) of each token over the full vocabulary, (...), in nats; never the logits of either head.

    pi is the head on `hidden`, mu the one on `rollout_hidden`; the sampler's head may have another width. Options of
    the logits are those of `linear_logprobs`, on both sides. Differentiable in `hidden`, `weight` and `bias`; the
    rollout side is a constant. A masked token has 0 and no gradient. Every backend but "reference" runs the same
    loops in PyTorch operations. Used by the exact objective of BPO (`exact_bpo_loss`).

    Raises:
        ValueError: naming the argument, what came and what is allowed.
    """
    if tp_group is not None:
        raise ValueError("tp_group: vocabulary shards are not supported in this version; gather the weight")
    policy_weight, sampler_weight = Weight.of(weight), Weight.of(rollout_weight)
    check_head_tensors(hidden, policy_weight, bias)
    check_head_tensors(rollout_hidden, sampler_weight, rollout_bias, side="rollout_")
    layout, device = hidden.shape[:-1], hidden.device
    if rollout_hidden.shape[:-1] != layout or rollout_hidden.device != device:
        want = f"{(*layout, 'D')} on {device} to go with hidden {shape_of(hidden)}"
        raise ValueError(f"rollout_hidden must be {want}, got {shape_of(rollout_hidden)} on {rollout_hidden.device}")
    if sampler_weight.shape[0] != policy_weight.shape[0]:
        want = f"({policy_weight.shape[0]}, D) to go with weight {policy_weight.shape}"
        raise ValueError(f"rollout_weight must have shape {want}, got {sampler_weight.shape}")
    on_reference = resolve(backend, device) == "reference"
    rows = layout.numel()
    wanted = torch.ones(rows, dtype=torch.bool, device=device)
    if mask is not None:
        check_mask(mask, tuple(layout), f"hidden {shape_of(hidden)}", device)
        wanted = mask.reshape(rows) != 0
    selection = Selection.of(wanted)
    spec = logit_spec(policy_weight, logit_scale, softcap, vocab_size)
    acc = accumulation_dtype(*(hidden, bias, rollout_hidden, rollout_bias), *policy_weight.parts, *sampler_weight.parts)
    inv_temperature = inverse_temperature(temperature, layout, selection, acc, device)
    sampler = Sampler(
        Weight(tuple(p.detach() for p in sampler_weight.parts)),
        None if rollout_bias is None else rollout_bias.detach(),
        spec,
        acc,
        multiplies_narrow(device) and not on_reference,
    )
    flat = hidden.reshape(rows, hidden.shape[-1])
    flat_rollout = rollout_hidden.detach().reshape(rows, rollout_hidden.shape[-1])
    call = Call(sampler, selection, inv_temperature, spec, acc, resolve_budget(None, device))
    if on_reference:
        return _reference(call, flat, policy_weight, bias, flat_rollout).reshape(layout)
    return _Divergence.apply(call, flat, bias, flat_rollout, *policy_weight.parts).reshape(layout)


@dataclass
class PairRows(Rows):
    """The policy's rows (no ids), and the sampler's beside them."""

    rollout_hidden: Tensor  # (n, D')
    rollout_max: Tensor | None = None  # (n,) statistics of the sampler's logits, known in the backward
    rollout_log_sum: Tensor | None = None


@dataclass(frozen=True)
class Sampler:
    """The sampler's head, and the driver's backend that it makes."""

    weight: Weight  # (V, D')
    bias: Tensor | None
    spec: LogitSpec
    dtype: torch.dtype
    narrow: bool  # 16-bit operands are multiplied as they are

    name = "divergence"
    tiles = (4, 6)
    gpu = False  # its tiles are many, and PyTorch's operations on them
    keeps = False
    design = ""

    def operand(self, acc: torch.dtype, hidden: torch.dtype, weight: Iterable[torch.dtype]) -> torch.dtype:
        return operand_dtype(self.narrow, acc, hidden, weight)

    def logits(self, rows: PairRows, first: int, last: int) -> Tensor:
        weight = self.weight.rows(slice(first, last), rows.rollout_hidden.dtype)
        z = _product(rows.rollout_hidden, weight, self.dtype)
        bias = None if self.bias is None else self.bias[first:last].to(self.dtype)
        return logits_(z, bias, self.spec, rows.inv_temperature)

    def fold(self, rows: Rows, part: Slice, spec: LogitSpec, state: State, tile: Tensor | None) -> None:
        raise NotImplementedError  # the forward has statistics of its own

    def dlogits(
        self, rows: Rows, part: Slice, spec: LogitSpec, stats: Statistics, coef: Coefficients, tile: Tensor
    ) -> Tensor:
        assert isinstance(rows, PairRows)
        assert rows.rollout_max is not None
        assert rows.rollout_log_sum is not None
        multiply(rows.hidden, part.weight.t(), tile)
        y = logits_(tile, part.bias, spec, rows.inv_temperature)
        slope = logit_slope(y, spec, rows.inv_temperature)
        y.sub_(stats.max[:, None]).sub_(stats.log_sum[:, None]).exp_()
        x = self.logits(rows, part.first, part.first + part.weight.shape[0])
        q = x.sub_(rows.rollout_max[:, None]).sub_(rows.rollout_log_sum[:, None]).exp_()
        y.sub_(q).mul_(coef.probability[:, None])
        return y if slope is None else y.mul_(slope)


@dataclass(frozen=True)
class Call:
    sampler: Sampler
    selection: Selection
    inv_temperature: Tensor | None
    spec: LogitSpec
    dtype: torch.dtype
    budget: int


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, hidden: Tensor, bias: Tensor | None, rollout_hidden: Tensor, *parts: Tensor):
        rows = _rows(call, hidden, Weight(parts), rollout_hidden)
        kl, policy, sampler = _statistics(call, rows, Weight(parts), bias)
        ctx.call = call
        ctx.save_for_backward(hidden, bias, rollout_hidden, *policy, *sampler, *parts)
        return call.selection.put(kl)

    @staticmethod
    def backward(ctx, g: Tensor):
        refuse_second_derivatives()
        call: Call = ctx.call
        hidden, bias, rollout_hidden, m, log_s, rollout_m, rollout_log_s, *parts = ctx.saved_tensors
        weight = Weight(tuple(parts))
        needs = Needs(ctx.needs_input_grad[1], ctx.needs_input_grad[4:], ctx.needs_input_grad[2])
        g = call.selection.take(g).to(call.dtype)
        inner = Selection.of(g != 0)
        if inner.mask is not None:  # rows cannot be compacted: those without a gradient have coefficients of 0
            inner = Selection(inner.total)
        outer = call.selection.then(inner)
        if outer.rows == 0:
            return None, *zeros(ctx, hidden, bias, rollout_hidden, *parts)
        rows = _rows(call, hidden, weight, rollout_hidden).map(inner.take)
        rows = replace(rows, rollout_max=inner.take(rollout_m), rollout_log_sum=inner.take(rollout_log_s))
        none = g.new_zeros(outer.rows, 0)
        stats = Statistics(inner.take(m), inner.take(log_s), None, none)
        coef = Coefficients(inner.take(g).contiguous(), None, none)
        sums = chunked.backward(call.sampler, rows, stats, coef, weight, bias, call.spec, needs, call.budget)
        d_hidden, d_bias, *d_weight = placed(sums, outer, hidden, bias)
        return None, d_hidden, d_bias, None, *d_weight


def _rows(call: Call, hidden: Tensor, weight: Weight, rollout_hidden: Tensor) -> PairRows:
    """In what they are multiplied in."""
    take, operand, sampler = call.selection.take, call.sampler.operand, call.sampler.weight
    ids = torch.zeros(call.selection.rows, 0, dtype=torch.int64, device=hidden.device)
    return PairRows(
        take(hidden).to(operand(call.dtype, hidden.dtype, weight.dtypes)),
        ids,
        call.inv_temperature,
        take(rollout_hidden).to(operand(call.dtype, rollout_hidden.dtype, sampler.dtypes)),
    )


def _product(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    z = torch.empty(hidden.shape[0], weight.shape[0], dtype=dtype, device=hidden.device)
    multiply(hidden, weight.t(), z)
    return z


def _statistics(call: Call, rows: PairRows, weight: Weight, bias: Tensor | None):
    """KL (n,), and maximum and log-sum of the policy's and of the sampler's logits."""
    n, acc = rows.hidden.shape[0], call.dtype
    if n:
        rows = rows.map(chunked.pad)
    total = rows.hidden.shape[0]
    maxima = torch.full((2, total), -torch.inf, dtype=acc, device=rows.hidden.device)  # policy, sampler
    sums = torch.zeros_like(maxima)
    cross = torch.zeros_like(maxima[0])  # sum exp(x - m) ((x - m) - (y - m'))
    edges = chunked.slice_edges(call.spec.vocab_size, weight.shape[1], call.sampler.gpu)
    bytes_per_row = call.sampler.tiles[0] * max(b - a for a, b in pairwise(edges)) * acc.itemsize
    with full_precision(rows.hidden.device.type):
        for part in chunked.slices(weight, bias, edges, acc, rows.hidden.dtype):
            for block in chunked.row_blocks(total, bytes_per_row, call.budget):
                here = rows.rows(block)
                y = logits_(_product(here.hidden, part.weight, acc), part.bias, call.spec, here.inv_temperature)
                x = call.sampler.logits(here, part.first, part.first + part.weight.shape[0])
                m, s, c = maxima[:, block], sums[:, block], cross[block]
                new = torch.maximum(m, torch.stack([y.amax(1), x.amax(1)]))
                reference = new.clamp(min=torch.finfo(acc).min)
                shift = (m - reference).clamp_(min=FLOOR)
                keep = shift.exp()
                y.sub_(reference[0, :, None])
                x.sub_(reference[1, :, None])
                e = x.exp()
                # Where the sampler has no probability the policy's does not matter, -inf included.
                difference = torch.where(e == 0, 0.0, e * x.sub_(y))
                # Both differences of the terms so far shift; a term still empty has nothing to shift.
                moved = torch.where(s[1] == 0, 0.0, (shift[1] - shift[0]) * s[1])
                c.add_(moved).mul_(keep[1]).add_(difference.sum(1))
                s.mul_(keep).add_(torch.stack([y.exp_().sum(1), e.sum(1)]))
                m.copy_(new)
    log_sums = sums.log()
    kl = cross / sums[1] - log_sums[1] + log_sums[0]
    policy, sampler = (torch.stack([maxima[i], log_sums[i]])[:, :n].unbind() for i in (0, 1))
    return kl[:n], policy, sampler


def _reference(call: Call, hidden: Tensor, weight: Weight, bias: Tensor | None, rollout_hidden: Tensor) -> Tensor:
    rows, vocab = _rows(call, hidden, weight, rollout_hidden), call.spec.vocab_size
    with full_precision(hidden.device.type):
        z = rows.hidden @ weight.rows(slice(vocab), call.dtype).t()
        if bias is not None:
            z = z + bias[:vocab].to(call.dtype)
        z = z * call.spec.scale
        if call.spec.softcap is not None:
            z = call.spec.softcap * torch.tanh(z / call.spec.softcap)
        if call.inv_temperature is not None:
            z = z * call.inv_temperature[:, None]
        log_p = z.log_softmax(-1)
        log_q = call.sampler.logits(rows, 0, vocab).log_softmax(-1)
        q = log_q.exp()
        return call.selection.put(torch.where(q == 0, 0.0, q * (log_q - log_p)).sum(-1))
