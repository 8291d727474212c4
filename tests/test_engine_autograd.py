"""The engines behave under autograd as any PyTorch function does: upstream gradients, kept graphs, accumulation, hooks, modes."""

import gc
import weakref

import pytest
import torch
from engine_batches import (
    ALL,
    HIDDEN,
    assert_identical,
    assert_same,
    batch,
    narrow_slices,  # noqa: F401
    pool_of,
    reference,
    run,
    to,
)
from helpers import FUSED, INF, assert_bits, close, normal
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import bapo_kernels as bk
from bapo_kernels.head.onepass import OnePass

WAYS = [(e, b) for e in ("recompute", "one-pass", "frozen") for b in FUSED]
ways = pytest.mark.parametrize(("engine", "backend"), WAYS, ids=[f"{e}-{b}" for e, b in WAYS])
VOCAB = 290  # of 300 rows


def small(loss="bapo", dtype=torch.float64, **options) -> dict:
    return batch(loss, n=70, d=9, v=300, vocab_size=VOCAB, dtype=dtype, seed=3, entropy_coef=0.02, **options)


def learns_of(engine: str) -> tuple[bool, bool, bool]:
    return HIDDEN if engine == "frozen" else ALL


def leaves_of(args: dict, engine: str, names=("hidden", "weight", "bias")) -> dict[str, Tensor]:
    learn = dict(zip(("hidden", "weight", "bias"), learns_of(engine), strict=True))
    return {k: args[k].clone().requires_grad_(learn[k] and k in names) for k in ("hidden", "weight", "bias")}


def call(args: dict, leaves: dict, engine: str, backend: str, rows: int = 32) -> Tensor:
    learns = tuple(leaves[k].requires_grad for k in ("hidden", "weight", "bias"))
    options = {"engine": engine, "backend": backend, "memory_budget": pool_of(rows, args, learns, backend=backend)}
    return bk.linear_policy_loss(**(args | leaves | options)).loss


def grads_of(leaves: dict) -> list[Tensor]:
    return [t.grad for t in leaves.values() if t.requires_grad]


@ways
@pytest.mark.parametrize("upstream", [3.0, 1 / 7, 65536.0, 0.0, -2.0])
def test_upstream_scalars(upstream, engine, backend):
    args = small()
    want = reference(args, upstream=upstream)
    got = run(
        args,
        learns_of(engine),
        upstream,
        engine=engine,
        backend=backend,
        memory_budget=pool_of(32, args, learns_of(engine), backend=backend),
    )
    assert_same(got, want)
    for name, t in got.grads.items():
        if t is not None:
            assert not (t[~args["mask"]] if name == "hidden" else t[VOCAB:]).any()


@ways
@pytest.mark.parametrize("upstream", [INF, float("nan")])
def test_an_infinite_upstream_reaches_nothing_that_does_not_count(upstream, engine, backend):
    args = small()
    got = run(args, learns_of(engine), upstream, engine=engine, backend=backend)
    hidden = got.grads["hidden"]
    assert_bits(hidden[~args["mask"]], torch.zeros_like(hidden[~args["mask"]]))
    assert not bool(hidden[args["mask"] & (args["advantages"] != 0)].isfinite().all(1).any())
    for name in ("weight", "bias"):
        if (t := got.grads[name]) is not None:
            assert_bits(t[VOCAB:], torch.zeros_like(t[VOCAB:]))
            assert not bool(t[:VOCAB].isfinite().any())


@ways
@pytest.mark.parametrize("upstream", [1.0, 0.3])
def test_a_second_backward_gives_the_same(upstream, engine, backend):
    args = small(dtype=torch.float32)
    leaves = leaves_of(args, engine)
    trained = [t for t in leaves.values() if t.requires_grad]
    loss = call(args, leaves, engine, backend)
    g = torch.tensor(upstream)
    first = torch.autograd.grad(loss, trained, g, retain_graph=True)
    kept = [t.clone() for t in first]
    for t in first:
        t.mul_(17.0)  # theirs to do with as they like
    second = torch.autograd.grad(loss, trained, g, retain_graph=True)
    other = torch.autograd.grad(loss, trained, 2 * g)  # the last one
    once = torch.autograd.grad(call(args, leaves, engine, backend), trained, g)
    for a, b, c, d in zip(kept, second, other, once, strict=True):
        assert_bits(b, a)
        assert_bits(d, a)
        close(c, 2 * a, rtol=1e-5, atol=1e-7)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, trained)


