"""`linear_policy_loss`: against the reference on random configurations, without gradient, with nothing to do, under garbage."""

import random

import pytest
import torch
from helpers import BACKENDS, FUSED, INF, NAN, Problem, assert_bits, close, integers, normal

import bapo_kernels as bk

AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"]
LOSSES = [
    *map(bk.losses.get, bk.losses.available()),
    bk.GRPO(dual_clip=1.5),
    bk.BAPO.fixed(0.9, 1.1),
    bk.BAPO(measure="gradient", order="low-first"),
    bk.GSPO(clip_low=0.1, clip_high=0.2),
    bk.TOPR(ratio="token", floor=0.3, cap=2.0),
    bk.DCPO(dual_clip=1.5),
    bk.ClipCov(fraction=0.4, cov_low=-3.0),
    bk.KLCov(fraction=0.4),
    bk.ScoreCentering(weight="tis"),
    bk.ScoreCentering(weight="mis"),
]
CORRECTIONS = [
    bk.TruncatedIS(),
    bk.TruncatedIS(level="sequence"),
    bk.MaskedIS(low=0.8, high=1.5),
    bk.MaskedIS(level="sequence"),
    bk.IcePop(low=0.8, high=1.5),
    bk.KPop(phi=0.1),
]


def configuration(seed: int):
    """Arguments of a random call, drawn from everything that the function accepts."""
    r = random.Random(seed)
    layout = r.choice(["padded", "packed", "flat"])
    shape = (r.randint(1, 4), r.randint(1, 7)) if layout == "padded" else (r.randint(1, 20),)
    n, d, v = torch.Size(shape).numel(), r.choice([1, 3, 8, 17]), r.choice([2, 5, 64, 4099])
    vocab = r.choice([None, None, max(1, v - 1)])
    args = {
        "hidden": normal(*shape, d, seed=seed),
        "weight": normal(v, d, seed=seed + 1),
        "targets": integers(vocab or v, *shape, seed=seed + 2),
        "advantages": normal(*shape, seed=seed + 3),
        "loss": r.choice(LOSSES),
        "correction": r.choice([None, *CORRECTIONS]),
        "vocab_size": vocab,
        "aggregation": r.choice([None, *AGGREGATIONS]),
        "return_tokens": True,
    }
    if r.random() < 0.6:
        args["mask"] = integers(r.choice([2, 4]), *shape, seed=seed + 4) > 0
    if r.random() < 0.3:
        args["targets"][integers(3, *shape, seed=seed + 5) == 0] = -100
    sequences = 1 if layout == "flat" else shape[0]
    if layout == "packed":
        edges = sorted(r.randint(0, n) for _ in range(r.randint(0, 3)))
        args["cu_seqlens"] = torch.tensor([0, *edges, n], dtype=r.choice([torch.int32, torch.int64]))
        sequences = len(edges) + 1
    if r.random() < 0.3 and not (layout == "packed" and sequences == n):
        args["advantages"] = normal(sequences, seed=seed + 6)
    args["temperature"] = r.choice([1.0, 0.7, normal(*shape, seed=seed + 7).abs() + 0.5])
    if r.random() < 0.5:
        args["bias"] = normal(v, seed=seed + 8)
    if r.random() < 0.3:
        args["softcap"] = 3.0
    if r.random() < 0.3:
        args["logit_scale"] = r.choice([0.5, -1.2])
    with torch.no_grad():
        near = bk.reference.linear_logprobs(
            *(args[k] for k in ("hidden", "weight", "targets")),
            **{
                k: args[k] for k in ("bias", "mask", "softcap", "logit_scale", "temperature", "vocab_size") if k in args
            },
        ).logprobs
    for i, name in enumerate(("old_logprobs", "rollout_logprobs", "ref_logprobs")):
        if r.random() < 0.8:
            args[name] = near + 0.4 * normal(*shape, seed=seed + 9 + i)
    if args["loss"].name == "score-centering":
        k = r.randint(1, min(4, vocab or v))
        ids = normal(*shape, vocab or v, seed=seed + 12).topk(k).indices
        args["rollout_topk_logprobs"] = normal(*shape, vocab or v, seed=seed + 13).log_softmax(-1).gather(-1, ids)
        args["rollout_topk_ids"] = ids.masked_fill(integers(5, *shape, k, seed=seed + 14) == 0, -1)
    if "ref_logprobs" in args:
        args["kl_coef"], args["kl_estimator"] = r.choice([0.0, 0.1]), r.choice(["k1", "k2", "k3", "k3+"])
    if r.random() < 0.4:
        args["entropy_coef"] = 0.05
    if r.random() < 0.3:
        args["top_entropy"] = r.choice([0.2, 0.5])
    if args["aggregation"] == "seq-mean-token-sum-norm":
        args["max_length"] = 9
    if args["aggregation"] != "token-sum" and r.random() < 0.3:
        args["normalizer"] = r.choice([3, 7.5, torch.tensor(4)])
    if r.random() < 0.3:
        args["memory_budget"] = r.choice([1, 10_000])
    learns = [r.random() < 0.8 for _ in range(3)]
    return args, learns


