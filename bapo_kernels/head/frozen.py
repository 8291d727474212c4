"""The frozen-head driver: where the weight needs no gradient, d logprob / d hidden is made in the forward.

    u = d logprob / d hidden = (1 - p_y) s_y W_y - sum over v != y of p_v s_v W_v        s = d logit / d product

The sum runs along with the online softmax, as a second product with the tile that was just folded; the backward of any upstream
gradient g is then g u: two products for each row in all. The target's column stands apart, since where the policy is sure of it the two
parts would cancel to nothing but rounding.
"""

from dataclasses import replace

import torch
from torch import Tensor

from bapo_kernels.head import chunked
from bapo_kernels.head.chunked import Coefficients, LogitSpec, Rows, State, Statistics, Weight
from bapo_kernels.head.eager import FLOOR, GemmBackend
from bapo_kernels.head.precision import accumulation_dtype, full_precision
from bapo_kernels.head.products import gradient_dtype, multiply_add


def forward(
    backend: GemmBackend,
    rows: Rows,
    weight: Weight,
    bias: Tensor | None,
    spec: LogitSpec,
    entropy: bool,
    budget: int,
) -> tuple[Statistics, Tensor]:
    """Statistics of every row and u (n, D), for rows with one id each, the target."""
    n, device = rows.hidden.shape[0], rows.hidden.device
    acc = accumulation_dtype(rows.hidden, *weight.parts, bias)
    operand = backend.operand(acc, rows.hidden.dtype, weight.dtypes)
    factors = gradient_dtype(operand, acc)
    rows = replace(rows, hidden=rows.hidden.to(operand)).map(chunked.pad)
    total = rows.hidden.shape[0]
    state, others = State.start(rows.ids, entropy, acc), torch.zeros_like(rows.hidden, dtype=acc)
    product = torch.zeros(total, 1, dtype=acc, device=device)  # hidden . W_y
    no_ids = rows.ids.new_zeros(total, 0)
    edges = chunked.slice_edges(spec.vocab_size, weight.shape[1], backend.gpu)
    left = chunked.tile_budget(budget, 3 * others.nbytes)
    tile, blocks = chunked.tile_and_blocks(total, chunked.widest(edges), max(backend.tiles), acc, device, left)
    with full_precision(device.type):
        for part in chunked.slices(weight, bias, edges, acc, operand):
            for block in blocks:
                z, here, running = chunked.tile_of(tile, block, part), rows.rows(block), state.rows(block)
                before = running.max.clone()
                backend.fold(here, part, spec, running, z)
                column = here.ids - part.first
                outside = (column < 0) | (column >= z.shape[1])
                column = column.clamp(0, z.shape[1] - 1)
                product[block] = torch.where(outside, product[block], z.gather(1, column))
                m = running.max.clamp(min=torch.finfo(acc).min)  # not -inf: -inf - -inf is NaN
                e = backend.turn(z, replace(here, ids=no_ids[block]), part, spec, *_exponentials(m))
                e.scatter_(1, column, torch.where(outside, e.gather(1, column), 0.0))
                rescale = (before - m).clamp_(min=FLOOR).exp_()
                multiply_add(others[block].mul_(rescale[:, None]), e.to(factors), part.weight.to(factors))
    room = tile.nbytes
    del tile
    stats = state.statistics()
    own = -torch.expm1(stats.logprobs[:, 0]) * _slope(product[:, 0], rows, bias, spec)
    u = others.div_(-state.sum[:, None])
    for block in chunked.row_blocks(total, weight.shape[1] * acc.itemsize, room):
        ids = rows.ids[block, 0].clamp(0, spec.vocab_size - 1)
        u[block].addcmul_(own[block, None], weight.rows(ids, acc))
    return stats.rows(slice(0, n)), u[:n]


def _exponentials(m: Tensor) -> tuple[Statistics, Coefficients]:
    """With these the gradient of the products is exp(x - m) s."""
    zero, none = torch.zeros_like(m), m.new_zeros(m.shape[0], 0)
    return Statistics(m, zero, None, none), Coefficients(torch.full_like(m, -1.0), None, none)


def _slope(product: Tensor, rows: Rows, bias: Tensor | None, spec: LogitSpec) -> Tensor:
    """s of the target, from hidden . W_y."""
    slope = torch.full_like(product, spec.scale)
    if spec.softcap is not None:
        own_bias = 0.0 if bias is None else bias[rows.ids[:, 0].clamp(0, bias.shape[0] - 1)].to(product.dtype)
        slope /= torch.cosh((product + own_bias) * spec.scale / spec.softcap).square()
    return slope if rows.inv_temperature is None else slope * rows.inv_temperature