@ways
def test_gradients_are_added_to_those_there(engine, backend):
    args = small()
    leaves, fresh = leaves_of(args, engine), leaves_of(args, engine)
    call(args, fresh, engine, backend).backward()
    for t in leaves.values():
        if t.requires_grad:
            t.grad = torch.full_like(t, 2.0)
    held = grads_of(leaves)
    call(args, leaves, engine, backend).backward()
    for there, got, new in zip(held, grads_of(leaves), grads_of(fresh), strict=True):
        assert got is there
        close(got, 2.0 + new)
    call(args, leaves, engine, backend).backward()
    for got, new in zip(grads_of(leaves), grads_of(fresh), strict=True):
        close(got, 2.0 + 2 * new)


@ways
def test_some_inputs_only(engine, backend):
    args = small()
    leaves = leaves_of(args, engine)
    want = reference(args).grads
    for name, t in leaves.items():
        if t.requires_grad:
            (g,) = torch.autograd.grad(call(args, leaves, engine, backend), [t])
            close(g, want[name], name)
    for names in (["hidden"], ["weight"], ["bias"], ["weight", "bias"], ["hidden", "bias"]):
        if engine == "frozen" and names != ["hidden"]:
            continue
        leaves = leaves_of(args, engine, names)
        call(args, leaves, engine, backend).backward()
        for name, t in leaves.items():
            if name in names:
                close(t.grad, want[name], f"{name} of {names}")
            else:
                assert t.grad is None


@ways
def test_hidden_states_in_the_middle_of_a_model(engine, backend):
    args = small()
    results = []
    for function, options in (
        (bk.reference.linear_policy_loss, {}),
        (bk.linear_policy_loss, {"engine": engine, "backend": backend}),
    ):
        x, matrix = args["hidden"].clone().requires_grad_(), torch.eye(9, dtype=torch.float64).requires_grad_()
        weight = args["weight"].clone().requires_grad_(engine != "frozen")
        hidden = torch.tanh(x @ matrix)
        hidden.retain_grad()
        out = function(**(args | {"hidden": hidden, "weight": weight * 1.0} | options))
        (out.loss + hidden.sum() * 1e-3).backward()
        results.append([x.grad, matrix.grad, hidden.grad, weight.grad])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            close(b, a)


@ways
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradient(mode, engine, backend):
    args = small(return_tokens=True)
    want = run(args, learns_of(engine), engine=engine, backend=backend)
    leaves = leaves_of(args, engine)
    with mode():
        out = bk.linear_policy_loss(**(args | leaves), engine=engine, backend=backend)
        made_here = {k: v.clone() if isinstance(v, Tensor) else v for k, v in args.items()}
        again = bk.linear_policy_loss(**made_here, engine=engine, backend=backend)
    for got in (out, again):
        assert not got.loss.requires_grad
        for name in ("loss", "tokens"):
            for a, b in zip(
                [getattr(got, name)] if name == "loss" else got.tokens,
                [want.out.loss] if name == "loss" else want.out.tokens,
                strict=True,
            ):
                close(a, b, name)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("engine", ["one-pass", "recompute"])
def test_batches_made_in_inference_mode_train(engine, backend):
    """What was recorded comes from a rollout."""
    args = small()
    want = run(args, engine=engine, backend=backend)
    with torch.inference_mode():
        recorded = {
            k: args[k].clone()
            for k in ("targets", "advantages", "mask", "old_logprobs", "rollout_logprobs", "ref_logprobs")
        }
    assert_identical(run(args | recorded, engine=engine, backend=backend), want)


@ways
def test_no_second_derivatives(engine, backend):
    args = small()
    leaves = leaves_of(args, engine)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(call(args, leaves, engine, backend), leaves["hidden"], create_graph=True)


@ways
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant, engine, backend):
    args = small()
    want = reference(args).grads
    leaves = leaves_of(args, engine)

    def forward(hidden, weight, bias):
        return call(args, {"hidden": hidden, "weight": weight, "bias": bias}, engine, backend)

    (2 * checkpoint(forward, *leaves.values(), use_reentrant=reentrant)).backward()
    for name, t in leaves.items():
        if t.requires_grad:
            close(t.grad, 2 * want[name], name)


