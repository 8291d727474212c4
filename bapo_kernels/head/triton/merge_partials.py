"""Merge the partial statistics of a slice's tiles into the running ones, always from the first tile to the last."""

import triton
import triton.language as tl

from bapo_kernels.head.triton.shared import merged


@triton.jit(do_not_specialize=["n", "tiles"])
def merge_partials(
    part_max,  # (tiles, n)
    part_sum,  # (tiles, n)
    part_spread,  # (tiles, n), or None
    maximum,  # (n,)
    total,  # (n,)
    spread,  # (n,), or None
    n,
    tiles,
    BN: tl.constexpr,
):
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    m_n = o_n < n
    m = tl.load(maximum + o_n, m_n, other=0.0)
    s = tl.load(total + o_n, m_n, other=0.0)
    u = s if spread is None else tl.load(spread + o_n, m_n, other=0.0)
    part = o_n.to(tl.int64)
    for _ in range(tiles):
        b_m = tl.load(part_max + part, m_n, other=0.0)
        b_s = tl.load(part_sum + part, m_n, other=0.0)
        b_u = b_s if spread is None else tl.load(part_spread + part, m_n, other=0.0)
        m, s, u = merged(m, s, u, b_m, b_s, b_u)
        part += n
    tl.store(maximum + o_n, m, m_n)
    tl.store(total + o_n, s, m_n)
    if spread is not None:
        tl.store(spread + o_n, u, m_n)