def evaluate(function, args: dict, learns, **options):
    args = dict(args)
    leaves = []
    for name, flag in zip(("hidden", "weight", "bias"), learns, strict=True):
        if name in args:
            args[name] = args[name].clone().requires_grad_(flag)
            leaves.append(args[name])
    out = function(**args, **options)
    if any(t.requires_grad for t in leaves):
        out.loss.backward()
    return out, [t.grad for t in leaves]


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("seed", range(250))
def test_random_configurations_against_the_reference(seed, backend):
    args, learns = configuration(1000 * seed + (backend == "cpu"))
    want, want_grads = evaluate(bk.reference.linear_policy_loss, args, learns)
    got, grads = evaluate(bk.linear_policy_loss, args, learns, backend=backend)
    assert got.loss.requires_grad == want.loss.requires_grad
    close(got.loss, want.loss, "loss")
    for a, b in zip(grads, want_grads, strict=True):
        if b is None:
            assert a is None
        else:
            close(a, b, "gradient", rtol=1e-8)
    assert set(got.metrics) == set(want.metrics)
    for k, v in want.metrics.items():
        close(got.metrics[k], v, k, rtol=1e-6, atol=1e-7)
    for name, a, b in zip(got.tokens._fields, got.tokens, want.tokens, strict=True):
        close(a, b, name)