@ways
def test_saved_tensors_may_be_elsewhere(engine, backend):
    args = small()
    want = reference(args).grads
    leaves, packed = leaves_of(args, engine), []

    def pack(t):
        packed.append(t.clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i]):
        loss = call(args, leaves, engine, backend)
    assert packed
    grads = [torch.autograd.grad(loss, leaves["hidden"], retain_graph=True)[0] for _ in range(2)]
    assert_bits(grads[0], grads[1])
    close(grads[0], want["hidden"])
    leaves = leaves_of(args, engine)
    with torch.autograd.graph.save_on_cpu():
        loss = call(args, leaves, engine, backend)
    (0.5 * loss).backward()
    for name, t in leaves.items():
        if t.requires_grad:
            close(t.grad, 0.5 * want[name], name)


@pytest.mark.parametrize(("engine", "backend"), WAYS)
def test_gradcheck(engine, backend):
    args = batch("bapo", n=40, d=3, v=17, seed=3, spread=0.3, entropy_coef=0.02, kl_coef=0.1)
    budget = pool_of(16, args, learns_of(engine), backend=backend)
    learns = learns_of(engine)
    leaves = [args[k].clone().requires_grad_(f) for k, f in zip(("hidden", "weight", "bias"), learns, strict=True)]

    def function(hidden, weight, bias):
        given = {"hidden": hidden, "weight": weight, "bias": bias, "engine": engine, "backend": backend}
        return 3 * bk.linear_policy_loss(**(args | given), memory_budget=budget).loss

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@ways
def test_hooks_of_the_parameters(engine, backend):
    """As DDP has them: on the gradient that comes, and on the one that was accumulated."""
    args = small()
    want = reference(args).grads
    leaves, seen = leaves_of(args, engine), {}
    for name, t in leaves.items():
        if t.requires_grad:
            t.register_hook(lambda g: g * 2)
            t.register_post_accumulate_grad_hook(lambda t, name=name: seen.update({name: t.grad.clone()}))
    call(args, leaves, engine, backend).backward()
    assert len(seen) == sum(learns_of(engine))
    for name, g in seen.items():
        close(g, 2 * want[name], name)


@ways
def test_two_losses_one_backward(engine, backend):
    args, other = small(), small("dapo")
    leaves = leaves_of(args, engine)
    other["advantages"] = args["advantages"].flip(0)
    (call(args, leaves, engine, backend) + 3 * call(other, leaves, engine, backend)).backward()
    want, more = reference(args).grads, reference(args | {k: other[k] for k in ("loss", "advantages")}).grads
    for name, t in leaves.items():
        if t.requires_grad:
            close(t.grad, want[name] + 3 * more[name], name)


@ways
def test_inputs_may_change_after_the_forward(engine, backend):
    """What was recorded may be overwritten before the backward; what is trained may not, if the backward needs it."""
    args = small()
    want = reference(args).grads
    leaves = leaves_of(args, engine)
    args = {k: v.clone() if isinstance(v, Tensor) else v for k, v in args.items()}
    loss = call(args, leaves, engine, backend)
    for name in ("targets", "advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs", "mask"):
        args[name].zero_()
    loss.backward()
    for name, t in leaves.items():
        if t.requires_grad:
            close(t.grad, want[name], name)


@pytest.fixture
def finished(monkeypatch) -> list:
    """Addresses of, and weak references to, what the one-pass engine has computed."""
    seen, finish = [], OnePass.finish

    def watched(self, *args):
        sums = finish(self, *args)
        seen.append(
            {
                k: (t.data_ptr(), weakref.ref(t))
                for k, t in (("weight", sums.weight[0]), ("hidden", sums.hidden), ("bias", sums.bias))
                if t is not None
            }
        )
        return sums

    monkeypatch.setattr(OnePass, "finish", watched)
    return seen


@pytest.mark.parametrize("upstream", [1.0, 0.5])
def test_the_gradient_becomes_the_grad_of_the_weight_without_a_copy(upstream, finished):
    args = small(dtype=torch.float32)
    leaves = leaves_of(args, "one-pass")
    call(args, leaves, "one-pass", "torch").backward(torch.tensor(upstream))
    for name, t in leaves.items():
        assert t.grad.data_ptr() == finished[0][name][0], name


