"""Every policy loss in plain Python numbers, one token at a time, from the published formulas: value, coefficient and clip flag."""

import math
from dataclasses import dataclass, field

import naive

# Published defaults, as the documentation promises them.
BOUNDS = {"target": 0.4, "c_low": (0.6, 0.9), "c_high": (1.2, 3.0), "step_low": 0.02, "step_high": 0.05}
DEFAULTS = {
    "bapo": {
        **BOUNDS,
        "contribution": "share",
        "measure": "surrogate",
        "weighting": "rollout",
        "order": "high-first",
        "dual_clip": None,
    },
    "bpo": {"smoothing": 0.1, "cap": 3.0, "clip_low": 0.2, "clip_high": 0.2},
    "score-centering": {"weight": "none", "tis_cap": 2.0, "mis_low": 0.5, "mis_high": 5.0, "tail_floor": 1e-6},
    "grpo": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    "ppo": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "luspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"ratio_low": None, "ratio_high": 5.0},
    "dppo-tv": {"divergence": "tv", "delta_low": 0.15, "delta_high": 0.15, "ratio_cap": 20.0},
    "dppo-kl": {"divergence": "kl", "delta_low": 0.05, "delta_high": 0.05, "ratio_cap": 20.0},
    "topr": {"ratio": "sequence", "floor": 0.0, "cap": 1.0},
    "dcpo": {"eps_low": 0.16, "eps_high": 0.2, "ratio_cap": 10.0, "dual_clip": None},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
    "vespo": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
    "reinforce": {},
    "dro": {"beta": 0.1},
    "clip-cov": {"fraction": 2e-4, "cov_low": 1.0, "cov_high": 5.0, "clip_low": 0.2, "clip_high": 0.2, "seed": 0},
    "kl-cov": {"fraction": 2e-4, "beta": 1.0},
}
OWN_AGGREGATION = {
    **dict.fromkeys(DEFAULTS, "token-mean"),
    **dict.fromkeys(("bpo", "grpo", "gspo", "topr", "sapo", "gmpo"), "seq-mean-token-mean"),
    "luspo": "seq-mean-token-sum",
}


@dataclass
class Batch:
    """Flat lists; `head` holds, for each token, the (p, q) pairs of its recorded ids, or None for padding."""

    logprobs: list[float]
    old: list[float]
    rollout: list[float]
    advantages: list[float]
    active: list[bool]
    sequence: list[int]
    head: list[list] = field(default_factory=list)

    def tokens(self) -> list[int]:
        return [i for i, a in enumerate(self.active) if a]

    def peers(self, i: int) -> list[int]:
        return [j for j in self.tokens() if self.sequence[j] == self.sequence[i]]

    def covariance(self) -> dict[int, float]:
        tokens = self.tokens()
        mean_a = sum(self.advantages[i] for i in tokens) / max(len(tokens), 1)
        mean_lp = sum(self.logprobs[i] for i in tokens) / max(len(tokens), 1)
        return {i: (self.advantages[i] - mean_a) * (self.logprobs[i] - mean_lp) for i in tokens}


@dataclass
class Result:
    loss: list[float]
    coef: list[float]
    clipped: list[int]
    head_coef: list[list[float]] = field(default_factory=list)
    candidates: set = field(default_factory=set)  # of Clip-Cov's lottery


def exp20(x: float) -> tuple[float, bool]:
    """exp of the clamped exponent, and whether it was clamped."""
    return math.exp(min(max(x, -20.0), 20.0)), abs(x) > 20.0


def share(fraction: float, n: int) -> int:
    return max(int(fraction * n + 1e-9), 1)


def binary_kl(a: float, b: float) -> float:
    """KL(Bernoulli(a) || Bernoulli(b))."""
    return sum(x * (math.log(x / y) if y else math.inf) for x, y in ((a, b), (1 - a, 1 - b)) if x)


def clip(i, x, low, high, dual_clip=None, log_ratio=None):
    ratio, clamped = exp20(x.logprobs[i] - x.old[i] if log_ratio is None else log_ratio)
    return naive.clip_token(ratio, x.advantages[i], low, high, dual_clip, clamped)


def ppo(i, x, p, state):
    return clip(i, x, 1 - p["clip_low"], 1 + p["clip_high"], p["dual_clip"])


