"""`linear_logprobs`: upstream gradients of every kind, dtypes, autocast, gradcheck."""

import itertools

import pytest
import torch
from helpers import BACKENDS, FUSED, Problem, assert_bits, close, errors, integers, normal, weighted

import bapo_kernels as bk

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UPSTREAM = {
    "zero_first": lambda out: (out.logprobs * torch.tensor([0.0, 1.0, -2.0, 0.5])).sum(),
    "one_only": lambda out: out.logprobs[2],
    "sum": lambda out: out.logprobs.sum(),  # arrives with stride 0
    "entropy_sum": lambda out: out.entropy.sum(),
    "entropy_zero_first": lambda out: (out.entropy * torch.tensor([0.0, 1.0, -2.0, 0.5])).sum(),
    "topk_sum": lambda out: out.topk_logprobs.sum(),
    "topk_transposed": lambda out: (out.topk_logprobs.t() * normal(3, 4, seed=8)).sum(),
    "mixed": lambda out: (out.logprobs * out.entropy).sum() + (out.topk_logprobs.exp() * out.logprobs[:, None]).mean(),
    "large": lambda out: 1e6 * out.logprobs.mean(),
    "flipped": lambda out: (out.logprobs.flip(0) * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum(),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", UPSTREAM)
def test_upstream_gradients(name, backend):
    problem = Problem.random(4, 7, 4100, k=3)
    got, want = problem.requires_grad(), problem.requires_grad()
    UPSTREAM[name](got.run(backend)).backward()
    UPSTREAM[name](want.oracle()).backward()
    for a, b in zip(got.grads(), want.grads(), strict=True):
        close(a, b, atol=1e-10 * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("backend", FUSED)
def test_non_scalar_backward(backend):
    problem = Problem.random(4, 7, 13)
    got, want = problem.requires_grad(), problem.requires_grad()
    g = torch.tensor([0.0, 1.0, -2.0, 0.5], dtype=torch.float64)
    got.run(backend).logprobs.backward(g)
    want.oracle().logprobs.backward(g)
    for a, b in zip(got.grads(), want.grads(), strict=True):
        close(a, b)


@pytest.mark.parametrize("backend", FUSED)
def test_backward_again_with_retained_graph(backend):
    p = Problem.random(5, 7, 13).requires_grad()
    scalar = weighted(p.run(backend))
    first = torch.autograd.grad(scalar, p.leaves, retain_graph=True)
    for a, b in zip(torch.autograd.grad(scalar, p.leaves, retain_graph=True), first, strict=True):
        assert_bits(a, b)
    with pytest.raises(RuntimeError):  # no second derivative: an error, not a wrong number
        torch.autograd.grad(weighted(p.run(backend)), p.leaves, create_graph=True)[0].sum().backward()


@pytest.mark.parametrize("backend", FUSED)
def test_gradients_accumulate(backend):
    problem = Problem.random(6, 7, 13)
    p = problem.requires_grad()
    before = [normal(*t.shape, seed=40) for t in p.leaves]
    for leaf, g in zip(p.leaves, before, strict=True):
        leaf.grad = g.clone()
    weighted(p.run(backend)).backward()
    alone = problem.requires_grad()
    weighted(alone.run(backend)).backward()
    for leaf, g, own in zip(p.leaves, before, alone.grads(), strict=True):
        close(leaf.grad, g + own)


@pytest.mark.parametrize("backend", FUSED)
def test_gradient_of_one_batch_is_the_sum_over_its_parts(backend):
    problem = Problem.random(9, 7, 130)
    whole = problem.requires_grad()
    whole.run(backend).logprobs.sum().backward()
    parts = problem.requires_grad()
    for i in range(0, 9, 4):
        rows = slice(i, i + 4)
        out = bk.linear_logprobs(
            parts.hidden[rows], parts.weight, parts.targets[rows], bias=parts.bias, backend=backend
        )
        out.logprobs.sum().backward()
    for a, b in zip(whole.grads(), parts.grads(), strict=True):
        close(a, b)


def test_weight_made_by_other_operations_passes_its_gradient_on():
    """A LoRA head is `W + B @ A`: a weight that is not a leaf."""
    problem = Problem.random(5, 7, 13, bias=False)
    a, b = normal(2, 7, seed=50).requires_grad_(), normal(13, 2, seed=51).requires_grad_()
    a2, b2 = (t.detach().clone().requires_grad_() for t in (a, b))
    out = bk.linear_logprobs(problem.hidden, problem.weight + b @ a, problem.targets)
    (out.logprobs * normal(5, seed=52)).sum().backward()
    (
        Problem(problem.hidden, problem.weight + b2 @ a2, None, problem.targets).oracle().logprobs * normal(5, seed=52)
    ).sum().backward()
    close(a.grad, a2.grad)
    close(b.grad, b2.grad)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATS, repeat=3)), ids="-".join)
