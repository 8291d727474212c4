"""`linear_logprobs`: values and gradients against fp64 autograd on materialised logits."""

import itertools

import pytest
import torch
from helpers import BACKENDS, FUSED, Problem, close, errors, integers, normal, weighted

SHAPES = [  # N, D, V: empty, odd, and across slices of the vocabulary
    (0, 7, 13),
    (1, 1, 1),
    (3, 65, 129),
    (17, 65, 1000),
    (3, 1, 4096 + 5),
    (17, 9, 8192 + 1),
    (1, 7, 8192),
    (70_000, 1, 3),
    (5, 4100, 300),  # a head so wide that slices are narrower
]
OPTIONS = {
    "bias": lambda layout: {},
    "temperature": lambda layout: {"temperature": 0.7},
    "temperature_token": lambda layout: {"temperature": normal(*layout, seed=20).abs() + 0.4},
    "temperature_sequence": lambda layout: {"temperature": normal(layout[0], seed=21).abs() + 0.4},
    "temperature_column": lambda layout: {"temperature": normal(layout[0], 1, seed=22).abs() + 0.4},
    "scale": lambda layout: {"logit_scale": -1.7},
    "softcap": lambda layout: {"softcap": 2.5},
    "vocab_size": lambda layout: {"vocab_size": 11},
    "mask": lambda layout: {"mask": integers(3, *layout, seed=23) > 0},
    "mask_float": lambda layout: {"mask": (integers(3, *layout, seed=24) > 0).double()},
    "ignore_index": lambda layout: {"ignore_index": 0},
    "topk": lambda layout: {"k": 3},
}
COMBINATIONS = [
    ("temperature", "scale", "softcap"),
    ("temperature_token", "scale", "softcap", "vocab_size", "mask", "topk", "bias"),
    ("temperature_sequence", "bias", "softcap", "topk"),
    ("temperature_column", "mask_float", "vocab_size", "ignore_index"),
    ("scale", "bias", "topk", "mask"),
    ("softcap", "vocab_size", "temperature"),
]


def compare(problem: Problem, backend: str, entropy: bool = True, **tolerance) -> None:
    got, want = problem.requires_grad(), problem.requires_grad()
    out, exact = got.run(backend, entropy), want.oracle()
    if not entropy:
        assert out.entropy is None
        exact = exact._replace(entropy=None)
    for name, a, b in zip(out._fields, out, exact, strict=True):
        if b is None:
            assert a is None
        else:
            close(a, b, name, **tolerance)
    weighted(out).backward()
    weighted(exact).backward()
    for name, a, b in zip(("hidden", "weight", "bias"), got.grads(), want.grads(), strict=True):
        if b is None:
            assert a is None
        else:
            close(a, b, f"gradient of {name}", **tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n", "d", "v"), SHAPES)
def test_shapes(n, d, v, backend):
    compare(Problem.random(n, d, v, seed=n + d + v), backend, rtol=1e-8, atol=1e-9 if n < 1000 else 1e-8)


@pytest.mark.parametrize("entropy", [False, True], ids=["logprobs", "entropy"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "names", [(), *((n,) for n in OPTIONS), *COMBINATIONS], ids=lambda names: "+".join(names) or "plain"
)
def test_options(names, backend, entropy):
    layout = (3, 4)
    options = {k: v for name in names for k, v in OPTIONS[name](layout).items()}
    compare(Problem.random(d=7, v=13, layout=layout, bias="bias" in names, **options), backend, entropy)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", [(), (6,), (2, 3), (2, 0), (2, 2, 2)], ids=str)
def test_leading_shapes(layout, backend):
    compare(Problem.random(layout=layout, k=2), backend)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("columns", [7, 64, 8192])
def test_options_across_slices(columns, backend, monkeypatch):
    monkeypatch.setattr("bapo_kernels.head.chunked.MAX_COLUMNS", columns)
    options = {"temperature": normal(9, seed=1).abs() + 0.4, "softcap": 3.0, "logit_scale": 1.3, "vocab_size": 120}
    compare(Problem.random(9, 5, 129, k=3, mask=integers(3, 9) > 0, **options), backend)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("learns", list(itertools.product([False, True], repeat=3)), ids=str)
def test_frozen_inputs_get_no_gradient(learns, backend):
    problem = Problem.random(5, 7, 4100)
    got, want = problem.requires_grad(*learns), problem.requires_grad()
    out = got.run(backend)
    assert out.logprobs.requires_grad == any(learns)
    assert out.entropy.requires_grad == any(learns)
    if not any(learns):
        return
    weighted(out).backward()
    weighted(want.oracle()).backward()
    for learned, a, b in zip(learns, got.grads(), want.grads(), strict=True):
        if learned:
            close(a, b)
        else:
            assert a is None


@pytest.mark.parametrize("entropy", [False, True], ids=["logprobs", "entropy"])
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
@pytest.mark.parametrize("logits", [1.0, 8.0])
def test_fp32_is_as_exact_as_plain_pytorch(logits, seed, backend, entropy):
    """Largest and rms error at most twice those of plain fp32 PyTorch, against fp64 on the same numbers."""
    problem = Problem.random(
        48, 96, 5000, seed=10 * seed, dtype=torch.float32, logits=logits, softcap=30.0 if seed == 3 else None
    )
    runs = {}
    for kind in ("exact", "plain", "ours"):
        p = problem.to(torch.float64 if kind == "exact" else torch.float32).requires_grad()
        out = p.run(backend, entropy) if kind == "ours" else p.oracle()
        out = out if entropy else out._replace(entropy=None)
        weighted(out).backward()
        runs[kind] = [t for t in out if t is not None] + list(p.grads())
    for i, (ours, plain, exact) in enumerate(zip(runs["ours"], runs["plain"], runs["exact"], strict=True)):
        assert ours.dtype == torch.float32
        for e, bound in zip(errors(ours, exact), errors(plain, exact), strict=True):
            assert e <= 2 * bound, f"result {i}: {e:.3g}, plain PyTorch {bound:.3g}"
