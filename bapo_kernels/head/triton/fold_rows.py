"""Forward epilogue of a tile of products that a vendor GEMM wrote: its logits, folded into the running statistics of each row."""

import triton
import triton.language as tl

from bapo_kernels.head.triton.shared import FLOOR, column_of, logits, merged, statistics


@triton.jit(do_not_specialize=["n", "P", "first"])  # a w that 16 divides is known to keep loads of 16 bytes whole
def fold_rows(
    z,  # (n, w) products; left as they are
    bias,  # (w,) or None
    inv_temperature,  # (n,) or None
    ids,  # (n, P)
    maximum,  # (n,) of the logits so far
    total,  # (n,) sum exp(x - m)
    spread,  # (n,) sum exp(x - m) (x - m), or None
    picked,  # (n, P) x at ids; written where the id is in the slice
    n,
    w,
    P,
    first,  # vocabulary id of column 0
    scale,  # or None
    softcap,  # or None
    stride_zn,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BP: tl.constexpr,  # ids at a time
):
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    m_n = o_n < n
    row = tl.minimum(o_n, n - 1).to(tl.int64)
    p_z = z + row[:, None] * stride_zn
    b_inv_t = None if inv_temperature is None else tl.load(inv_temperature + row)[:, None]

    m = tl.load(maximum + row)
    s = tl.load(total + row)
    u = s if spread is None else tl.load(spread + row)
    for v in range(0, w, BV):
        o_v = v + tl.arange(0, BV)
        m_v = (o_v < w)[None, :]
        b_bias = None if bias is None else tl.load(bias + o_v[None, :], m_v)
        x, _ = logits(tl.load(p_z + o_v[None, :], m_v), b_bias, b_inv_t, scale, softcap)
        b_m, b_s, b_u = statistics(tl.where(m_v, x, FLOOR))
        m, s, u = merged(m, s, u, b_m, b_s, b_u)
    tl.store(maximum + row, m, m_n)
    tl.store(total + row, s, m_n)
    if spread is not None:
        tl.store(spread + row, u, m_n)

    for p in range(0, P, BP):
        o_p = p + tl.arange(0, BP)
        inside = m_n[:, None] & (o_p < P)[None, :]
        b_ids = tl.load(ids + row[:, None] * P + o_p[None, :], inside, other=-1)
        column = column_of(b_ids, first, w)
        here = column >= 0
        b_bias = None if bias is None else tl.load(bias + column, here, other=0.0)
        x, _ = logits(tl.load(p_z + column, here, other=0.0), b_bias, b_inv_t, scale, softcap)
        tl.store(picked + row[:, None] * P + o_p[None, :], x, here)
