"""The rules of the token-local losses, with their coefficients written out, and the sums that the metrics want: one pass over tokens.

The definitions, with sources and readings, are the rules in losses/*.py; PyTorch's autograd makes the coefficients there. Both round
alike: arithmetic is fp32, in the order of the rule, without fusion; exp and log go through fp64 (the hardware's are off by some ulp, and
bounds are compared with them), which a kernel that waits for memory does not feel.
"""

import triton
import triton.language as tl

MAX_LOG_RATIO = tl.constexpr(20.0)
MIN_TAIL = tl.constexpr(1e-8)
TINY = tl.constexpr(1.1754943508222875e-38)  # smallest normal fp32


@triton.jit
def exp(x):
    return tl.exp(x.to(tl.float64)).to(tl.float32)


@triton.jit
def log(x):
    return tl.log(x.to(tl.float64)).to(tl.float32)


@triton.jit
def tail(logprob):
    """1 - p"""
    return (1.0 - tl.exp(logprob.to(tl.float64))).to(tl.float32)


@triton.jit
def at_least(x, low):
    return tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def at_most(x, high):
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def bounded_exp(log_ratio):
    return exp(at_most(at_least(log_ratio, -MAX_LOG_RATIO), MAX_LOG_RATIO))


@triton.jit
def number(p):
    """A parameter: a number, or a 0-d tensor, whose value only the device knows."""
    if p.dtype.is_ptr():
        value = tl.load(p)
    else:
        value = p
    return value