def bapo(i, x, p, state):
    if "bounds" not in state:
        tokens = x.tokens()
        state["bounds"] = naive.bapo_bounds(
            [exp20(x.logprobs[j] - x.old[j])[0] for j in tokens],
            [x.advantages[j] for j in tokens],
            [math.exp(x.rollout[j]) if p["weighting"] == "rollout" else 1.0 for j in tokens],
            **{k: v for k, v in p.items() if k not in ("weighting", "dual_clip")},
        )[:2]
    return clip(i, x, *state["bounds"], p["dual_clip"])


def gspo(i, x, p, state):
    peers = x.peers(i)
    mean = sum(x.logprobs[j] - x.old[j] for j in peers) / len(peers)
    return clip(i, x, 1 - p["clip_low"], 1 + p["clip_high"], log_ratio=mean)


def gmpo(i, x, p, state):
    def stopped(j):
        log_ratio, a = x.logprobs[j] - x.old[j], x.advantages[j]
        return (1 if a > 0 and log_ratio > p["clip_high"] else 0) - (1 if a < 0 and log_ratio < -p["clip_low"] else 0)

    peers = x.peers(i)
    used = {1: p["clip_high"], -1: -p["clip_low"]}
    s, clamped = exp20(sum(used.get(stopped(j), x.logprobs[j] - x.old[j]) for j in peers) / len(peers))
    loss = -x.advantages[i] * s
    return loss, 0.0 if stopped(i) or clamped else loss, stopped(i)


def weighted(weight, i, x, flag=0):
    coef = -weight * x.advantages[i]
    return coef * x.logprobs[i], coef, flag


def cispo(i, x, p, state):
    ratio = min(exp20(x.logprobs[i] - x.old[i])[0], p["ratio_high"])
    return weighted(ratio if p["ratio_low"] is None else max(ratio, p["ratio_low"]), i, x)


def dppo(i, x, p, state):
    mine, q, a = math.exp(x.logprobs[i]), math.exp(x.rollout[i]), x.advantages[i]
    moved = abs(mine - q) if p["divergence"] == "tv" else binary_kl(q, mine)
    if a > 0 and mine > q and moved > p["delta_high"]:
        return 0.0, 0.0, 1
    if a < 0 and mine < q and moved > p["delta_low"]:
        return 0.0, 0.0, -1
    return weighted(min(exp20(x.logprobs[i] - x.rollout[i])[0], p["ratio_cap"]), i, x)


def bpo(i, x, p, state):
    a = x.advantages[i]
    omega = (1 + p["smoothing"] - math.exp(x.rollout[i])) / (1 + p["smoothing"] - math.exp(x.logprobs[i]))
    if a > 0 and omega > 1 + p["clip_high"]:
        return 0.0, 0.0, 1
    if a < 0 and omega < 1 - p["clip_low"]:
        return 0.0, 0.0, -1
    return weighted(min(omega, p["cap"]), i, x)


def topr(i, x, p, state):
    if x.advantages[i] >= 0:
        return weighted(1.0, i, x)
    over = x.peers(i) if p["ratio"] == "sequence" else [i]
    ratio = exp20(sum(x.logprobs[j] - x.rollout[j] for j in over))[0]
    return weighted(min(max(ratio, p["floor"]), p["cap"]), i, x)


def dcpo(i, x, p, state):
    q = math.exp(x.old[i])
    low = (1 + math.sqrt(max(0.0, 1 - 4 * p["eps_low"] / q if q else -math.inf))) / 2
    high = (1 + math.sqrt(1 + 4 * p["eps_high"] / q)) / 2 if q else math.inf
    return clip(i, x, low, min(high, p["ratio_cap"]), p["dual_clip"])


def sapo(i, x, p, state):
    a = x.advantages[i]
    ratio, clamped = exp20(x.logprobs[i] - x.old[i])
    tau = p["tau_pos"] if a > 0 else p["tau_neg"]
    s = 1 / (1 + math.exp(-min(tau * (ratio - 1), 700.0)))
    return -a * 4 / tau * s, 0.0 if clamped else -a * 4 * s * (1 - s) * ratio, 0


def vespo(i, x, p, state):
    log_w = sum(min(max(x.logprobs[j] - x.old[j], -20.0), 20.0) for j in x.peers(i))
    log_w = min(max(log_w, math.log(1e-8)), 20.0)
    side = "pos" if x.advantages[i] >= 0 else "neg"
    k, lam = p[f"k_{side}"], p[f"lambda_{side}"]
    return weighted(math.exp(lam + k * log_w - lam * math.exp(log_w)), i, x)


def reinforce(i, x, p, state):
    return weighted(1.0, i, x)