def test_dtypes(dtypes, backend, autocast):
    """Outputs as exact as fp32 whatever the inputs; gradients in the dtype of what they belong to, rounded once."""
    problem = Problem.random(21, 33, 300, k=2)
    for name, dtype in zip(("hidden", "weight", "bias"), dtypes, strict=True):
        setattr(problem, name, getattr(problem, name).to(FLOATS[dtype]))
    p = problem.requires_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = p.run(backend)
        scalar = weighted(out)
    scalar.backward()
    runs = {}
    for kind, dtype in (("exact", torch.float64), ("plain", torch.float32)):
        q = problem.to(dtype).requires_grad()
        runs[kind] = q.oracle(), q
        weighted(runs[kind][0]).backward()
    for ours, plain, exact in zip(out, runs["plain"][0], runs["exact"][0], strict=True):
        assert ours.dtype == torch.float32
        bound = max(4 * errors(plain, exact)[0], 1e-6)
        assert errors(ours, exact)[0] <= bound
    for ours, plain, exact in zip(p.leaves, runs["plain"][1].grads(), runs["exact"][1].grads(), strict=True):
        assert ours.grad.dtype == ours.dtype
        rounding = torch.finfo(ours.dtype).eps / 2 * exact.abs() if ours.dtype != torch.float32 else 0.0
        tiny = 2**-24 if ours.dtype == torch.float16 else 0.0
        allowed = 4 * errors(plain, exact)[0] + 1.01 * rounding + tiny
        assert bool(((ours.grad.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("which", ["hidden", "weight", "bias"])
def test_one_fp64_input_makes_everything_fp64(which, backend):
    problem = Problem.random(5, 7, 13, dtype=torch.float32)
    setattr(problem, which, getattr(problem, which).double())
    got, want = problem.requires_grad(), problem.to(torch.float64).requires_grad()
    out = got.run(backend)
    weighted(out).backward()
    exact = want.oracle()
    weighted(exact).backward()
    for a, b in zip(out[:2], exact[:2], strict=True):
        assert a.dtype == torch.float64
        close(a, b, rtol=1e-12, atol=1e-12)
    for leaf, b in zip(got.leaves, want.grads(), strict=True):
        assert leaf.grad.dtype == leaf.dtype
        close(leaf.grad, b, rtol=1e-12 if leaf.dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("backend", FUSED)
def test_weight_gradient_does_not_stall(backend):
    """65,536 equal contributions of 63/64: an accumulator in bf16 would stop at -16,384."""
    n, v = 65536, 64
    hidden = torch.ones(n, 1, dtype=torch.bfloat16)
    weight = torch.zeros(v, 1, dtype=torch.bfloat16, requires_grad=True)
    for budget in (None, 64 * 1024, 4 * 2**20):
        weight.grad = None
        out = bk.linear_logprobs(
            hidden, weight, torch.zeros(n, dtype=torch.int64), backend=backend, memory_budget=budget
        )
        (-out.logprobs.sum()).backward()
        assert weight.grad[0].item() == -64512.0
        assert weight.grad[1].item() == 1024.0


GRADCHECK = {
    "plain": {},
    "everything": {"softcap": 2.0, "logit_scale": -1.3, "vocab_size": 9, "temperature": normal(4, seed=3).abs() + 0.5},
    "mask": {"mask": torch.tensor([1, 0, 1, 1]), "temperature": 0.6},
}


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("name", GRADCHECK)
@pytest.mark.parametrize("output", ["logprobs", "entropy", "topk_logprobs", "all"])
def test_gradcheck(output, name, backend):
    p = Problem.random(4, 3, 11, k=2, **GRADCHECK[name]).requires_grad()

    def function(hidden, weight, bias):
        out = Problem(hidden, weight, bias, p.targets, p.options).run(backend)
        return tuple(out) if output == "all" else getattr(out, output)

    assert torch.autograd.gradcheck(function, p.leaves, fast_mode=False)


def test_constants_are_constants():
    """A temperature that requires grad is a constant, and integer ids of any width do."""
    p = Problem.random(4, 3, 11, k=2)
    temperature = torch.full((4,), 0.7, dtype=torch.float64, requires_grad=True)
    q = p.requires_grad()
    weighted(q.run("torch", temperature=temperature)).backward()
    assert temperature.grad is None
    for dtype in (torch.int32, torch.int16, torch.uint8):
        targets = integers(11, 4, seed=3)
        assert_bits(
            Problem(*p.leaves, targets.to(dtype)).run("torch").logprobs,
            Problem(*p.leaves, targets).run("torch").logprobs,
        )
