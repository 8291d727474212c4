"""What the kernels share: the order of the tiles, a tile of products hidden . weight, and how a product becomes a logit.

Names: `i_` index of a block, `o_` offsets, `m_` masks, `p_` pointers; block sizes BN (rows), BV (columns of the vocabulary slice),
BD (steps along the hidden size), BK (recorded ids). Optional inputs are None and then compile to nothing.
"""

import triton
import triton.language as tl

FLOOR = tl.constexpr(-1e30)  # stands for -inf below an exp: exp gives exactly 0, and 0 * FLOOR is 0
GROUP = tl.constexpr(8)  # row blocks that share a block of weight in the cache before the next one is fetched


@triton.jit
def tile_of_program(n, w, BN: tl.constexpr, BV: tl.constexpr):
    """This program's row block and column block, on a 1-D grid: GROUP row blocks, the next columns, and then the next rows."""
    row_blocks = tl.cdiv(n, BN)
    in_group = GROUP * tl.cdiv(w, BV)
    first = tl.program_id(0) // in_group * GROUP
    rows = tl.minimum(row_blocks - first, GROUP)
    place = tl.program_id(0) % in_group
    return first + place % rows, place // rows


@triton.jit
def products(
    hidden,  # (n, D)
    weight,  # (w, D)
    o_n,  # (BN,) rows, inside the tensor
    o_v,  # (BV,) columns, inside the slice
    D,
    stride_hn,
    stride_hd,
    stride_wv,
    stride_wd,
    ACC: tl.constexpr,
    DOT: tl.constexpr,  # dtype the operands are multiplied in
    BD: tl.constexpr,
    EVEN_D: tl.constexpr,
):
    """hidden[o_n] . weight[o_v], summed over D in ACC: (BN, BV)."""
    o_d = tl.arange(0, BD)
    p_h = hidden + o_n.to(tl.int64)[:, None] * stride_hn + o_d[None, :] * stride_hd
    p_w = weight + o_v.to(tl.int64)[None, :] * stride_wv + o_d[:, None].to(tl.int64) * stride_wd
    z = tl.zeros([o_n.shape[0], o_v.shape[0]], ACC)
    for d in range(0, D, BD):
        if EVEN_D:
            b_h = tl.load(p_h)
            b_w = tl.load(p_w)
        else:
            m_d = o_d < D - d
            b_h = tl.load(p_h, m_d[None, :], other=0.0)
            b_w = tl.load(p_w, m_d[:, None], other=0.0)
        z = tl.dot(b_h.to(DOT), b_w.to(DOT), z, input_precision="ieee", out_dtype=ACC)  # ieee: never tf32
        p_h += BD * stride_hd
        p_w += BD * stride_wd
    return z


@triton.jit
def tanh(x):
    """Within 2 ulp in fp32: near 0 the quotient would cancel, there a polynomial takes its place."""
    t = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))
    if x.dtype == tl.float32:
        y = x * x
        series = ((1.57394409e-2 * y - 5.23025580e-2) * y + 1.33152977e-1) * y - 3.33327681e-1
        t = tl.where(tl.abs(x) < 0.55, x + x * y * series, t)
    return t


@triton.jit
def logits(z, bias, inv_temperature, scale, softcap):
    """Logits x of products z, and the tanh of the softcap (0 without one) that `slope` wants."""
    t = 0.0
    if bias is not None:
        z += bias
    if scale is not None:
        z *= scale
    if softcap is not None:
        t = tanh(z / softcap)
        z = t * softcap
    if inv_temperature is not None:
        z *= inv_temperature
    return z, t


@triton.jit
def times_slope(g, t, inv_temperature, scale, softcap):
    """g dx/dz."""
    if softcap is not None:
        g *= 1.0 - t * t
    if inv_temperature is not None:
        g *= inv_temperature
    if scale is not None:
        g *= scale
    return g


@triton.jit
def at_least_floor(x):
    """-inf to FLOOR; NaN stays."""
    return tl.maximum(x, FLOOR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def column_of(ids, first, w):
    """Columns of vocabulary ids within the slice [first, first + w), int32; -1 for ids that are outside."""
    v = ids.to(tl.int64) - first
    return tl.where((v >= 0) & (v < w), v, -1).to(tl.int32)
