"""A head that is not trained: d logprob / d hidden made in the forward serves any upstream gradient, as exactly as the other way."""

import pytest
import torch
from engine_batches import HIDDEN, assert_same, batch, narrow_slices, reference, run  # noqa: F401
from helpers import FUSED, INF, NAN, Problem, assert_bits, close, errors, normal, weighted

import bapo_kernels as bk
from bapo_kernels.head import chunked, frozen

OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "softcap and scale": {"softcap": 3.0, "logit_scale": -1.3, "temperature": 1.4},
    "padded vocabulary": {"vocab_size": 995},
    "no bias": {"bias": False},
}


@pytest.fixture
def forwards(monkeypatch) -> list:
    """Calls of the frozen driver."""
    seen, forward = [], frozen.forward

    def watched(*args):
        seen.append(args)
        return forward(*args)

    monkeypatch.setattr(frozen, "forward", watched)
    return seen


def d_hidden(problem: Problem, backend: str, upstream, entropy=None, **options) -> torch.Tensor:
    """With the upstream gradients of the log-probs and, if given, of the entropy."""
    p = problem.requires_grad(True, False, False)
    out = p.run(backend, entropy is not None, **options)
    (out.logprobs * upstream).sum().backward(retain_graph=entropy is not None)
    if entropy is not None:
        (out.entropy * entropy).sum().backward()
    return p.hidden.grad


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("options", OPTIONS)
def test_any_upstream_gradient(options, backend, forwards, narrow_slices):  # noqa: F811
    p = Problem.random(90, 17, 1003, logits=4.0, **OPTIONS[options])
    p.options["mask"] = normal(90, seed=8) > -1
    upstream = normal(90, seed=9).masked_fill(normal(90, seed=10) > 0.5, 0.0)
    want = d_hidden(p, "reference", upstream)
    for budget in (None, 100_000, 1):
        got = d_hidden(p, backend, upstream, memory_budget=budget)
        close(got, want, f"budget {budget}")
        assert not got[(upstream == 0) | ~p.options["mask"]].any()
    assert len(forwards) >= 1
    given = torch.randn(90, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    close(d_hidden(p, backend, upstream, given), d_hidden(p, "reference", upstream, given), "with entropy")
    close(d_hidden(p, backend, 0.0, given), d_hidden(p, "reference", 0.0, given), "entropy alone")
    close(d_hidden(p, backend, upstream, 0.0), want, "entropy without a gradient")


@pytest.mark.parametrize("backend", FUSED)
def test_expanded_upstream_and_layouts(backend):
    p = Problem.random(d=9, v=70, layout=(3, 8), temperature=torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    for upstream in (torch.tensor(1.0, dtype=torch.float64).expand(3, 8), normal(3, 8).t().contiguous().t()):
        close(d_hidden(p, backend, upstream), d_hidden(p, "reference", upstream))


@pytest.mark.parametrize("backend", FUSED)
def test_bits_of_the_statistics_are_those_of_the_trained_head(backend, forwards, narrow_slices):  # noqa: F811
    for dtype in (torch.float32, torch.bfloat16):
        p = Problem.random(100, 33, 1003, dtype=dtype, softcap=5.0)
        want = p.requires_grad().run(backend)
        for budget in (None, 150_000, 1):
            del forwards[:]
            got = p.requires_grad(True, False, False).run(backend, memory_budget=budget)
            assert len(forwards) == (budget is None or (budget > 1 and dtype == torch.float32))
            assert_bits(got.logprobs.detach(), want.logprobs.detach(), f"{budget}")
            assert_bits(got.entropy.detach(), want.entropy.detach(), f"{budget}")


@pytest.mark.parametrize("backend", FUSED)
def test_rows_do_not_depend_on_the_budget(backend):
    p = Problem.random(100, 32, 768, dtype=torch.float32)
    grads = [d_hidden(p, backend, 1.0, memory_budget=b) for b in (None, 300_000, 250_000)]
    for g in grads[1:]:  # but for the last bits: the BLAS library sums products of few rows in another order
        torch.testing.assert_close(g, grads[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("seed", range(4))
def test_sure_tokens(seed, backend, forwards):
    """1 - p of about 1e-4: the gradient is small, not lost. As exact, row by row, as made from the logits again."""
    d, v, n = 64, 1000, 32
    weight = normal(v, d, seed=seed)
    targets = torch.arange(n) * 31
    direction = weight[targets] / weight[targets].norm(dim=1, keepdim=True).square()
    hidden = direction * 16.0 + 0.05 * normal(
        n, d, seed=seed + 1
    )  # the target's logit is about 16, the others' about N(0, 2)
    p = Problem(hidden, weight, None, targets).to(torch.float32)
    p.hidden, p.weight = p.hidden.clone(), p.weight.clone()
    exact = d_hidden(p.to(torch.float64), "reference", 1.0)
    tail = 1 - p.to(torch.float64).run("reference").logprobs.exp()
    assert 1e-6 < tail.median() < 1e-2
    got = d_hidden(p, backend, 1.0)
    assert len(forwards) == 1
    trained = p.requires_grad()
    trained.run(backend).logprobs.sum().backward()
    plain = d_hidden(p, "reference", 1.0)

    def relative(g):
        return (g.double() - exact).norm(dim=1) / exact.norm(dim=1)

    found, usual, other = relative(got), relative(trained.hidden.grad), relative(plain)
    for measure in (torch.max, torch.median):
        assert measure(found) <= 2 * max(measure(usual), measure(other))


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logits", [2.0, 12.0])
def test_fp32_is_as_exact_as_the_two_pass_way(logits, dtype, backend):
    p = Problem.random(96, 64, 2000, dtype=dtype, logits=logits)
    upstream = normal(96, seed=5)
    exact = d_hidden(p.to(torch.float64), "reference", upstream)
    trained = p.requires_grad()
    (trained.run(backend).logprobs * upstream).sum().backward()
    found, usual = (errors(g, exact) for g in (d_hidden(p, backend, upstream), trained.hidden.grad))
    assert found[0] <= 2 * usual[0] and found[1] <= 2 * usual[1], (found, usual)


@pytest.mark.parametrize("backend", FUSED)
def test_saturated_softcap(backend):
    """Beyond the cap nothing moves: a gradient of 0, of no sign, and not NaN."""
    for dtype in (torch.float32, torch.float64):
        p = Problem.random(40, 8, 60, dtype=dtype, softcap=2.0, logits=2.0)
        p.hidden[:20] *= 1e4
        got, want = d_hidden(p, backend, 1.0), d_hidden(p.to(torch.float64), "reference", 1.0)
        assert bool(got.isfinite().all())
        close(
            got,
            want.to(dtype),
            rtol=1e-4 if dtype == torch.float32 else 1e-9,
            atol=2e-6 if dtype == torch.float32 else 1e-12,
        )


@pytest.mark.parametrize("backend", FUSED)
def test_excluded_columns(backend, forwards, narrow_slices):  # noqa: F811
    """Logits of -inf through the bias: a whole first slice, some columns, and a target."""
    p = Problem.random(40, 8, 1003)
    p.bias[:300] = -INF
    p.bias[900:910] = -INF
    p.targets = p.targets.clamp(min=300, max=890)
    close(d_hidden(p, backend, normal(40)), d_hidden(p, "reference", normal(40)))
    p.targets[7] = 905
    out = p.run(backend)
    assert out.logprobs[7] == -INF
    upstream = torch.ones(40, dtype=torch.float64)
    got, want = d_hidden(p, backend, upstream), d_hidden(p, "reference", upstream)
    others = torch.arange(40) != 7
    close(got[others], want[others])
    trained = p.requires_grad()
    trained.run(backend).logprobs.sum().backward()
    close(got, trained.hidden.grad)
    assert len(forwards) > 1


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_bad_row_stays_bad_and_alone(value, backend, forwards):
    p = Problem.random(40, 8, 300)
    want = d_hidden(p, backend, 1.0)
    p.hidden[5] = value
    got = d_hidden(p, backend, 1.0)
    assert len(forwards) == 2
    assert bool(got[5].isnan().all())
    others = torch.arange(40) != 5
    assert_bits(got[others], want[others])
    got = d_hidden(p, backend, others.double())  # a row without a gradient has none, whatever it holds
    assert not got[5].any()
    assert_bits(got[others], want[others])
    p.options["mask"] = others
    got = d_hidden(p, backend, 1.0)
    assert not got[5].any()
    close(got[others], want[others])


@pytest.mark.parametrize("backend", FUSED)
def test_a_nan_upstream_shows_in_its_row_only(backend):
    p = Problem.random(20, 8, 60)
    upstream = torch.ones(20, dtype=torch.float64)
    want = d_hidden(p, backend, upstream)
    upstream[3] = NAN
    got = d_hidden(p, backend, upstream)
    assert bool(got[3].isnan().all())
    others = torch.arange(20) != 3
    assert_bits(got[others], want[others])


@pytest.mark.parametrize("backend", FUSED)
def test_few_rows_or_none(backend):
    for n in (0, 1, 15, 16, 17):
        p = Problem.random(n, 8, 60)
        close(d_hidden(p, backend, 1.0, 0.5), d_hidden(p, "reference", 1.0, 0.5)) if n else None
        close(d_hidden(p, backend, 1.0), d_hidden(p, "reference", 1.0))
        p.options["mask"] = torch.zeros(n, dtype=torch.bool)
        p.hidden.fill_(NAN)
        assert_bits(d_hidden(p, backend, 1.0), torch.zeros(n, 8, dtype=torch.float64))


@pytest.mark.parametrize("backend", FUSED)
def test_recorded_ids_take_the_two_pass_way(backend, forwards):
    p = Problem.random(20, 8, 60, k=3)
    want = p.requires_grad(True, False, False)
    weighted(want.run("reference")).backward()
    got = p.requires_grad(True, False, False)
    weighted(got.run(backend)).backward()
    close(got.hidden.grad, want.hidden.grad)
    assert not forwards


@pytest.mark.parametrize("backend", FUSED)
def test_a_trained_head_or_no_training_takes_the_usual_way(backend, forwards):
    p = Problem.random(20, 8, 60)
    for learns in ((True, True, True), (True, False, True), (True, True, False), (False, False, False)):
        p.requires_grad(*learns).run(backend)
    with torch.no_grad():
        p.requires_grad(True, False, False).run(backend)
    assert not forwards


def test_no_product_with_the_vocabulary_in_the_backward(monkeypatch, forwards):
    p = Problem.random(20, 8, 60).requires_grad(True, False, False)
    out = p.run("torch", entropy=True)
    monkeypatch.setattr(chunked, "backward", None)
    out.logprobs.sum().backward()
    assert len(forwards) == 1


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("loss", ["bapo", "gspo", "kl-cov", "reinforce"])
def test_policy_losses(loss, backend, forwards):
    """Of the whole batch or not, with an entropy bonus (done again) or without."""
    for entropy_coef in (0.0, 0.02):
        args = batch(loss, layout="padded", v=300, return_tokens=True, entropy_coef=entropy_coef)
        got = run(args, HIDDEN, engine="frozen", backend=backend)
        assert_same(got, reference(args))
    assert len(forwards) == 2


def test_the_reference_has_no_engines():
    args = batch("dapo", n=30, d=5, v=20)
    for engine in ("recompute", "one-pass", "frozen"):
        with pytest.raises(ValueError, match=f"{engine}.*backend='reference'"):
            run(args, HIDDEN, engine=engine, backend="reference")


@pytest.mark.parametrize("why", ["weight", "bias", "recorded ids"])
def test_what_it_cannot_serve(why):
    args = batch("score-centering" if why == "recorded ids" else "dapo", n=30, d=5, v=20)
    learns = {"weight": (True, True, False), "bias": (True, False, True)}.get(why, HIDDEN)
    words = "recorded ids" if why == "recorded ids" else "requires a gradient"
    with pytest.raises(ValueError, match=f"frozen.*{words}"):
        run(args, learns, engine="frozen")
    with torch.no_grad():  # nothing to serve
        assert bk.linear_policy_loss(**args, engine="frozen").loss.isfinite()
