"""What the kernels share: the order of the tiles, how a product becomes a logit, its statistics, and its gradient.

Names: `i_` index of a block, `o_` offsets, `m_` masks, `p_` pointers, `b_` blocks; block sizes BN (rows), BV (columns of the vocabulary
slice), BD (steps along the hidden size), BK (recorded ids). Optional inputs are None and then compile to nothing.
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
    """Logits x of products z, and the tanh of the softcap (0 without one) that `times_slope` wants."""
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
def statistics(x):
    """Of the logits x (rows, columns) of each row: m = max, -inf where every x is; sum exp(x - m); sum exp(x - m) (x - m)."""
    x = at_least_floor(x)
    m = tl.max(x, 1)
    some = m > FLOOR  # otherwise any finite reference gives exp(FLOOR) = 0
    x -= tl.where(some, m, 0.0)[:, None]
    e = tl.exp(x)
    return tl.where(some, m, float("-inf")), tl.sum(e, 1), tl.sum(e * x, 1)


@triton.jit
def merged(m, s, u, b_m, b_s, b_u):
    """Statistics of two parts of a row, as one."""
    new = tl.maximum(m, b_m)
    reference = tl.where(new == float("-inf"), 0.0, new)
    shift = at_least_floor(m - reference)
    b_shift = at_least_floor(b_m - reference)
    keep = tl.exp(shift)
    b_keep = tl.exp(b_shift)
    return new, s * keep + b_s * b_keep, (u + shift * s) * keep + (b_u + b_shift * b_s) * b_keep


@triton.jit
def logit_gradient(
    x,  # logits (rows, columns)
    t,  # tanh of the softcap
    row,  # numbers of the rows
    maximum,
    log_sum,
    entropy,  # or None
    probability,
    entropy_coef,  # or None
    at_target,  # where the picked coefficient is added, or None
    picked,
    inv_temperature,  # (rows, 1) or None
    scale,
    softcap,
):
    """Gradient of the products: (picked at the target - p (probability + entropy_coef (log p + H))) dx/dz. Both parts of the target's
    column have the same slope: where the policy is sure, they cancel to a small rest."""
    log_p = (x - tl.load(maximum + row)[:, None]) - tl.load(log_sum + row)[:, None]
    g = -tl.exp(log_p)
    a = tl.load(probability + row)
    if entropy_coef is None:
        g *= a[:, None]
    else:
        b = tl.load(entropy_coef + row)
        a += b * tl.load(entropy + row)
        g *= a[:, None] + b[:, None] * at_least_floor(log_p)
    if at_target is not None:
        g = tl.where(at_target, g + picked[:, None], g)
    return times_slope(g, t, inv_temperature, scale, softcap)


@triton.jit
def at_least_floor(x):
    """-inf to FLOOR; NaN stays."""
    return tl.maximum(x, FLOOR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def column_of(ids, first, w):
    """Columns of vocabulary ids within the slice [first, first + w), int32; -1 for ids that are outside."""
    v = ids.to(tl.int64) - first
    return tl.where((v >= 0) & (v < w), v, -1).to(tl.int32)
