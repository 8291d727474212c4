"""Calls of `linear_policy_loss` for its engines: batches of several blocks, pools small enough to need them, and what happened inside."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from helpers import assert_bits, integers, normal
from torch import Tensor

import bapo_kernels as bk
from bapo_kernels.head import chunked, engines
from bapo_kernels.head.api import Head
from bapo_kernels.head.onepass import OnePass

N, D = 150, 65
HEAD_OPTIONS = ("bias", "mask", "temperature", "logit_scale", "softcap", "vocab_size")
LEAVES = ("hidden", "weight", "bias")
ALL = (True, True, True)
HIDDEN = (True, False, False)
WHOLE_BATCH = ("clip-cov", "gmpo", "gspo", "kl-cov", "luspo", "topr", "vespo")
VARIANTS = [
    bk.GRPO(dual_clip=1.5),
    bk.DCPO(dual_clip=1.5),
    bk.TOPR(ratio="token", floor=0.3, cap=2.0),
    bk.ScoreCentering(weight="tis"),
    bk.ScoreCentering(weight="mis"),
    bk.DPPO(divergence="topk-kl"),
]
LOSSES = [*map(bk.losses.get, bk.losses.available()), *VARIANTS]


def batch(
    loss="bapo",
    *,
    layout: str = "flat",
    n: int = N,
    d: int = D,
    v: int = 1003,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    spread: float = 0.5,
    **options,
) -> dict:
    """Arguments of a call: logits of about 3, ratios of about exp(+-spread), some tokens masked and some without an advantage."""
    shape = (5, n // 5) if layout == "padded" else (n,)
    vocab = options.get("vocab_size") or v
    args = {
        "hidden": normal(*shape, d, seed=seed),
        "weight": normal(v, d, seed=seed + 1) * 3.0 / d**0.5,
        "targets": integers(vocab, *shape, seed=seed + 2),
        "advantages": normal(*shape, seed=seed + 3).masked_fill(integers(6, *shape, seed=seed + 4) == 0, 0.0),
        "mask": integers(4, *shape, seed=seed + 5) > 0,
        "bias": normal(v, seed=seed + 6),
        "loss": bk.losses.get(loss) if isinstance(loss, str) else loss,
    }
    if layout == "packed":
        args["cu_seqlens"] = torch.tensor([0, n // 4, n // 4 + 1, n // 4 + 1, n])  # one of a single token, one of none
    args |= options
    given = {name: args[name] for name in HEAD_OPTIONS if args.get(name) is not None and name != "mask"}
    near = bk.reference.linear_logprobs(args["hidden"], args["weight"], args["targets"], **given).logprobs
    for i, name in enumerate(("old_logprobs", "rollout_logprobs", "ref_logprobs")):
        args.setdefault(name, near + spread * normal(*shape, seed=seed + 7 + i))
    if args["loss"].needs and "rollout_topk_ids" in args["loss"].needs:
        ids = normal(*shape, vocab, seed=seed + 10).topk(3).indices
        args["rollout_topk_logprobs"] = normal(*shape, vocab, seed=seed + 11).mul(3).log_softmax(-1).gather(-1, ids)
        args["rollout_topk_ids"] = ids.masked_fill(integers(5, *shape, 3, seed=seed + 12) == 0, -1)
    return to(args, dtype)


def to(args: dict, dtype: torch.dtype, names=None) -> dict:
    """The same numbers, those of `names` (all) in another dtype."""

    def convert(name, t):
        wanted = isinstance(t, Tensor) and t.is_floating_point() and (names is None or name in names)
        return t.to(dtype) if wanted else t

    return {name: convert(name, t) for name, t in args.items()}


def configuration(seed: int) -> dict:
    """A random call, drawn from everything that the function accepts."""
    r = random.Random(seed)
    layout = r.choice(["padded", "packed", "flat"])
    v = r.choice([300, 1003])
    options = {
        "vocab_size": r.choice([None, v - 7]),
        "temperature": r.choice([1.0, 0.7, normal(N, seed=seed + 20).abs() + 0.5]),
        "softcap": r.choice([None, None, 4.0]),
        "logit_scale": r.choice([1.0, 0.5, -1.2]),
        "correction": r.choice(
            [
                None,
                bk.TruncatedIS(cap=1.1),
                bk.TruncatedIS(cap=1.1, level="sequence"),
                bk.MaskedIS(low=0.8, high=1.5),
                bk.MaskedIS(level="sequence"),
                bk.IcePop(low=0.8, high=1.5),
                bk.KPop(phi=0.01),
            ]
        ),
        "aggregation": r.choice(
            [None, "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"]
        ),
        "kl_coef": r.choice([0.0, 0.1]),
        "kl_estimator": r.choice(["k1", "k2", "k3", "k3+"]),
        "entropy_coef": r.choice([0.0, 0.05]),
        "top_entropy": r.choice([None, None, None, 0.4]),
        "return_tokens": True,
    }
    if isinstance(options["temperature"], Tensor) and layout == "padded":
        options["temperature"] = options["temperature"].view(5, -1)
    if options["aggregation"] == "seq-mean-token-sum-norm":
        options["max_length"] = 64
    if options["aggregation"] != "token-sum":
        options["normalizer"] = r.choice([None, 77.0, torch.tensor(5)])
    if r.random() < 0.2:
        options["bias"] = None
    args = batch(r.choice(LOSSES), layout=layout, v=v, seed=seed, **options)
    for name in ("old_logprobs", "rollout_logprobs"):
        if r.random() < 0.25 and name not in args["loss"].needs:
            args[name] = None
    if r.random() < 0.3:
        args["targets"] = args["targets"].masked_fill(integers(5, *args["targets"].shape, seed=seed + 30) == 0, -100)
    return args


def whole_batch(args: dict) -> bool:
    """Whether coefficients follow from the whole batch only, by the documentation and not by the package."""
    loss, correction = args["loss"], args.get("correction")
    sequences = getattr(correction, "level", "token") == "sequence" and args["old_logprobs"] is None
    by_loss = loss.name in WHOLE_BATCH and getattr(loss, "ratio", "sequence") != "token"
    return by_loss or sequences or args.get("top_entropy") is not None


def pool_of(rows: int, args: dict, learns=ALL, backend: str = "cpu") -> int:
    """The memory budget with which the one-pass engine holds the products of `rows` rows."""
    given = {name: args.get(name) for name in HEAD_OPTIONS}
    given |= {"temperature": args.get("temperature", 1.0), "logit_scale": args.get("logit_scale", 1.0)}
    weight = args["weight"] if isinstance(args["weight"], tuple) else (args["weight"],)
    weight = tuple(w.detach().requires_grad_(learns[1]) for w in weight)
    head = Head.of(
        args["hidden"].detach().requires_grad_(learns[0]),
        weight if len(weight) > 1 else weight[0],
        args["targets"],
        ignore_index=-100,
        topk_ids=None,
        tp_group=None,
        backend=backend,
        memory_budget=None,
        **given,
    )
    if head.backend is None:  # the reference holds all logits, and looks at no budget
        return 2**30
    return head.work(head.backend, late_because=None, entropy_grad=False).one_pass_bytes(rows)


@dataclass
class Result:
    out: bk.PolicyLossOutput
    grads: dict[str, Tensor | None] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor | None]:
        tokens = {} if self.out.tokens is None else {f"tokens.{k}": v for k, v in self.out.tokens._asdict().items()}
        grads = {f"gradient of {k}": v for k, v in self.grads.items()}
        return {"loss": self.out.loss.detach()} | self.out.metrics | tokens | grads


def run(args: dict, learns=ALL, upstream: float = 1.0, function=bk.linear_policy_loss, **options) -> Result:
    """Forward and backward, with leaves of their own."""
    leaves = {}
    for name, learn in zip(LEAVES, learns, strict=True):
        if args.get(name) is not None:
            leaves[name] = args[name].detach().clone().requires_grad_(learn)
    out = function(**(args | leaves | options))
    if any(t.requires_grad for t in leaves.values()):
        out.loss.backward(torch.full_like(out.loss, upstream))
    return Result(out, {name: t.grad for name, t in leaves.items()})


def reference(args: dict, learns=ALL, **options) -> Result:
    return run(to(args, torch.float64), learns, function=bk.reference.linear_policy_loss, **options)


def assert_same(got: Result, want: Result, what: str = "", tolerance: float = 1e-11) -> None:
    """Equal but for roundings of fp64, relative to the largest element; gradients that `got` has none of are not compared."""
    found, wanted = got.tensors(), want.tensors()
    assert found.keys() == wanted.keys()
    for name, b in wanted.items():
        a = found[name]
        if name.startswith("gradient") and a is None:
            continue
        assert (a is None) == (b is None), f"{what} {name}"
        if b is None:
            continue
        assert a.shape == b.shape and a.dtype == b.dtype, f"{what} {name}: {a.dtype} {tuple(a.shape)}"
        if not b.is_floating_point():
            assert_bits(a, b, f"{what} {name}")
            continue
        assert torch.equal(a.isnan(), b.isnan()), f"{what} {name}: NaN at other places"
        error, size = (t.nan_to_num(0.0, 0.0, 0.0).abs().max() if t.numel() else 0.0 for t in (a - b, b))
        assert torch.equal(a.isinf(), b.isinf()), f"{what} {name}: inf at other places"
        assert error <= tolerance * max(float(size), 1e-3), f"{what} {name}: off by {float(error)} of {float(size)}"


def assert_identical(got: Result, want: Result, what: str = "", skip: tuple[str, ...] = ()) -> None:
    found, wanted = got.tensors(), want.tensors()
    assert found.keys() == wanted.keys()
    for name, t in wanted.items():
        if not name.startswith(skip or ("?",)):
            assert_bits(found[name], t, f"{what} {name}")


@dataclass
class Trace:
    """What the one-pass engine did in its last run."""

    capacity: int = 0
    blocks: int = 0
    turned: int = 0  # rows whose products became their gradient
    turns: int = 0  # in so many steps
    undecided: int = 0
    again: int = 0  # rows whose logits were made again


@pytest.fixture
def trace(monkeypatch) -> Trace:
    seen = Trace()
    start, fold, turn, finish, backward = (
        *(getattr(OnePass, name) for name in ("__init__", "_fold", "_turn", "finish")),
        chunked.backward,
    )

    def watched_start(self, *args, **kwargs):
        start(self, *args, **kwargs)
        seen.__init__()
        seen.capacity = self.pool.capacity

    def watched_fold(self, block):
        seen.blocks += 1
        return fold(self, block)

    def watched_turn(self, first):
        seen.turned += self.pool.filled - first
        seen.turns += self.pool.filled > first
        return turn(self, first)

    def watched_finish(self, final, budget):
        seen.undecided = int((~self.settled).sum()) if seen.blocks > 1 else 0
        return finish(self, final, budget)

    def watched_backward(backend, rows, *args, **kwargs):
        seen.again += rows.hidden.shape[0]
        return backward(backend, rows, *args, **kwargs)

    monkeypatch.setattr(OnePass, "__init__", watched_start)
    monkeypatch.setattr(OnePass, "_fold", watched_fold)
    monkeypatch.setattr(OnePass, "_turn", watched_turn)
    monkeypatch.setattr(OnePass, "finish", watched_finish)
    monkeypatch.setattr(chunked, "backward", watched_backward)
    return seen


@pytest.fixture
def narrow_slices(monkeypatch):
    """Several slices of the vocabulary at V = 1003."""
    monkeypatch.setattr(chunked, "MAX_COLUMNS", 256)
    forget = (chunked.slice_edges.cache_clear, getattr(engines.choose, "cache_clear", int))
    for f in forget:
        f()
    assert len(chunked.slice_edges(1003, D, gpu=False)) == 5
    yield
    for f in forget:
        f()
