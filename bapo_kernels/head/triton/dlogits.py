"""Backward tile: the forward's logits again, turned into the gradient of their products.

With x the logit and dx/dz its slope: dz = (picked at the target - p (probability + entropy_coef (log p + H))) dx/dz. Both parts of the
target's column have the same slope: where the policy is sure, they cancel to a small rest."""

import triton
import triton.language as tl

from bapo_kernels.head.triton.tile import at_least_floor, column_of, logits, products, tile_of_program, times_slope


@triton.jit(do_not_specialize=["n", "w", "first"])
def dlogits_tile(
    hidden,  # (n, D)
    weight,  # (w, D)
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
    EVEN_D: tl.constexpr,
    EVEN_W: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
):
    ACC: tl.constexpr = out.dtype.element_ty
    i_n, i_v = tile_of_program(n, w, BN, BV)
    o_n = i_n * BN + tl.arange(0, BN)
    o_v = i_v * BV + tl.arange(0, BV)
    row = tl.minimum(o_n, n - 1)  # rows and columns past the end compute their last neighbour again
    column = tl.minimum(o_v, w - 1)

    z = products(hidden, weight, row, column, D, stride_hn, stride_hd, stride_wv, stride_wd, ACC, DOT, BD, EVEN_D)
    b_bias = None if bias is None else tl.load(bias + column)[None, :]
    b_inv_t = None if inv_temperature is None else tl.load(inv_temperature + row)[:, None]
    x, t = logits(z, b_bias, b_inv_t, scale, softcap)

    log_p = (x - tl.load(maximum + row)[:, None]) - tl.load(log_sum + row)[:, None]
    g = -tl.exp(log_p)
    a = tl.load(probability + row)
    if entropy_coef is None:
        g *= a[:, None]
    else:
        b = tl.load(entropy_coef + row)
        a += b * tl.load(entropy + row)
        g *= a[:, None] + b[:, None] * at_least_floor(log_p)
    row = row.to(tl.int64)
    target = column_of(tl.load(ids + row * stride_in), first, w)
    at_target = o_v[None, :] == target[:, None]
    g = tl.where(at_target, g + tl.load(picked + row * stride_gn)[:, None], g)
    g = times_slope(g, t, b_inv_t, scale, softcap)
    m_out = (o_n < n)[:, None]
    if not EVEN_W:
        m_out = m_out & (o_v < w)[None, :]
    tl.store(out + row[:, None] * stride_on + o_v[None, :], g, m_out)