def dro(i, x, p, state):
    a, moved = x.advantages[i], x.logprobs[i] - x.old[i]
    return -(a * x.logprobs[i] - p["beta"] / 2 * moved**2), -a + p["beta"] * moved, 0


def clip_cov(i, x, p, state):
    loss, coef, flag = clip(i, x, 1 - p["clip_low"], 1 + p["clip_high"])
    if flag == 0 and p["cov_low"] < x.covariance()[i] < p["cov_high"]:
        state.setdefault("candidates", set()).add(i)
    return (0.0, 0.0, flag) if i in state["chosen"] else (loss, coef, flag)


def kl_cov(i, x, p, state):
    loss, coef, _ = clip(i, x, 0.0, math.inf)
    cov = x.covariance()
    if i in sorted(cov, key=lambda j: -cov[j])[: share(p["fraction"], len(cov))]:
        moved = x.logprobs[i] - x.old[i]
        loss += p["beta"] * abs(moved)
        coef += p["beta"] * ((moved > 0) - (moved < 0))
    return loss, coef, 0


def score_centering(i, x, p, state):
    def f(r):
        if p["weight"] == "tis":
            return min(r, p["tis_cap"])
        return r * (p["mis_low"] <= r <= p["mis_high"]) if p["weight"] == "mis" else 1.0

    a, head = x.advantages[i], x.head[i]
    pairs = [(math.exp(lp), math.exp(lq)) for lp, lq in filter(None, head)]
    tail_p = max(1 - sum(mine for mine, _ in pairs), p["tail_floor"])
    tail_q = max(1 - sum(q for _, q in pairs), p["tail_floor"])
    rho = tail_q / tail_p
    alpha = rho * f(1 / rho)
    f_y = 1.0 if p["weight"] == "none" else f(exp20(x.logprobs[i] - x.rollout[i])[0])
    loss, coefs = -a * f_y * x.logprobs[i], []
    for entry in head:
        c = 0.0
        if entry is not None:
            mine, q = math.exp(entry[0]), math.exp(entry[1])
            limit = {"none": q, "tis": p["tis_cap"] * q, "mis": 0.0}[p["weight"]]  # of q f(p/q) where q is 0
            c = (q * f(mine / q) if q else min(mine, limit)) - alpha * mine
            loss += a * c * entry[0] if c else 0.0
        coefs.append(a * c)
    state.setdefault("head", {})[i] = coefs
    return loss, -a * f_y, 0


RULES = {
    "bapo": bapo,
    "grpo": ppo,
    "ppo": ppo,
    "dapo": ppo,
    "gspo": gspo,
    "luspo": gspo,
    "gmpo": gmpo,
    "bpo": bpo,
    "cispo": cispo,
    "dppo-tv": dppo,
    "dppo-kl": dppo,
    "topr": topr,
    "dcpo": dcpo,
    "sapo": sapo,
    "vespo": vespo,
    "reinforce": reinforce,
    "dro": dro,
    "clip-cov": clip_cov,
    "kl-cov": kl_cov,
    "score-centering": score_centering,
}


def evaluate(name: str, x: Batch, chosen=(), **parameters) -> Result:
    """`chosen`: the tokens that Clip-Cov's lottery drew."""
    state = {"chosen": set(chosen)}
    rows = [
        RULES[name](i, x, DEFAULTS[name] | parameters, state) if active else (0.0, 0.0, 0)
        for i, active in enumerate(x.active)
    ]
    loss, coef, clipped = (list(column) for column in zip(*rows, strict=True))
    heads = [state.get("head", {}).get(i, [0.0] * len(h)) for i, h in enumerate(x.head)]
    return Result(loss, coef, clipped, heads, state.get("candidates", set()))


def correction(kind: str, x: Batch, i: int, **p) -> float:
    """The weight of token i."""
    over = x.peers(i) if p.get("level") == "sequence" else [i]
    ratio = exp20(sum(x.old[j] - x.rollout[j] for j in over))[0]
    if kind == "TruncatedIS":
        return min(ratio, p["cap"])
    if kind == "MaskedIS":
        return float(p["low"] <= ratio <= p["high"])
    if kind == "IcePop":
        return ratio if p["low"] <= ratio <= p["high"] else 0.0
    mine, q = math.exp(x.old[i]), math.exp(x.rollout[i])
    return float(binary_kl(mine, q) <= p["phi"] and binary_kl(q, mine) <= p["phi"])
