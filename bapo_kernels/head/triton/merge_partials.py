"""Fold the partial statistics of a slice's tiles into the running ones, always from the first tile to the last."""

import triton
import triton.language as tl

from bapo_kernels.head.triton.shared import at_least_floor


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
    old = tl.load(maximum + o_n, m_n, other=0.0)
    new = old
    p_max = part_max + o_n
    for _ in range(tiles):
        new = tl.maximum(new, tl.load(p_max, m_n, other=0.0))
        p_max += n
    reference = tl.where(new == float("-inf"), 0.0, new)

    shift = at_least_floor(old - reference)
    keep = tl.exp(shift)
    s = tl.load(total + o_n, m_n, other=0.0)
    if spread is not None:
        u = (tl.load(spread + o_n, m_n, other=0.0) + shift * s) * keep
    s *= keep
    p_max, p_sum = part_max + o_n, part_sum + o_n
    if spread is not None:
        p_spread = part_spread + o_n
    for _ in range(tiles):
        shift = at_least_floor(tl.load(p_max, m_n, other=0.0) - reference)
        keep = tl.exp(shift)
        b_s = tl.load(p_sum, m_n, other=0.0)
        s += b_s * keep
        p_max += n
        p_sum += n
        if spread is not None:
            u += (tl.load(p_spread, m_n, other=0.0) + shift * b_s) * keep
            p_spread += n
    tl.store(maximum + o_n, new, m_n)
    tl.store(total + o_n, s, m_n)
    if spread is not None:
        tl.store(spread + o_n, u, m_n)
