"""`linear_logprobs`: logits that break careless arithmetic, with values worked out by hand. With `hidden = 0` the bias is the logits."""

import math

import pytest
import torch
from helpers import BACKENDS, FUSED, INF, Problem, close, integers, normal, weighted

import bapo_kernels as bk


def of_logits(logits, targets, backend: str, dtype=torch.float32, **options):
    """Rows that all have these logits, one for each target; bias and hidden learn."""
    bias = torch.as_tensor(logits, dtype=dtype).requires_grad_()
    targets = torch.as_tensor(targets)
    hidden = torch.zeros(len(targets), 3, dtype=dtype, requires_grad=True)
    weight = normal(len(bias), 3, dtype=dtype)
    out = bk.linear_logprobs(hidden, weight, targets, bias=bias, backend=backend, return_entropy=True, **options)
    return out, hidden, bias


def expect(t, values, atol=1e-6):
    close(t, torch.as_tensor(values, dtype=torch.float64).expand(t.shape), rtol=1e-6, atol=atol)


@pytest.mark.parametrize("backend", BACKENDS)
def test_temperature(backend):
    out, _, bias = of_logits([0.0, 1.0, 2.0], [0, 1, 2], backend, temperature=0.7)
    expect(out.logprobs, [-3.117261, -1.688690, -0.260118])
    expect(out.entropy, 0.650573)
    out.logprobs[0].backward()
    expect(bias.grad, [(1 - math.exp(-3.117261)) / 0.7, -math.exp(-1.688690) / 0.7, -math.exp(-0.260118) / 0.7])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [1, 1.0, 2, 1e-3, 1e3])
