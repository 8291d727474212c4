"""A weight given as tensors side by side is their concatenation, in every function, and each has a gradient of its own."""

import pytest
import torch
from engine_batches import batch, narrow_slices, pool_of, to  # noqa: F401
from helpers import BACKENDS, FUSED, Problem, assert_bits, close, normal, weighted
from torch import Tensor

import bapo_kernels as bk

WIDTHS = (40, 1, 24)  # of D = 65
FLAGS = [(True, True, True), (False, True, False), (True, False, True), (False, False, False)]
ENGINES = ("recompute", "one-pass", "frozen", "auto")


def split(weight: Tensor, flags=(True, True, True)) -> tuple[Tensor, ...]:
    parts = weight.split(WIDTHS, 1)
    return tuple(p.clone().requires_grad_(f) for p, f in zip(parts, flags, strict=True))


def served(engine: str, backend: str, flags) -> bool:
    if backend == "reference":
        return engine == "auto"
    return engine != "frozen" or not any(flags)


CALLS = [(f, e, b) for f in FLAGS for e in ENGINES for b in BACKENDS if served(e, b, f)]


@pytest.mark.parametrize(
    ("flags", "engine", "backend"), CALLS, ids=[f"{''.join('ft'[x] for x in f)}-{e}-{b}" for f, e, b in CALLS]
)
def test_policy_loss(flags, engine, backend, narrow_slices):  # noqa: F811
    args = batch("bapo", spread=0.8, return_tokens=True, entropy_coef=0.02, vocab_size=990)
    trained = any(flags)

    def call(weight, **options):
        leaves = {
            "hidden": args["hidden"].clone().requires_grad_(),
            "bias": args["bias"].clone().requires_grad_(trained),
        }
        out = bk.linear_policy_loss(**(args | leaves | {"weight": weight} | options))
        out.loss.backward()
        return out, leaves["hidden"].grad, leaves["bias"].grad

    whole = args["weight"].clone().requires_grad_()
    want = call(whole, backend="reference")
    columns = whole.grad.split(WIDTHS, 1)
    for rows in (16, 48, None):
        parts = split(args["weight"], flags)
        budget = rows and pool_of(
            rows, args | {"weight": tuple(p.detach() for p in parts)}, (True, trained, trained), backend=backend
        )
        got = call(parts, engine=engine, backend=backend, memory_budget=budget)
        close(got[0].loss, want[0].loss, "loss")
        for a, b in zip(got[0].tokens, want[0].tokens, strict=True):
            close(a, b)
        close(got[1], want[1], "hidden")
        if trained:
            close(got[2], want[2], "bias")
        for part, f, g in zip(parts, flags, columns, strict=True):
            assert (part.grad is not None) == f
            if f:
                assert part.grad.shape == part.shape
                close(part.grad, g, "weight")


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("dtypes", [("bf16", "fp32", "fp32"), ("fp32", "bf16", "fp16"), ("bf16", "bf16", "bf16")])
def test_mixed_dtypes(dtypes, backend):
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    args = to(batch("dapo", v=300, aggregation="token-sum"), torch.float32)
    parts = tuple(p.to(kinds[k]) for p, k in zip(args["weight"].split(WIDTHS, 1), dtypes, strict=True))
    whole = torch.cat([p.double() for p in parts], 1).requires_grad_()
    exact = to(args, torch.float64) | {"weight": whole, "hidden": args["hidden"].double().requires_grad_()}
    bk.reference.linear_policy_loss(**exact).loss.backward()
    for engine in ("recompute", "one-pass", "auto"):
        leaves = {
            "weight": tuple(p.clone().requires_grad_() for p in parts),
            "hidden": args["hidden"].clone().requires_grad_(),
        }
        out = bk.linear_policy_loss(
            **(args | leaves),
            engine=engine,
            backend=backend,
            memory_budget=pool_of(32, args | {"weight": parts}, backend=backend),
        )
        out.loss.backward()
        assert out.loss.dtype == torch.float32
        for part, g in zip(leaves["weight"], whole.grad.split(WIDTHS, 1), strict=True):
            assert part.grad.dtype == part.dtype
            unit = torch.finfo(part.dtype).eps / 2
            slack = 3e-6 * float(g.abs().max())
            assert bool(((part.grad.double() - g).abs() <= unit * g.abs() * 1.0001 + slack).all()), engine
        error = (leaves["hidden"].grad.double() - exact["hidden"].grad).abs().max()
        assert error <= 3e-6 * exact["hidden"].grad.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frozen", [False, True])
