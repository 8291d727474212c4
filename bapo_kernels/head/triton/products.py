"""A tile of products hidden . weight, summed in registers: what the fused kernels begin with."""

import triton
import triton.language as tl


@triton.jit
def products(
    hidden,  # (n, D), or its tensor descriptor in blocks (BN, BD)
    weight,  # (w, D), or its tensor descriptor in blocks (BV, BD)
    i_n,  # row block
    i_v,  # column block
    n,
    w,
    D,
    stride_hn,
    stride_hd,
    stride_wv,
    stride_wd,
    ACC: tl.constexpr,
    DOT: tl.constexpr,  # dtype the operands are multiplied in
    TMA: tl.constexpr,  # hidden and weight are descriptors: whole blocks are copied, 0 past the ends
    EVEN_D: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
):
    """(BN, BV). By pointers, rows and columns past the end compute their last neighbour again."""
    z = tl.zeros([BN, BV], ACC)
    if TMA:
        for d in range(0, D, BD):
            b_h = hidden.load([i_n * BN, d])
            b_w = weight.load([i_v * BV, d])
            z = tl.dot(b_h.to(DOT), b_w.to(DOT).T, z, input_precision="ieee", out_dtype=ACC)  # ieee: never tf32
    else:
        o_n = tl.minimum(i_n * BN + tl.arange(0, BN), n - 1)
        o_v = tl.minimum(i_v * BV + tl.arange(0, BV), w - 1)
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
            z = tl.dot(b_h.to(DOT), b_w.to(DOT), z, input_precision="ieee", out_dtype=ACC)
            p_h += BD * stride_hd
            p_w += BD * stride_wd
    return z
