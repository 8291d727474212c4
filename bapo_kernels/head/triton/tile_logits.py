"""A tile of logits from hidden states and weight, summed in registers: what the fused kernels begin with."""

import triton
import triton.language as tl

from bapo_kernels import launching
from bapo_kernels.head.triton.shared import logits

INTERPRETED = tl.constexpr(launching.INTERPRETED)


@triton.jit
def tile_logits(
    hidden,  # (n, D), or its tensor descriptor in blocks (BN, BD)
    weight,  # (w, D), or its tensor descriptor in blocks (BV, BD)
    bias,  # (w,) or None
    inv_temperature,  # (BN, 1) or None
    i_n,  # row block
    i_v,  # column block
    n,
    w,
    D,
    scale,  # or None
    softcap,  # or None
    stride_hn,
    stride_hd,
    stride_wv,
    stride_wd,
    ACC: tl.constexpr,
    TMA: tl.constexpr,  # hidden and weight are descriptors: whole blocks are copied, 0 past the ends
    EVEN_D: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
):
    """(BN, BV), and the tanh of the softcap. By pointers, rows and columns past the end compute their last neighbour again."""
    o_v = tl.minimum(i_v * BV + tl.arange(0, BV), w - 1)
    z = tl.zeros([BN, BV], ACC)
    if TMA:
        for d in range(0, D, BD):
            b_h = hidden.load([i_n * BN, d])
            b_w = weight.load([i_v * BV, d]).T
            z = dot(b_h, b_w, z)
    else:
        o_n = tl.minimum(i_n * BN + tl.arange(0, BN), n - 1)
        o_d = tl.arange(0, BD)
        p_h = hidden + o_n.to(tl.int64)[:, None] * stride_hn + o_d[None, :] * stride_hd
        p_w = weight + o_v.to(tl.int64)[None, :] * stride_wv + o_d[:, None].to(tl.int64) * stride_wd
        for d in range(0, D, BD):
            if EVEN_D:
                b_h = tl.load(p_h)
                b_w = tl.load(p_w)
            else:
                m_d = o_d < D - d
                b_h = tl.load(p_h, m_d[None, :], other=0.0)
                b_w = tl.load(p_w, m_d[:, None], other=0.0)
            z = dot(b_h, b_w, z)
            p_h += BD * stride_hd
            p_w += BD * stride_wd
    b_bias = None if bias is None else tl.load(bias + o_v)[None, :]
    return logits(z, b_bias, inv_temperature, scale, softcap)


@triton.jit
def dot(a, b, z):
    if INTERPRETED:  # where bf16 would be multiplied by its bit patterns, as if they were numbers
        a = a.to(z.dtype)
        b = b.to(z.dtype)
    return tl.dot(a, b, z, input_precision="ieee", out_dtype=z.dtype)  # ieee: never tf32