def test_linear_logprobs_and_its_module(frozen, backend):
    p = Problem.random(30, 65, 300, softcap=5.0, k=0 if frozen else 2)
    want = p.requires_grad(True, not frozen, False)
    weighted(want.run("reference")).backward()
    module = bk.LinearLogprobs(return_entropy=True, backend=backend, bias=p.bias, **p.options)
    for function in (None, module):
        got = p.requires_grad(True, False, False)
        got.weight = split(p.weight, (not frozen,) * 3)
        out = got.run(backend) if function is None else module(got.hidden, got.weight, got.targets)
        weighted(out).backward()
        close(got.hidden.grad, want.hidden.grad)
        if not frozen:
            close(torch.cat([w.grad for w in got.weight], 1), want.weight.grad)
    with torch.no_grad():
        scored = module(p.hidden, list(p.weight.split(WIDTHS, 1)), p.targets)
    close(scored.logprobs, out.logprobs)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_linear_kl(backend):
    n, v = 20, 120
    hidden, weight, bias = normal(n, 65), normal(v, 65, seed=1) * 0.3, normal(v, seed=2)
    other_hidden, other = normal(n, 12, seed=3), normal(v, 12, seed=4) * 0.5

    def call(weight, other, backend):
        h, b = hidden.clone().requires_grad_(), bias.clone().requires_grad_()
        kl = bk.linear_kl(h, weight, other_hidden, other, bias=b, backend=backend, mask=torch.arange(n) != 3)
        (kl * normal(n, seed=5)).sum().backward()
        return kl, h.grad, b.grad

    whole = weight.clone().requires_grad_()
    want = call(whole, other, "reference")
    parts = split(weight, (True, False, True))
    got = call(parts, tuple(other.split([5, 7], 1)), backend)
    for a, b in zip(got, want, strict=True):
        close(a, b)
    for part, f, g in zip(parts, (True, False, True), whole.grad.split(WIDTHS, 1), strict=True):
        assert (part.grad is not None) == f
        if f:
            close(part.grad, g)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("engine", ["recompute", "one-pass", "auto"])
def test_lora_on_the_head(engine, backend):
    """The base is frozen, A and B learn; against the merged weight in plain PyTorch."""
    d, v, r, scaling = 24, 300, 4, 1.7
    args = batch("grpo", n=96, d=d, v=v, bias=None)
    results = []
    for way in ("merged", "parts"):
        h = args["hidden"].clone().requires_grad_()
        lora_a = normal(r, d, seed=21).mul(0.3).requires_grad_()
        lora_b = normal(v, r, seed=22).mul(0.3).requires_grad_()
        base = args["weight"].clone().requires_grad_(way == "merged")
        if way == "merged":
            logits = h @ (base.detach() + scaling * lora_b @ lora_a).t()
            logprobs = logits.log_softmax(-1).gather(1, args["targets"][:, None]).squeeze(1)
            rest = {k: t for k, t in args.items() if k not in ("hidden", "weight", "targets", "bias")}
            out = bk.policy_loss(logprobs, **rest)
        else:
            given = {"hidden": torch.cat([h, scaling * h @ lora_a.t()], -1), "weight": (base.detach(), lora_b)}
            out = bk.linear_policy_loss(
                **(args | given),
                engine=engine,
                backend=backend,
                memory_budget=pool_of(32, args | given, backend=backend),
            )
        out.loss.backward()
        assert base.grad is None
        results.append([out.loss.detach(), h.grad, lora_a.grad, lora_b.grad])
    for name, a, b in zip(("loss", "hidden", "A", "B"), *results, strict=True):
        close(b, a, name)
    assert results[0][2].abs().sum() > 0


def test_one_part_is_the_tensor_itself():
    p = Problem.random(20, 65, 80, dtype=torch.float32)
    for form in ((p.weight,), [p.weight]):
        p.weight, w = form, p.weight
        got = p.run("torch").logprobs
        p.weight = w
        assert_bits(got, p.run("torch").logprobs)


@pytest.mark.parametrize(
    ("weight", "names"),
    [
        ((), ["weight"]),
        ((torch.zeros(9, 3), torch.zeros(8, 2)), [r"weight\[1\]", r"\(9, D\)", r"\(8, 2\)"]),
        ((torch.zeros(9, 3), torch.zeros(9, 3)), ["weight", r"\(9, 3\) and \(9, 3\)", "5"]),
        ((torch.zeros(9, 3), torch.zeros(2)), [r"weight\[1\]", r"\(2,\)"]),
        ((torch.zeros(9, 3), torch.zeros(9, 2, 1)), [r"weight\[1\]", r"\(9, 2, 1\)"]),
        ((torch.zeros(9, 3), torch.zeros(9, 2).long()), [r"weight\[1\]"]),
        ((torch.zeros(9, 3), None), [r"weight\[1\]"]),
        ((torch.zeros(9, 3), torch.zeros(9, 2, device="meta")), [r"weight\[1\]"]),
        ((torch.zeros(0, 3), torch.zeros(0, 2)), [r"weight\[0\]", "shard"]),
    ],
    ids=range(9),
)
@pytest.mark.parametrize("function", ["logprobs", "policy_loss", "kl"])
def test_bad_parts(function, weight, names):
    hidden, targets = torch.zeros(4, 5), torch.zeros(4).long()
    good = torch.zeros(len(weight[0]) if weight else 9, 5)

    def call():
        if function == "logprobs":
            bk.linear_logprobs(hidden, weight, targets)
        elif function == "kl":
            bk.linear_kl(hidden, weight, hidden, good)
        else:
            bk.linear_policy_loss(hidden, weight, targets, torch.zeros(4), old_logprobs=torch.zeros(4))

    with pytest.raises(ValueError) as error:
        call()
    for name in names:
        error.match(name)
    if function == "kl" and len(weight) == 2 and weight[0].numel():
        with pytest.raises(ValueError, match="rollout_weight"):
            bk.linear_kl(hidden, good, hidden, weight)


def test_padding_rows_and_a_wrong_bias():
    weight = (torch.zeros(9, 3), torch.zeros(9, 2))
    with pytest.raises(ValueError, match=r"bias must have shape \(9,\)"):
        bk.linear_logprobs(torch.zeros(4, 5), weight, torch.zeros(4).long(), bias=torch.zeros(5))
    with pytest.raises(ValueError, match="vocab_size"):
        bk.linear_logprobs(torch.zeros(4, 5), weight, torch.zeros(4).long(), vocab_size=10)
