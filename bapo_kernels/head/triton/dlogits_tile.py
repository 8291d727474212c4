"""Fused backward tile: the forward's logits again, turned into the gradient of their products."""

import triton
import triton.language as tl

from bapo_kernels.head.triton.shared import column_of, logit_gradient, tile_of_program
from bapo_kernels.head.triton.tile_logits import tile_logits


@triton.jit(do_not_specialize=["n", "w", "P", "first"])
def dlogits_tile(
    hidden,  # (n, D), or its tensor descriptor
    weight,  # (w, D), or its tensor descriptor
    bias,  # (w,) or None
    inv_temperature,  # (n,) or None
    ids,  # (n, P): column 0, the target
    maximum,  # (n,)
    log_sum,  # (n,)
    entropy,  # (n,) H, or None
    probability,  # (n,) coefficient of -p
    entropy_coef,  # (n,) or None
    picked,  # (n, P) coefficients of the logits at ids
    out,  # (n, w) dz
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
    stride_on,
    TMA: tl.constexpr,
    EVEN_D: tl.constexpr,
    EVEN_W: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
):
    ACC: tl.constexpr = maximum.dtype.element_ty
    i_n, i_v = tile_of_program(n, w, BN, BV)
    o_n = i_n * BN + tl.arange(0, BN)
    o_v = i_v * BV + tl.arange(0, BV)
    row = tl.minimum(o_n, n - 1)
    b_inv_t = None if inv_temperature is None else tl.load(inv_temperature + row)[:, None]
    # fmt: off
    x, t = tile_logits(
        hidden, weight, bias, b_inv_t, i_n, i_v, n, w, D, scale, softcap,
        stride_hn, stride_hd, stride_wv, stride_wd, ACC, TMA, EVEN_D, BN, BV, BD,
    )
    # fmt: on

    row = row.to(tl.int64)
    at_target = o_v[None, :] == column_of(tl.load(ids + row * P), first, w)[:, None]
    b_picked = tl.load(picked + row * P)
    # fmt: off
    g = logit_gradient(
        x, t, row, maximum, log_sum, entropy, probability, entropy_coef, at_target, b_picked, b_inv_t, scale, softcap
    )
    # fmt: on
    m_out = (o_n < n)[:, None]
    if not EVEN_W:
        m_out = m_out & (o_v < w)[None, :]
    tl.store(out + row[:, None] * stride_on + o_v[None, :], g, m_out)
