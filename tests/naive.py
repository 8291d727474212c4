"""The policy losses in plain Python numbers, one token at a time: what `policy_loss` is compared with."""

import math
from dataclasses import dataclass, field


@dataclass
class Expected:
    loss: float = 0.0
    grad: list[float] = field(default_factory=list)  # d loss / d logprobs
    grad_entropy: list[float] = field(default_factory=list)
    token_loss: list[float] = field(default_factory=list)
    coef: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)
    clipped: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


def clip_token(ratio, advantage, low, high, dual_clip, clamped):
    """Loss, coefficient and flag of one token of the clipped surrogate."""
    slope = 0.0 if clamped else -ratio * advantage
    if advantage > 0 and ratio > high:
        return -high * advantage, 0.0, 1
    if advantage < 0 and ratio < low:
        return -low * advantage, 0.0, -1
    if dual_clip is not None and advantage < 0 and ratio > dual_clip:
        return -dual_clip * advantage, 0.0, 1
    return -ratio * advantage, slope, 0


def kl_token(estimator, x):
    """Value and derivative with respect to the log-prob, x = ref - logprob."""
    c = min(max(x, -20.0), 20.0)
    slope3 = (1 - math.exp(c)) if c == x else 1.0
    return {
        "k1": (-x, 1.0),
        "k2": (x * x / 2, -x),
        "k3": (math.exp(c) - x - 1, slope3),
        "k3+": (math.exp(c) - x - 1, -x),
    }[estimator]


def token_weights(aggregation, lengths, normalizer, max_length):
    """Weight of an active token of each sequence, from the numbers of active tokens of the sequences."""
    tokens, sequences = sum(lengths), sum(n > 0 for n in lengths)
    if tokens == 0:
        return [0.0] * len(lengths)
    count = normalizer if normalizer is not None else tokens if aggregation == "token-mean" else sequences
    return [
        {
            "token-mean": lambda n: 1 / count,
            "seq-mean-token-mean": lambda n: 1 / count / max(n, 1),
            "seq-mean-token-sum": lambda n: 1 / count,
            "seq-mean-token-sum-norm": lambda n: 1 / count / max_length,
            "token-sum": lambda n: 1.0,
        }[aggregation](n)
        for n in lengths
    ]


def policy_loss(
    logprobs,
    old,
    advantages,
    active,
    sequence,  # of each token
    sequences,
    *,
    low,
    high,
    dual_clip=None,
    aggregation="token-mean",
    normalizer=None,
    max_length=None,
    ref=None,
    kl_coef=0.0,
    kl_estimator="k3",
    entropy=None,
    entropy_coef=0.0,
    top_entropy=None,
) -> Expected:
    """All inputs flat lists; what inactive tokens hold is not looked at."""
    out, n = Expected(), sum(active)
    lengths = [sum(1 for s, a in zip(sequence, active, strict=True) if a and s == i) for i in range(sequences)]
    weights = token_weights(aggregation, lengths, normalizer, max_length)
    threshold = -math.inf
    if top_entropy is not None and n:
        ranked = sorted((h for h, a in zip(entropy, active, strict=True) if a), reverse=True)
        threshold = ranked[math.ceil(top_entropy * n - 1e-9) - 1]
    policy_total, kls, kept_advantage, log_ratios = 0.0, [], [], []
    for i, is_active in enumerate(active):
        if not is_active:
            for values in (out.grad, out.grad_entropy, out.token_loss, out.coef, out.ratio):
                values.append(0.0)
            out.clipped.append(0)
            continue
        weight, advantage, log_ratio = weights[sequence[i]], advantages[i], logprobs[i] - old[i]
        bounded = min(max(log_ratio, -20.0), 20.0)
        ratio = math.exp(bounded)
        loss, coef, flag = clip_token(ratio, advantage, low, high, dual_clip, bounded != log_ratio)
        if entropy is not None and top_entropy is not None and entropy[i] < threshold:
            loss, coef = 0.0, 0.0
        total, grad = loss, coef
        if kl_coef:
            value, slope = kl_token(kl_estimator, ref[i] - logprobs[i])
            kls.append(value)
            total, grad = total + kl_coef * value, grad + kl_coef * slope
        if entropy_coef:
            total -= entropy_coef * entropy[i]
        out.loss += weight * total
        policy_total += weight * loss
        out.grad.append(weight * grad)
        out.grad_entropy.append(-weight * entropy_coef)
        out.token_loss.append(loss)
        out.coef.append(coef)
        out.ratio.append(ratio)
        out.clipped.append(flag)
        kept_advantage.append(advantage if flag == 0 else 0.0)
        log_ratios.append(log_ratio)

    def mean(values):
        values = list(values)
        return sum(values) / n if n else 0.0

    ratios = [r for r, a in zip(out.ratio, active, strict=True) if a]
    flags = [c for c, a in zip(out.clipped, active, strict=True) if a]
    own = [lp for lp, a in zip(logprobs, active, strict=True) if a]
    mean_lp, mean_kept = mean(own), mean(kept_advantage)
    out.metrics = {
        "policy_loss": policy_total,
        "kl": mean(kls) if kl_coef else math.nan,
        "entropy": math.nan if entropy is None else mean(h for h, a in zip(entropy, active, strict=True) if a),
        "ratio_mean": mean(ratios),
        "ratio_max": max(ratios, default=0.0),
        "approx_kl": mean(r - 1 - x for r, x in zip(ratios, log_ratios, strict=True)),
        "clip_frac_low": mean(f < 0 for f in flags),
        "clip_frac_high": mean(f > 0 for f in flags),
        "entropy_clip_cov": mean((lp - mean_lp) * (k - mean_kept) for lp, k in zip(own, kept_advantage, strict=True)),
        "num_tokens": n,
    }
    return out


def bapo_bounds(
    ratios,
    advantages,
    weights,
    *,
    target=0.4,
    c_low=(0.6, 0.9),
    c_high=(1.2, 3.0),
    step_low=0.02,
    step_high=0.05,
    contribution="share",
    measure="surrogate",
    order="high-first",
):
    """The paper's while loop, with integer step counters. `weights` are the rollout probabilities, or 1. Active tokens only."""

    def sums(low, high):
        plus = minus = 0.0
        for r, a, w in zip(ratios, advantages, weights, strict=True):
            if a > 0:
                used = min(r, high) if measure == "surrogate" else (r if r <= high else 0.0)
                plus += w * a * used
            elif a < 0:
                used = max(r, low) if measure == "surrogate" else (r if r >= low else 0.0)
                minus += w * -a * used
        return plus, minus

    def value(plus, minus):
        if plus == minus == 0:
            return 0.0
        bottom = {"share": plus + minus, "signed": abs(plus - minus), "ratio": minus}[contribution]
        return plus / bottom if bottom else math.inf

    steps_high = round((c_high[1] - c_high[0]) / step_high)
    steps_low = round((c_low[1] - c_low[0]) / step_low)
    i_low = i_high = 0
    low, high = c_low[0], c_high[0]
    plus, minus = sums(low, high)
    if plus == 0 or minus == 0:
        return low, high, value(plus, minus), plus, minus
    while value(plus, minus) < target:
        can_high, can_low = i_high < steps_high, i_low < steps_low
        if can_high and (order == "high-first" or not can_low):
            i_high += 1
        elif can_low:
            i_low += 1
        else:
            break
        low, high = c_low[0] + i_low * step_low, c_high[0] + i_high * step_high
        plus, minus = sums(low, high)
    return low, high, value(plus, minus), plus, minus