def test_a_loss_that_is_never_used_leaves_nothing(finished):
    args = small(dtype=torch.float32)
    loss = call(args, leaves_of(args, "one-pass"), "one-pass", "torch")
    del loss
    gc.collect()
    assert all(ref() is None for _, ref in finished[0].values())


@ways
def test_the_graph_is_freed_by_the_backward(engine, backend):
    args = small()
    leaves = leaves_of(args, engine)
    loss = call(args, leaves, engine, backend)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
MIXED = [("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "fp16")]


@pytest.mark.parametrize("upstream", [1.0, 1 / 3])
@pytest.mark.parametrize("engine", ["one-pass", "frozen"])
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize(("hidden", "weight"), MIXED, ids=["-".join(m) for m in MIXED])
def test_narrow_dtypes_are_rounded_once(hidden, weight, backend, engine, upstream, narrow_slices):  # noqa: F811
    """Within one rounding of the exact gradient, whatever the upstream."""
    args = small("dapo", dtype=torch.float32, aggregation="token-sum")  # fp16: gradients far from its smallest numbers
    if hidden != "fp32":
        args = to(args, NARROW[hidden], ("hidden",))
    if weight != "fp32":
        args = to(args, NARROW[weight], ("weight", "bias"))
    exact = reference(args, upstream=upstream).grads
    learns = learns_of(engine)
    got = run(
        args, learns, upstream, engine=engine, backend=backend, memory_budget=pool_of(32, args, learns, backend=backend)
    )
    for name, t in got.grads.items():
        if t is None:
            continue
        assert t.dtype == args[name].dtype
        want = exact[name]
        unit = torch.finfo(t.dtype).eps / 2
        slack = 2e-6 * float(want.abs().max())  # of the sums in fp32
        smallest = torch.finfo(t.dtype).smallest_normal * torch.finfo(t.dtype).eps
        assert bool(((t.double() - want).abs() <= unit * want.abs() * 1.0001 + slack + smallest).all()), name


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_have_the_same_bits_in_every_engine(dtype, backend, narrow_slices):  # noqa: F811
    """And without gradient; and a call twice gives the same bits throughout."""
    args = to(batch("bapo", dtype=torch.float32, return_tokens=True), dtype, ("hidden", "weight", "bias"))
    want = run(args, (False, False, False), backend=backend)
    for learns in (ALL, HIDDEN):
        for engine in ("recompute", "one-pass", "frozen")[: 2 + (learns == HIDDEN)]:
            for rows in (16, 48, None):
                options = {
                    "engine": engine,
                    "backend": backend,
                    "memory_budget": rows and pool_of(rows, args, learns, backend=backend),
                }
                got = run(args, learns, **options)
                for name in ("logprobs", "entropy", "ratio", "coef"):
                    assert_bits(
                        getattr(got.out.tokens, name), getattr(want.out.tokens, name), f"{engine} {rows} {name}"
                    )
                assert_identical(run(args, learns, **options), got, engine)


def test_a_weight_of_no_gradient_is_not_saved():
    """What the one-pass engine keeps for the backward are gradients, not inputs."""
    args = small(dtype=torch.float32)
    leaves, saved = leaves_of(args, "one-pass", ("hidden",)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = call(args, leaves, "one-pass", "torch")
    own = [t for t in saved if t.dim() == 2 and t.shape[1] == 9]
    assert [t.shape for t in own] == [leaves["hidden"].shape]
    loss.backward()


def test_non_contiguous_inputs():
    args = small()
    want = reference(args).grads
    for engine in ("one-pass", "frozen"):
        base = {
            "hidden": torch.stack([args["hidden"], normal(70, 9)], 1).requires_grad_(),
            "weight": args["weight"].t().contiguous().requires_grad_(engine == "one-pass"),
        }
        given = {"hidden": base["hidden"][:, 0], "weight": base["weight"].t()}
        bk.linear_policy_loss(**(args | given), engine=engine, memory_budget=pool_of(32, args)).loss.backward()
        close(base["hidden"].grad[:, 0], want["hidden"])
        assert not base["hidden"].grad[:, 1].any()
        if engine == "one-pass":
            close(base["weight"].grad.t(), want["weight"])
