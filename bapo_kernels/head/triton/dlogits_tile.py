"""Fused backward tile: the forward's logits again, turned into the gradient of their products."""

import triton
import triton.language as tl

from bapo_kernels.head.triton.products import products
from bapo_kernels.head.triton.shared import column_of, logit_gradient, logits, tile_of_program


@triton.jit(do_not_specialize=["n", "w", "first"])
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
    first,  # vocabulary id of column 0
    scale,  # or None
    softcap,  # or None
    stride_hn,
    stride_hd,
    stride_wv,
    stride_wd,
    stride_in,
    stride_gn,
    stride_on,
    DOT: tl.constexpr,
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

    # fmt: off
    z = products(
        hidden, weight, i_n, i_v, n, w, D, stride_hn, stride_hd, stride_wv, stride_wd, ACC, DOT, TMA, EVEN_D, BN, BV,
        BD,
    )
    # fmt: on
    b_bias = None if bias is None else tl.load(bias + tl.minimum(o_v, w - 1))[None, :]
    b_inv_t = None if inv_temperature is None else tl.load(inv_temperature + row)[:, None]
    x, t = logits(z, b_bias, b_inv_t, scale, softcap)

    row = row.to(tl.int64)
    at_target = o_v[None, :] == column_of(tl.load(ids + row * stride_in), first, w)[:, None]
    b_picked = tl.load(picked + row * stride_gn)
    # fmt: off
    g = logit_gradient(
        x, t, row, maximum, log_sum, entropy, probability, entropy_coef, at_target, b_picked, b_inv_t, scale,
        softcap,
    )
    # fmt: on
    m_out = (o_n < n)[:, None]
    if not EVEN_W:
        m_out = m_out & (o_v < w)[None, :]
    tl.store(out + row[:, None] * stride_on + o_v[None, :], g, m_out)