def test_extreme_temperatures_are_finite(temperature, backend):
    out, _, bias = of_logits([0.0, 1.0, 2.0], [0, 1, 2], backend, temperature=temperature)
    expect(out.logprobs, torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64).div(temperature).log_softmax(0), atol=2e-4)
    (out.logprobs.sum() + out.entropy.sum()).backward()
    assert bool(bias.grad.isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_entropy_gradient(backend):
    out, _, bias = of_logits([0.0, 1.0, 2.0], [1], backend)
    expect(out.entropy, 0.832396)
    out.entropy.sum().backward()
    expect(bias.grad, [0.141817, 0.140770, -0.282587])


@pytest.mark.parametrize("backend", BACKENDS)
def test_softcap_comes_before_temperature(backend):
    out, _, _ = of_logits([60.0, 30.0], [0, 1], backend, softcap=30.0, temperature=0.5)
    expect(out.logprobs, [-5.3095e-6, -12.14601], atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logit_scale_comes_before_softcap(backend):
    out, _, _ = of_logits([6.0, 3.0], [0, 1], backend, softcap=30.0, temperature=0.5, logit_scale=10.0)
    expect(out.logprobs, [-5.3095e-6, -12.14601], atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_softcap_does_not_let_padding_back_in(backend):
    out, _, bias = of_logits([-0.9] * 100 + [INF] * 28, [3], backend, softcap=1.0, vocab_size=100)
    expect(out.logprobs, -4.605170)
    expect(out.entropy, 4.605170)
    weighted(out).backward()
    expect(bias.grad[100:], 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("v", [129, 1000, 4097, 50257])
def test_no_phantom_columns(v, backend):
    out, _, _ = of_logits([-20.0] * v, [0, v - 1], backend)
    expect(out.logprobs, -math.log(v), atol=1e-5)
    expect(out.entropy, math.log(v), atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_phantom_columns_beside_a_peak(backend):
    logits = [-8.0] * 1000
    logits[77] = -5.0
    out, _, bias = of_logits(logits, [77], backend)
    expect(out.logprobs, -3.926661)
    expect(out.entropy, 6.867533)
    out.logprobs.sum().backward()
    expect(bias.grad[77], 1 - math.exp(-3.926661))
    expect(bias.grad[0], -math.exp(-8.0 + 5.0 - 3.926661))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["last 100", "first slice", "all but one", "target's slice neighbours"])
def test_columns_of_minus_infinity(where, backend):
    v = 8300
    logits = torch.zeros(v)
    if where == "last 100":
        logits[-100:] = -INF
    elif where == "first slice":
        logits[:4096] = -INF
    elif where == "all but one":
        logits[:] = -INF
        logits[5000] = 0.0
    else:
        logits[4096:8192] = -INF
        logits[5000] = 0.0
    alive = int((logits == 0).sum())
    out, hidden, bias = of_logits(logits, [5000, 5000], backend)
    expect(out.logprobs, -math.log(alive), atol=2e-6)
    expect(out.entropy, math.log(alive), atol=2e-6)
    assert bool((out.entropy >= 0).all())
    weighted(out).backward()
    assert bool(hidden.grad.isfinite().all())
    assert bool(bias.grad.isfinite().all())
    assert bool((bias.grad[logits == -INF] == 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_small_row_with_minus_infinity(backend):
    out, hidden, bias = of_logits([0.0, 0.0, -INF], [0, 1, 2], backend, topk_ids=torch.tensor([[0], [2], [-1]]))
    expect(out.logprobs[:2], -0.693147)
    assert out.logprobs[2] == -INF  # the target itself is excluded
    expect(out.entropy, 0.693147)
    expect(out.topk_logprobs[0], -0.693147)
    assert out.topk_logprobs[1] == -INF
    assert out.topk_logprobs[2] == 0
    (out.logprobs[:2].sum() + out.entropy.sum()).backward()
    assert bool(hidden.grad.isfinite().all())
    assert bool(bias.grad.isfinite().all())
    assert bias.grad[2] == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offset", [1e4, 1e6, -1e6])
def test_a_common_offset_changes_nothing(offset, backend):
    out, _, bias = of_logits([offset, offset], [0, 1], backend)
    expect(out.logprobs, -0.693147)
    expect(out.entropy, 0.693147)
    out.entropy.sum().backward()
    expect(bias.grad, 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_entropy_under_an_offset(backend):
    out, _, _ = of_logits([1e4, 1e4 - 1, 1e4 - 2], [0], backend)
    expect(out.entropy, 0.832396)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("peak", [50.0, 200.0, 60000.0])
def test_one_peak(peak, backend):
    out, _, bias = of_logits([peak] + [0.0] * 999, [0, 1], backend)
    expect(out.logprobs, [0.0, -peak])
    assert bool((out.entropy >= 0).all())
    expect(out.entropy, 0.0)
    weighted(out).backward()
    assert bool(bias.grad.isfinite().all())


@pytest.mark.parametrize("backend", FUSED)
def test_confident_tokens_keep_their_gradient(backend):
    """p_y - 1 of a token with p_y = 1 - 1e-5 has a relative error of fp32, not of a rounded probability."""
    out, _, bias = of_logits([0.0, -math.log(1e5 - 1)], [0], backend)
    out.logprobs.sum().backward()
    close(bias.grad, torch.tensor([1e-5, -1e-5]), rtol=2e-2, atol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_backward_see_the_same_logits(backend):
    """All rows of the weight are equal, so the hidden gradient must vanish; logits of 160.3125 would round to 160 in bf16."""
    row = torch.full((64,), 2.5, dtype=torch.bfloat16)
    row[0] = 2.8125
    hidden = torch.ones(3, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = row.expand(1000, 64).contiguous().requires_grad_()
    out = bk.linear_logprobs(hidden, weight, torch.tensor([0, 1, 2]), return_entropy=True, backend=backend)
    expect(out.logprobs, -math.log(1000), atol=1e-5)
    expect(out.entropy, math.log(1000), atol=1e-5)
    (out.logprobs + out.entropy).sum().backward()
    assert float(hidden.grad.abs().max()) < 1e-4


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("peak", [5.0, 80.0, 640.0])
def test_gradients_do_not_lose_precision_with_large_logits(peak, backend):
    problem = Problem.random(8, 64, 500, dtype=torch.bfloat16, logits=1.0)
    problem.hidden = problem.hidden * peak
    got, want = problem.requires_grad(), problem.to(torch.float64).requires_grad()
    weighted(got.run(backend)).backward()
    weighted(want.oracle()).backward()
    for a, b in zip(got.grads(), want.grads(), strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 4e-3


@pytest.mark.parametrize("backend", FUSED)
def test_fp16_logits_beyond_its_range(backend):
    hidden = torch.full((2, 4), 200.0, dtype=torch.float16, requires_grad=True)
    weight = torch.tensor([[150.0] * 4, [149.0] * 4, [-150.0] * 4], dtype=torch.float16, requires_grad=True)
    out = bk.linear_logprobs(hidden, weight, torch.tensor([0, 1]), return_entropy=True, backend=backend)
    expect(out.logprobs, [0.0, -800.0])
    weighted(out).backward()
    assert bool(hidden.grad.isfinite().all())
    assert bool(weight.grad.isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_of_any_size(backend):
    p = Problem.random(9, 5, 700, dtype=torch.float32)
    p.bias = 5 * p.bias
    q = p.requires_grad()
    out = q.run(backend)
    assert bool((out.logprobs <= 0).all())
    out.logprobs.sum().backward()
    exact = p.to(torch.float64).requires_grad()
    exact.oracle().logprobs.sum().backward()
    close(q.bias.grad, exact.bias.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", FUSED)
def test_logit_scale_equals_scaled_hidden_states(backend):
    p = Problem.random(9, 5, 70, bias=False)
    scaled = Problem(p.hidden * 0.0625, p.weight, None, p.targets)
    close(p.run(backend, logit_scale=0.0625).logprobs, scaled.run(backend).logprobs)


@pytest.mark.parametrize("backend", FUSED)
def test_a_confident_token_under_a_softcap(backend):
    """1 - p and the slope are both small: the parts of the target's column have to cancel with the same slope."""
    n, v = 400, 300
    targets = integers(v, n)
    logits = normal(n, v, dtype=torch.float32)
    logits[torch.arange(n), targets] = 40 + 30 * normal(n, seed=1, dtype=torch.float32).abs()

    def grad(dtype, name):
        h = logits.to(dtype, copy=True).requires_grad_()
        w = torch.eye(v, dtype=dtype)
        bk.linear_logprobs(h, w, targets, softcap=20.0, temperature=1.5, backend=name).logprobs.sum().backward()
        return h.grad.double().gather(1, targets[:, None])

    exact = grad(torch.float64, "reference")
    ours, theirs = ((grad(torch.float32, b) - exact).square().mean().sqrt() for b in (backend, "reference"))
    assert ours <= 2 * theirs, f"{ours:.1e}, PyTorch {theirs:.1e}, of values like {exact.abs().mean():.1e}"