def simple(dtype=torch.float32, **changed):
    p = Problem.random(12, 5, 4100, dtype=dtype)
    near = p.oracle().logprobs
    return {
        "hidden": p.hidden,
        "weight": p.weight,
        "bias": p.bias,
        "targets": p.targets,
        "advantages": normal(12, seed=30, dtype=dtype),
        "old_logprobs": near + 0.3 * normal(12, seed=31, dtype=dtype),
        "rollout_logprobs": near + 0.3 * normal(12, seed=32, dtype=dtype),
        "ref_logprobs": near + 0.3 * normal(12, seed=33, dtype=dtype),
        "mask": integers(4, 12, seed=34) > 0,
        "cu_seqlens": torch.tensor([0, 4, 12]),
        "temperature": normal(12, seed=35, dtype=dtype).abs() + 0.5,
        "kl_coef": 0.1,
        "entropy_coef": 0.01,
        "loss": "bapo",
        "return_tokens": True,
    } | changed


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_linear_logprobs_and_policy_loss(backend):
    args = simple()
    got, grads = evaluate(bk.linear_policy_loss, args, (True, True, True), backend=backend)
    p = Problem(args["hidden"], args["weight"], args["bias"], args["targets"]).requires_grad()
    stats = p.run(backend, mask=args["mask"], temperature=args["temperature"])
    rest = {
        k: v for k, v in args.items() if k not in ("hidden", "weight", "bias", "targets", "temperature", "advantages")
    }
    want = bk.policy_loss(stats.logprobs, args["advantages"], entropy=stats.entropy, **rest)
    want.loss.backward()
    assert_bits(got.loss, want.loss)
    for a, b in zip(grads, p.grads(), strict=True):
        assert_bits(a, b)
    assert_bits(got.tokens.logprobs, stats.logprobs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", bk.losses.available())
def test_no_loss_learns_from_a_batch_without_tokens(name, backend):
    args = simple(loss=name, mask=torch.zeros(12, dtype=torch.bool))
    if name == "score-centering":
        args["rollout_topk_ids"], args["rollout_topk_logprobs"] = torch.zeros(12, 3).long(), torch.full((12, 3), NAN)
    args["hidden"] = torch.full_like(args["hidden"], NAN)
    out, grads = evaluate(bk.linear_policy_loss, args, (True, True, True), backend=backend)
    assert out.loss.requires_grad
    assert out.loss.item() == 0
    for leaf, g in zip(("hidden", "weight", "bias"), grads, strict=True):
        assert_bits(g, torch.zeros_like(args[leaf]), leaf)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradient_everything_but_the_graph_is_the_same(context, backend):
    args = simple()
    want, _ = evaluate(bk.linear_policy_loss, args, (True, True, True), backend=backend)
    with context():
        got = bk.linear_policy_loss(**args, backend=backend)
        also = bk.policy_loss(
            got.tokens.logprobs, args["advantages"], old_logprobs=args["old_logprobs"], return_tokens=True
        )
        cheap = bk.linear_policy_loss(**{**args, "return_tokens": False}, backend=backend)
    assert not got.loss.requires_grad
    assert also.tokens.coef.abs().sum() > 0
    assert cheap.tokens is None
    assert_bits(cheap.loss, want.loss)
    assert_bits(got.loss, want.loss)
    for a, b in zip(got.tokens, want.tokens, strict=True):
        assert_bits(a, b)
    for k, v in want.metrics.items():
        assert_bits(got.metrics[k], v, k)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_scale_with_the_upstream(backend):
    args = simple(torch.float64)
    once = {k: args[k].clone().requires_grad_() for k in ("hidden", "weight", "bias")}
    bk.linear_policy_loss(**(args | once), backend=backend).loss.backward()
    thrice = {k: args[k].clone().requires_grad_() for k in once}
    (3 * bk.linear_policy_loss(**(args | thrice), backend=backend).loss).backward()
    for k, t in thrice.items():
        close(t.grad, 3 * once[k].grad)


@pytest.mark.parametrize("backend", FUSED)
def test_scoring_then_training_on_the_same_weights_has_ratio_one(backend):
    """The old log-probs come from a pass without gradient, in other batches: the ratio is exactly 1."""
    for dtype in (torch.float32, torch.bfloat16):
        args = simple(dtype)
        logits = {k: args[k] for k in ("weight", "bias")}
        with torch.no_grad():
            pieces = [slice(0, 5), slice(5, 6), slice(6, 12)]
            old = torch.cat(
                [
                    bk.linear_logprobs(
                        args["hidden"][s],
                        targets=args["targets"][s],
                        temperature=args["temperature"][s],
                        backend=backend,
                        **logits,
                    ).logprobs
                    for s in pieces
                ]
            )
        out, _ = evaluate(bk.linear_policy_loss, args | {"old_logprobs": old}, (True, True, True), backend=backend)
        assert bool((out.tokens.ratio[args["mask"]] == 1).all())
        assert out.metrics["approx_kl"] == 0
        assert out.metrics["ratio_max"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", bk.losses.available())
def test_garbage_under_the_mask_changes_nothing(loss, backend):
    args = simple(loss=loss, correction=bk.TruncatedIS(level="sequence"), top_entropy=0.8)
    if loss == "score-centering":
        args["rollout_topk_ids"] = torch.arange(36).view(12, 3)
        args["rollout_topk_logprobs"] = normal(12, 3, seed=40, dtype=torch.float32).abs().neg() - 3
    want, want_grads = evaluate(bk.linear_policy_loss, args, (True, True, True), backend=backend)
    floats = ("hidden", "advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs", "temperature")
    for value in (NAN, INF, -INF, -1e30):
        dirty = dict(args)
        for name in floats:
            dirty[name] = args[name].clone()
            dirty[name][~args["mask"]] = value
        if "rollout_topk_ids" in args:
            for name, garbage in (("rollout_topk_ids", 2**40), ("rollout_topk_logprobs", value)):
                dirty[name] = args[name].masked_fill(~args["mask"][:, None], garbage)
        dirty["targets"] = args["targets"].masked_fill(~args["mask"], -7 if value == value else 2**40)
        got, grads = evaluate(bk.linear_policy_loss, dirty, (True, True, True), backend=backend)
        for a, b in zip((got.loss, *got.tokens, *grads), (want.loss, *want.tokens, *want_grads), strict=True):
            assert_bits(a, b)
        for k, v in want.metrics.items():
            assert_bits(got.metrics[k], v, k)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", ["grpo", "ppo", "dapo", "bapo"])
@pytest.mark.parametrize("how", ["mask", "ignore_index", "empty", "advantages", "clipped"])
def test_nothing_to_learn_gives_zero_gradients(how, loss, backend):
    args = simple(loss=loss, kl_coef=0.0, entropy_coef=0.0)
    if how == "mask":
        args["mask"] = torch.zeros(12, dtype=torch.bool)
    elif how == "ignore_index":
        args["targets"] = torch.full((12,), -100)
    elif how == "empty":
        per_token = (
            "hidden",
            "targets",
            "advantages",
            "old_logprobs",
            "rollout_logprobs",
            "ref_logprobs",
            "mask",
            "temperature",
        )
        args |= {k: args[k][:0] for k in per_token} | {"cu_seqlens": torch.tensor([0, 0])}
    elif how == "advantages":
        args["advantages"] = torch.zeros(12)
    else:
        args |= {"advantages": torch.ones(12), "old_logprobs": torch.full((12,), -50.0)}
    out, grads = evaluate(bk.linear_policy_loss, args, (True, True, True), backend=backend)
    assert out.loss.requires_grad
    if how != "clipped":
        assert out.loss.item() == 0
    for name, g in zip(("hidden", "weight", "bias"), grads, strict=True):
        assert_bits(g, torch.zeros_like(args[name]), name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_temperature_of_each_sequence(backend):
    args = simple(torch.float64)
    for layout in ("packed", "padded"):
        if layout == "padded":
            rows = ("hidden", "targets", "advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs", "mask")
            args = args | {k: args[k].unflatten(0, (2, 6)) for k in rows} | {"cu_seqlens": None}
        lengths = torch.tensor([6, 6] if layout == "padded" else [4, 8])
        per_sequence = torch.tensor([0.5, 1.5], dtype=torch.float64)
        per_token = per_sequence.repeat_interleave(lengths).view(args["targets"].shape)
        want = bk.linear_policy_loss(**(args | {"temperature": per_token}), backend=backend)
        for form in [per_sequence] + ([per_sequence[:, None]] if layout == "padded" else []):
            assert_bits(bk.linear_policy_loss(**(args | {"temperature": form}), backend=backend).loss, want.loss)


@pytest.mark.parametrize("backend", FUSED)
def test_gradcheck(backend):
    args = {k: v for k, v in simple(torch.float64).items() if k not in ("hidden", "weight", "bias")}
    p = Problem.random(12, 3, 6)
    args |= {"targets": p.targets, "old_logprobs": p.oracle().logprobs - 0.01 * normal(12, seed=5)}

    def function(hidden, weight, bias):
        return bk.linear_policy_loss(hidden, weight, bias=bias, backend=backend, **args).loss

    assert torch.autograd.gradcheck(function, p.requires_grad().leaves)
