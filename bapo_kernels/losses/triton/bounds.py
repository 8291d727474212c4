"""BAPO's bounds in two kernels: the sums S+ and S- on both grids in one pass over the tokens, then the search on them.

What is searched, and why two rows of sums are enough, is in controller.py. Everything is fp64; fp64 numbers come as their bits, since a
Python float reaches a kernel as fp32.
"""

import triton
import triton.language as tl

from bapo_kernels.losses.triton.rules import bounded_exp


@triton.jit
def number64(p):
    """The bits of an fp64 number, or a 0-d tensor of any dtype."""
    if p.dtype.is_ptr():
        value = tl.load(p).to(tl.float64)
    else:
        value = p.to(tl.int64).to(tl.float64, bitcast=True)
    return value


@triton.jit
def point(i, start, end, step):
    """Grid point i: start + i step, the last one exactly `end`."""
    c = start + step * i.to(tl.float64)
    return tl.where(c > end - 1e-9, end, c)


@triton.jit(
    do_not_specialize=["n", "steps", "high_start", "high_end", "high_step", "low_start", "low_end", "low_step"],
    do_not_specialize_on_alignment=["high_start", "high_end", "low_start", "low_end"],
)
def bapo_sums(
    logprobs,  # (n,)
    old_logprobs,  # (n,)
    rollout_logprobs,  # (n,)
    advantages,  # (n,)
    mask,  # (n,) bool
    high_start,  # of the grid of c_high, as in `number64`
    high_end,
    high_step,
    low_start,
    low_end,
    low_step,
    partials,  # (HIGH + LOW, programs): S+ at each c_high, S- at each c_low. Past the end of a grid, what is there is not used
    n,
    steps,  # blocks of a program
    GRADIENT: tl.constexpr,  # measure
    WEIGHTED: tl.constexpr,  # by the sampler's probability
    HIGH: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    o_high = tl.arange(0, HIGH)
    o_low = tl.arange(0, LOW)
    high = point(o_high, number64(high_start), number64(high_end), number64(high_step))[None, :]
    low = point(o_low, number64(low_start), number64(low_end), number64(low_step))[None, :]
    s_plus = tl.zeros([HIGH], tl.float64)
    s_minus = tl.zeros([LOW], tl.float64)
    o = i.to(tl.int64) * steps * BLOCK + tl.arange(0, BLOCK)
    for _ in range(steps):
        m = tl.load(mask + o, o < n, other=0) != 0
        lp = tl.load(logprobs + o, m, other=0.0)
        r = bounded_exp(lp - tl.load(old_logprobs + o, m, other=0.0)).to(tl.float64)[:, None]
        a = tl.load(advantages + o, m, other=0.0).to(tl.float64)
        weight = tl.abs(a)
        if WEIGHTED:
            weight *= tl.exp(tl.load(rollout_logprobs + o, m, other=0.0).to(tl.float64))
        # Not <= 0, rather than > 0: an advantage of NaN is in both sums, and shows.
        w_plus = tl.where((a <= 0.0) | ~m, 0.0, weight)[:, None]
        w_minus = tl.where((a >= 0.0) | ~m, 0.0, weight)[:, None]
        if GRADIENT:
            s_plus += tl.sum(w_plus * tl.where(r <= high, r, 0.0), 0)
            s_minus += tl.sum(w_minus * tl.where(r >= low, r, 0.0), 0)
        else:  # minimum and maximum that keep NaN
            s_plus += tl.sum(w_plus * tl.where(r > high, high, r), 0)
            s_minus += tl.sum(w_minus * tl.where(r < low, low, r), 0)
        o += BLOCK
    programs = tl.num_programs(0)
    tl.store(partials + o_high * programs + i, s_plus)
    tl.store(partials + (HIGH + o_low) * programs + i, s_minus)


@triton.jit
def sums_of(partials, programs, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.arange(0, ROWS)[:, None]
    o = tl.arange(0, BLOCK)[None, :]
    s = tl.zeros([ROWS, BLOCK], tl.float64)
    for start in range(0, programs, BLOCK):
        s += tl.load(partials + rows * programs + start + o, start + o < programs, other=0.0)
    return tl.sum(s, 1)


@triton.jit
def at(values, o, i):
    return tl.sum(tl.where(o == i, values, 0.0))


@triton.jit
def contribution(positive, negative, KIND: tl.constexpr):
    if KIND == "share":
        whole = positive + negative
    elif KIND == "signed":
        whole = tl.abs(positive - negative)
    else:
        tl.static_assert(KIND == "ratio")
        whole = negative
    return tl.where(positive + negative == 0.0, 0.0, positive / whole)  # neither is negative


@triton.jit
def first_that_reaches(value, target, o, count):
    """Position of the first value that is not below the target; `count` or more if none of the first `count` is."""
    return tl.min(tl.where(value < target, count, o))


@triton.jit(
    do_not_specialize=[
        *("programs", "target", "n_high", "n_low"),
        *("high_start", "high_end", "high_step", "low_start", "low_end", "low_step"),
    ],
    do_not_specialize_on_alignment=["high_start", "high_end", "low_start", "low_end"],
)
def bapo_pick(
    partials,  # (HIGH + LOW, programs)
    programs,
    high_start,  # as in `bapo_sums`
    high_end,
    high_step,
    low_start,
    low_end,
    low_step,
    n_high,  # points of the grids
    n_low,
    target,  # as in `number64`
    bounds,  # (5,) fp64: c_low, c_high, contribution, S+, S-
    KIND: tl.constexpr,  # of contribution
    HIGH_FIRST: tl.constexpr,
    HIGH: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    o_high = tl.arange(0, HIGH)
    o_low = tl.arange(0, LOW)
    s_plus = sums_of(partials, programs, HIGH, BLOCK)
    s_minus = sums_of(partials + HIGH * programs, programs, LOW, BLOCK)
    goal = number64(target)
    # The second bound to move does so with the first at its end.
    other_plus = at(s_plus, o_high, n_high - 1 if HIGH_FIRST else 0)
    other_minus = at(s_minus, o_low, 0 if HIGH_FIRST else n_low - 1)
    i_high = first_that_reaches(contribution(s_plus, other_minus, KIND), goal, o_high, n_high)
    i_low = first_that_reaches(contribution(other_plus, s_minus, KIND), goal, o_low, n_low)
    if HIGH_FIRST:
        i_low = tl.where(i_high < n_high, 0, i_low)
    else:
        i_high = tl.where(i_low < n_low, 0, i_high)
    stays = tl.minimum(at(s_plus, o_high, 0), at(s_minus, o_low, 0)) == 0.0
    i_high = tl.where(stays, 0, tl.minimum(i_high, n_high - 1))
    i_low = tl.where(stays, 0, tl.minimum(i_low, n_low - 1))

    positive = at(s_plus, o_high, i_high)
    negative = at(s_minus, o_low, i_low)
    tl.store(bounds, point(i_low, number64(low_start), number64(low_end), number64(low_step)))
    tl.store(bounds + 1, point(i_high, number64(high_start), number64(high_end), number64(high_step)))
    tl.store(bounds + 2, contribution(positive, negative, KIND))
    tl.store(bounds + 3, positive)
    tl.store(bounds + 4, negative)
