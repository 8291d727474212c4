"""Fused forward tile: logits of BN rows x BV columns, reduced to partial statistics of each row. The logits are never written."""

import triton
import triton.language as tl

from bapo_kernels.head.triton.shared import FLOOR, column_of, statistics, tile_of_program
from bapo_kernels.head.triton.tile_logits import tile_logits


@triton.jit(do_not_specialize=["n", "w", "P", "first"])
def fold_tile(
    hidden,  # (n, D), or its tensor descriptor
    weight,  # (w, D), or its tensor descriptor
    bias,  # (w,) or None
    inv_temperature,  # (n,) or None
    ids,  # (n, P): column 0, the target, is what is picked here
    picked,  # (n, P) x at ids; written where the id is in the slice
    part_max,  # (tiles, n) m = max x, -inf where every x is
    part_sum,  # (tiles, n) sum exp(x - m)
    part_spread,  # (tiles, n) sum exp(x - m) (x - m), or None
    n,
    w,
    D,
    P,
    first,  # vocabulary id of column 0
    scale,  # or None
    softcap,  # or None
    stride_hn,
    stride_hd,
    stride_wv,
    stride_wd,
    TMA: tl.constexpr,
    EVEN_D: tl.constexpr,
    EVEN_W: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
):
    ACC: tl.constexpr = part_max.dtype.element_ty
    i_n, i_v = tile_of_program(n, w, BN, BV)
    o_n = i_n * BN + tl.arange(0, BN)
    o_v = i_v * BV + tl.arange(0, BV)
    m_n = o_n < n
    row = tl.minimum(o_n, n - 1)
    b_inv_t = None if inv_temperature is None else tl.load(inv_temperature + row)[:, None]
    # fmt: off
    x, _ = tile_logits(
        hidden, weight, bias, b_inv_t, i_n, i_v, n, w, D, scale, softcap,
        stride_hn, stride_hd, stride_wv, stride_wd, ACC, TMA, EVEN_D, BN, BV, BD,
    )
    # fmt: on

    row = row.to(tl.int64)
    target = column_of(tl.load(ids + row * P), first, w)
    here = m_n & (target >= i_v * BV) & (target < i_v * BV + BV)
    x_target = tl.sum(tl.where(o_v[None, :] == target[:, None], x, 0.0), 1)
    tl.store(picked + row * P, x_target, here)

    if not EVEN_W:
        x = tl.where(o_v[None, :] < w, x, FLOOR)
    m, s, u = statistics(x)
    part = i_v.to(tl.int64) * n + o_n
    tl.store(part_max + part, m, m_n)
    tl.store(part_sum + part, s, m_n)
    if part_spread is not None:
        tl.store(part_spread + part, u, m_n)