@triton.jit
def clipped_surrogate(a, r, fixed, low, high, dual_clip):
    """Loss, coefficient, and where stopped by the upper (or the dual clip) and the lower bound. `fixed`: the ratio has no gradient."""
    upper = (a > 0.0) & (r > high)
    lower = (a < 0.0) & (r < low)
    dual = (a < 0.0) & (r > dual_clip)
    used = tl.where(upper, high, tl.where(lower, low, tl.where(dual, dual_clip, r)))
    upper = upper | dual
    return -used * a, tl.where(upper | lower | fixed, 0.0, -r * a), upper, lower


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["p0", "p1", "p2", "p3"])
def token_losses(
    logprobs,  # (n,)
    old_logprobs,  # (n,)
    rollout_logprobs,  # (n,)
    advantages,  # (n,)
    mask,  # (n,) bool. Where False, nothing is read from the others
    p0,  # parameters of the loss
    p1,
    p2,
    p3,
    loss,  # (n,)
    coef,  # (n,) d loss / d logprob
    ratio,  # (n,)
    clipped,  # (n,) int8: +1 stopped by the upper bound, -1 by the lower
    partials,  # (9, programs) fp64, for `fold_means`
    n,
    LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    o = i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    m = tl.load(mask + o, inside, other=0) != 0
    lp = tl.load(logprobs + o, m, other=0.0)
    old = tl.load(old_logprobs + o, m, other=0.0)
    mu = tl.load(rollout_logprobs + o, m, other=0.0)
    a = tl.load(advantages + o, m, other=0.0)

    log_ratio = lp - old
    fixed = tl.abs(log_ratio) > MAX_LOG_RATIO
    r = bounded_exp(log_ratio)
    upper = tl.zeros([BLOCK], tl.int1)
    lower = tl.zeros([BLOCK], tl.int1)

    if LOSS == "clip":  # GRPO, PPO, DAPO
        term, slope, upper, lower = clipped_surrogate(a, r, fixed, p0, p1, p2)
    elif LOSS == "bapo":
        contribution = tl.load(p3)
        term, slope, upper, lower = clipped_surrogate(a, r, fixed, number(p0), number(p1), p2)
        if contribution != contribution:  # bounds that a NaN has decided
            term += contribution
            slope = tl.where(upper | lower | fixed, 0.0, contribution)
    elif LOSS == "dcpo":  # p0, p1: 4 eps
        q = at_least(exp(old), TINY)
        low = (1.0 + tl.sqrt_rn(at_least(1.0 - tl.div_rn(p0, q), 0.0))) * 0.5
        high = at_most((1.0 + tl.sqrt_rn(1.0 + tl.div_rn(p1, q))) * 0.5, p2)
        term, slope, upper, lower = clipped_surrogate(a, r, fixed, low, high, p3)
    elif LOSS == "sapo":
        tau = tl.where(a > 0.0, p0, p1)
        gate = 1.0 / (1.0 + tl.exp((-tau * (r - 1.0)).to(tl.float64)))
        term = -a * tl.div_rn(4.0, tau) * gate.to(tl.float32)
        slope = tl.where(fixed, 0.0, -a * (4.0 * (gate * (1.0 - gate))).to(tl.float32) * r)
    elif LOSS == "dro":  # p0: beta / 2
        term = tl.where((a == 0.0) & (tl.abs(lp) == float("inf")), 0.0, -a * lp)
        slope = -a
        if p0 != 0.0:
            term += p0 * (log_ratio * log_ratio)
            slope += p0 * (2.0 * log_ratio)
    else:  # -weight A logprob, with a weight that has no gradient
        if LOSS == "reinforce":
            weight = tl.full([BLOCK], 1.0, tl.float32)
        elif LOSS == "cispo":
            weight = at_most(at_least(r, p0), p1)
        elif LOSS == "topr":
            weight = tl.where(a < 0.0, at_most(at_least(bounded_exp(lp - mu), p0), p1), 1.0)
        elif LOSS == "bpo":  # p0 smoothing, p1 cap, p2 and p3 the bounds
            omega = tl.div_rn(p0 + tail(mu), p0 + tail(lp))
            upper = (a > 0.0) & (omega > p3)
            lower = (a < 0.0) & (omega < p2)
            weight = tl.where(upper | lower, 0.0, at_most(omega, p1))
        else:
            tl.static_assert(LOSS == "dppo-tv" or LOSS == "dppo-kl")  # p0, p1 the bounds, p2 cap
            p = exp(lp)
            q = exp(mu)
            if LOSS == "dppo-tv":
                divergence = tl.abs(p - q)
            else:
                tail_p = at_least(tail(lp), MIN_TAIL)
                tail_q = at_least(tail(mu), MIN_TAIL)
                divergence = tl.where(q == 0.0, 0.0, q * (mu - lp)) + tail_q * log(tl.div_rn(tail_q, tail_p))
            upper = (a > 0.0) & (p > q) & (divergence > p1)
            lower = (a < 0.0) & (p < q) & (divergence > p0)
            weight = tl.where(upper | lower, 0.0, at_most(bounded_exp(lp - mu), p2))
        slope = -weight * a
        term = tl.where((slope == 0.0) & (tl.abs(lp) == float("inf")), 0.0, slope * lp)

    tl.store(loss + o, tl.where(m, term, 0.0), inside)
    tl.store(coef + o, tl.where(m, slope, 0.0), inside)
    tl.store(ratio + o, tl.where(m, r, 0.0), inside)
    tl.store(clipped + o, upper.to(tl.int8) - lower.to(tl.int8), inside)

    # Masked tokens hold 0, and 1 as ratio.
    lp64 = lp.to(tl.float64)
    kept = tl.where(upper | lower, 0.0, a).to(tl.float64)
    bounded = at_most(at_least(log_ratio, -MAX_LOG_RATIO), MAX_LOG_RATIO)
    programs = tl.num_programs(0)
    p_out = partials + i
    tl.store(p_out, tl.sum(m.to(tl.float64)))
    tl.store(p_out + programs, tl.sum(tl.where(m, r, 0.0).to(tl.float64)))
    tl.store(p_out + 2 * programs, tl.max(tl.where(m, r, 0.0)).to(tl.float64))
    tl.store(p_out + 3 * programs, tl.sum(tl.exp(bounded.to(tl.float64)) - 1.0 - bounded.to(tl.float64)))
    tl.store(p_out + 4 * programs, tl.sum(lower.to(tl.float64)))
    tl.store(p_out + 5 * programs, tl.sum(upper.to(tl.float64)))
    tl.store(p_out + 6 * programs, tl.sum(lp64))
    tl.store(p_out + 7 * programs, tl.sum(kept))
    tl.store(p_out + 8 * programs, tl.sum(lp64 * kept))


@triton.jit
def total(partials, programs, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    s = tl.zeros([BLOCK], tl.float64)
    for start in range(0, programs, BLOCK):
        s += tl.load(partials + start + o, start + o < programs, other=0.0)
    return tl.sum(s)


@triton.jit(do_not_specialize=["programs"])
def fold_means(
    partials,  # (9, programs) fp64, of `token_losses`
    means,  # (7,) fp32, in the order of `launch.MEANS`; 0 over no tokens
    programs,
    BLOCK: tl.constexpr,
):
    count = total(partials, programs, BLOCK)
    n = tl.maximum(count, 1.0)
    ratio = total(partials + programs, programs, BLOCK) / n
    o = tl.arange(0, BLOCK)
    highest = tl.zeros([BLOCK], tl.float64)
    for start in range(0, programs, BLOCK):
        highest = tl.maximum(highest, tl.load(partials + 2 * programs + start + o, start + o < programs, other=0.0))
    ratio_max = tl.where(ratio == ratio, tl.max(highest), ratio)  # a maximum may lose a NaN, a sum does not
    logprob = total(partials + 6 * programs, programs, BLOCK) / n
    kept = total(partials + 7 * programs, programs, BLOCK) / n
    covariance = total(partials + 8 * programs, programs, BLOCK) / n - logprob * kept
    covariance += 0.0 * (logprob + kept)  # there is none to an infinite mean

    tl.store(means, ratio.to(tl.float32))
    tl.store(means + 1, ratio_max.to(tl.float32))
    tl.store(means + 2, (total(partials + 3 * programs, programs, BLOCK) / n).to(tl.float32))
    tl.store(means + 3, (total(partials + 4 * programs, programs, BLOCK) / n).to(tl.float32))
    tl.store(means + 4, (total(partials + 5 * programs, programs, BLOCK) / n).to(tl.float32))
    tl.store(means + 5, covariance.to(tl.float32))
    tl.store(means + 6, count.to(tl.float32))
