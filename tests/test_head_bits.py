"""`linear_logprobs`: what must not change a single bit of a row's result, and what a masked row must not do."""

import pytest
import torch
from helpers import BACKENDS, FUSED, INF, NAN, Problem, assert_bits, integers, normal, weighted

import bapo_kernels as bk

SIZES = [(33, 129), (96, 5000), (384, 4096 + 1)]  # D, V: one slice, two, and a last one of a single column
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
OPTIONS = {"plain": {}, "all": {"softcap": 4.0, "temperature": 0.7, "logit_scale": 1.3, "k": 2}}


def run_and_grads(problem: Problem, backend: str, entropy: bool = True, **options):
    p = problem.requires_grad()
    out = p.run(backend, entropy, **options)
    weighted(out).backward()
    return out, p.grads()


def rows_of(problem: Problem, rows) -> Problem:
    options = {k: v[rows] if k in ("topk_ids", "mask") else v for k, v in problem.options.items()}
    return Problem(problem.hidden[rows], problem.weight, problem.bias, problem.targets[rows], options)


@pytest.fixture(params=SIZES, ids=lambda s: f"D{s[0]}-V{s[1]}")
def size(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return DTYPES[request.param]


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("options", OPTIONS)
def test_scoring_and_training_give_the_same_bits(size, dtype, options, backend):
    problem = Problem.random(50, *size, dtype=dtype, **OPTIONS[options])
    trained, _ = run_and_grads(problem, backend)
    with torch.no_grad():
        scored = problem.run(backend, entropy=False)
    with torch.inference_mode():
        inferred = problem.run(backend, entropy=True)
    for other in (scored, inferred):
        assert_bits(other.logprobs, trained.logprobs, "logprobs")
        assert_bits(other.topk_logprobs, trained.topk_logprobs, "topk_logprobs")
    assert_bits(inferred.entropy, trained.entropy, "entropy")


# MKL's fp64 GEMM sums the last columns of an odd width in an order that depends on a row's place: fp64 is for checks, and exempt.
in_fp32 = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@in_fp32
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("options", OPTIONS)
def test_rows_do_not_depend_on_their_number(size, dtype, options, backend):
    problem = Problem.random(100, *size, dtype=dtype, **OPTIONS[options])
    problem.targets[25:] = size[1] - 1
    whole = problem.run(backend)
    for rows in (
        slice(0, 1),
        slice(7, 10),
        slice(20, 35),
        slice(20, 36),
        slice(20, 37),
        slice(3, 67),
        slice(1, 100, 2),
    ):
        part = rows_of(problem, rows).run(backend)
        for name, a, b in zip(part._fields, part, whole, strict=True):
            assert_bits(a, None if b is None else b[rows], f"{name} of rows {rows}")


@in_fp32
@pytest.mark.parametrize("backend", FUSED)
def test_rows_do_not_depend_on_the_mask(size, dtype, backend):
    problem = Problem.random(100, *size, dtype=dtype)
    whole = problem.run(backend)
    for seed, few in ((1, 2), (2, 10), (3, 60)):
        mask = integers(few, 100, seed=seed) == 0
        part = problem.run(backend, mask=mask)
        for a, b in zip(part[:2], whole[:2], strict=True):
            assert_bits(a, torch.where(mask, b, 0.0))


@in_fp32
@pytest.mark.parametrize("backend", FUSED)
def test_rows_do_not_depend_on_the_memory_budget(size, dtype, backend):
    problem = Problem.random(100, *size, dtype=dtype)
    whole, whole_grads = run_and_grads(problem, backend)
    for budget in (1, 40 * size[1] * 8, 2**40):
        part, grads = run_and_grads(problem, backend, memory_budget=budget)
        for a, b in zip(part[:2], whole[:2], strict=True):
            assert_bits(a, b, f"budget {budget}")
        for a, b in zip(grads, whole_grads, strict=True):
            slack = {torch.bfloat16: 1e-2, torch.float32: 1e-5}[dtype]
            torch.testing.assert_close(a, b, rtol=slack, atol=slack * float(b.abs().max()))


def test_the_memory_budget_can_come_from_the_environment(monkeypatch):
    problem = Problem.random(100, 8, 300, dtype=torch.float32)
    seen = []
    original = bk.head.chunked.row_blocks
    monkeypatch.setattr("bapo_kernels.head.chunked.row_blocks", lambda *a: seen.append(original(*a)) or seen[-1])
    want = problem.run("torch")
    monkeypatch.setenv("BAPO_KERNELS_MEMORY_BUDGET", "1000")
    assert_bits(problem.run("torch").logprobs, want.logprobs)
    assert len(seen[0]) == 1
    assert len(seen[1]) > 1
    monkeypatch.setenv("BAPO_KERNELS_MEMORY_BUDGET", "much")
    with pytest.raises(ValueError, match="BAPO_KERNELS_MEMORY_BUDGET"):
        problem.run("torch")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_call_gives_the_same_bits(size, dtype, backend):
    problem = Problem.random(40, *size, dtype=dtype, k=2)
    first, first_grads = run_and_grads(problem, backend)
    for _ in range(2):
        again, grads = run_and_grads(problem, backend)
        for a, b in zip((*again, *grads), (*first, *first_grads), strict=True):
            assert_bits(a, b)


GARBAGE = {
    "hidden nan": {"hidden": NAN},
    "hidden inf": {"hidden": INF},
    "hidden large": {"hidden": 3e38},
    "target -100": {"targets": -100},
    "target -1": {"targets": -1},
    "target V": {"targets": 13},
    "target 2**31": {"targets": 2**31},
    "topk 2**31": {"topk_ids": 2**31},
    "topk -7": {"topk_ids": -7},
    "temperature nan": {"temperature": NAN},
    "temperature 0": {"temperature": 0.0},
    "temperature -1": {"temperature": -1.0},
    "all": {"hidden": NAN, "targets": -(2**40), "topk_ids": -5, "temperature": NAN},
}


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_in_masked_rows_changes_nothing(name, backend, mask_dtype):
    clean = Problem.random(20, 5, 13, k=2, dtype=torch.float32)
    clean.options["temperature"] = normal(20, seed=9, dtype=torch.float32).abs() + 0.5
    masked = integers(3, 20, seed=10) == 0
    clean.options["mask"] = (~masked).to(mask_dtype)
    dirty = Problem(clean.hidden.clone(), clean.weight, clean.bias, clean.targets.clone(), dict(clean.options))
    for key, value in GARBAGE[name].items():
        if key in ("hidden", "targets"):
            getattr(dirty, key)[masked] = value
        else:
            dirty.options[key] = dirty.options[key].clone()
            dirty.options[key][masked] = value
    want, want_grads = run_and_grads(clean, backend)
    got, grads = run_and_grads(dirty, backend)
    for a, b in zip((*got, *grads), (*want, *want_grads), strict=True):
        assert_bits(a, b)
    assert bool((got.logprobs[masked] == 0).all())
    assert bool((got.topk_logprobs[masked] == 0).all())
    assert bool((grads[0][masked] == 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_masked_row_is_as_if_absent(backend):
    """Values and hidden gradients equal those of the batch without it; upstream NaN on its outputs goes nowhere."""
    problem = Problem.random(20, 5, 13)
    keep = integers(3, 20, seed=10) > 0
    masked = problem.requires_grad()
    masked_out = masked.run(backend, mask=keep)
    absent = rows_of(problem, keep).requires_grad()
    absent_out = absent.run(backend)
    upstream = normal(20, seed=3)
    masked_out.logprobs.backward(torch.where(keep, upstream, NAN))
    absent_out.logprobs.backward(upstream[keep])
    assert_bits(masked_out.logprobs[keep], absent_out.logprobs)
    assert_bits(masked.hidden.grad[keep], absent.hidden.grad)
    assert bool((masked.hidden.grad[~keep] == 0).all())
    assert_bits(masked.weight.grad, absent.weight.grad)
    assert_bits(masked.bias.grad, absent.bias.grad)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_nan_in_an_active_row_shows_in_that_row_only(bad, backend):
    clean = Problem.random(20, 5, 4100, k=2)
    dirty = Problem(clean.hidden.clone(), clean.weight, clean.bias, clean.targets, clean.options)
    dirty.hidden[3, 2] = bad
    want, got, others = clean.run(backend), dirty.requires_grad(), torch.arange(20) != 3
    out = got.run(backend)
    for a, b in zip(out, want, strict=True):
        assert_bits(a[others], b[others])
    assert out.logprobs[3].isnan()
    assert out.entropy[3].isnan()
    weighted(out).backward()
    assert bool(got.hidden.grad[others].isfinite().all())
    assert bool(got.hidden.grad[3].isnan().any())
    assert bool(got.weight.grad.isnan().any())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["mask", "targets", "empty"])
def test_nothing_to_do_gives_zeros_with_a_graph(how, backend):
    n = 0 if how == "empty" else 6
    p = Problem.random(n, 5, 13, k=2).requires_grad()
    if how == "mask":
        p.options["mask"] = torch.zeros(n, dtype=torch.bool)
    elif how == "targets":
        p.targets = torch.full((n,), -100)
    out = p.run(backend)
    assert out.logprobs.shape == (n,)
    assert out.topk_logprobs.shape == (n, 2)
    assert all(bool((t == 0).all()) for t in out)
    weighted(out).backward()
    for leaf in p.leaves:
        assert_bits(leaf.grad, torch.zeros_like(leaf))


def test_uninitialised_memory_reads_as_nan():
    """The fixture that the whole suite rests on is at work."""
    for t in (torch.empty(3, 1), torch.zeros(2).new_empty(4), torch.empty_like(torch.zeros(3))):
        assert bool(t.isnan().all())
