"""Policy losses on tokens worked out by hand: each corner of the clip, overflow, on-policy, empty batches, garbage under the mask."""

import math

import pytest
import torch
from batches import LAYOUTS, Batch
from helpers import INF, NAN, assert_bits, close

import bapo_kernels as bk

NAMES = ("grpo", "ppo", "dapo", "bapo")


def tokens(ratios, advantages, loss, **options):
    """Tokens with these ratios: their loss, coefficient and flag, and the gradient of their plain sum."""
    logprobs = torch.tensor([math.log(r) for r in ratios], dtype=torch.float64).requires_grad_()
    advantages = torch.tensor(advantages, dtype=torch.float64)
    old = torch.zeros_like(advantages)
    out = bk.policy_loss(
        logprobs, advantages, loss=loss, old_logprobs=old, aggregation="token-sum", return_tokens=True, **options
    )
    out.loss.backward()
    close(logprobs.grad, out.tokens.coef, "coef")
    return out.tokens.loss.tolist(), logprobs.grad.tolist(), out.tokens.clipped.tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.1, 1.0, -1.1, -1.1, 0),
        (1.5, 1.0, -1.2, 0.0, 1),
        (0.5, 1.0, -0.5, -0.5, 0),
        (1.1, -2.0, 2.2, 2.2, 0),
        (1.5, -2.0, 3.0, 3.0, 0),
        (0.5, -2.0, 1.6, 0.0, -1),
        (10.0, -1.0, 10.0, 10.0, 0),
        (1.5, 0.0, 0.0, 0.0, 0),
        (0.5, 0.0, 0.0, 0.0, 0),
    ],
)
def test_each_cell(ratio, advantage, loss, gradient, clipped):
    for rule in ("ppo", bk.GRPO(), bk.BAPO.fixed(0.8, 1.2)):
        got = tokens([ratio], [advantage], rule)
        assert got == (pytest.approx([loss]), pytest.approx([gradient]), [clipped])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (10.0, 1.0, -1.2, 0.0, 1),
        (10.0, -1.0, 3.0, 0.0, 1),
        (2.9, -1.0, 2.9, 2.9, 0),
        (0.5, -1.0, 0.8, 0.0, -1),
        (0.5, 1.0, -0.5, -0.5, 0),
    ],
)
def test_each_cell_with_dual_clip(ratio, advantage, loss, gradient, clipped):
    for rule in (bk.GRPO(dual_clip=3.0), bk.BAPO.fixed(0.8, 1.2, dual_clip=3.0)):
        got = tokens([ratio], [advantage], rule)
        assert got == (pytest.approx([loss]), pytest.approx([gradient]), [clipped])


@pytest.mark.parametrize("backend", [bk.policy_loss, bk.reference.policy_loss], ids=["policy_loss", "reference"])
def test_a_token_exactly_on_a_bound_keeps_its_gradient(backend):
    logprobs = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    rule = bk.BAPO.fixed(1.0, 1.0, dual_clip=None)
    out = backend(logprobs, torch.tensor([1.0, -1.0, 2.0]), loss=rule, aggregation="token-sum", return_tokens=True)
    out.loss.backward()
    assert logprobs.grad.tolist() == [-1.0, 1.0, -2.0]
    assert out.tokens.clipped.tolist() == [0, 0, 0]


def test_dapo_has_the_wider_upper_bound():
    assert tokens([1.25], [1.0], "ppo")[2] == [1]
    assert tokens([1.25, 1.29], [1.0, 1.0], "dapo")[2] == [0, 1]
    assert tokens([1.29], [1.0], "dapo")[0] == pytest.approx([-1.28])


def test_clip_fractions():
    """(ratio, A): (1.5, 1) (1.5, -1) (.5, -1) (.5, 1) (1.5, 0), and a masked one."""
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.5, 9.0])
    out = bk.policy_loss(
        ratio.log(),
        torch.tensor([1.0, -1.0, -1.0, 1.0, 0.0, 1.0]),
        loss="ppo",
        old_logprobs=torch.zeros(6),
        mask=torch.tensor([1, 1, 1, 1, 1, 0]),
    )
    assert out.metrics["clip_frac_high"].item() == pytest.approx(1 / 5)
    assert out.metrics["clip_frac_low"].item() == pytest.approx(1 / 5)
    assert out.metrics["ratio_max"].item() == pytest.approx(1.5)
    assert out.metrics["ratio_mean"].item() == pytest.approx(1.1)
    assert out.metrics["approx_kl"].item() == pytest.approx(
        (3 * (0.5 - math.log(1.5)) + 2 * (-0.5 - math.log(0.5))) / 5
    )
    assert out.metrics["num_tokens"].item() == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("gap", [100.0, 1e4, INF])
def test_overflow_of_the_ratio(gap, dtype):
    """new - old = gap: clamped, never NaN, and other tokens are untouched."""

    def run(advantage, rule, delta):
        logprobs = torch.tensor([-1.0, -1.0], dtype=dtype, requires_grad=True)
        old = torch.tensor([-1.0 - delta, -1.0], dtype=dtype)
        advantages = torch.tensor([advantage, 1.0], dtype=dtype)
        out = bk.policy_loss(
            logprobs, advantages, loss=rule, old_logprobs=old, aggregation="token-sum", return_tokens=True
        )
        out.loss.backward()
        assert all(bool(v.isfinite()) or k in ("kl", "entropy", "approx_kl") for k, v in out.metrics.items())
        assert not out.metrics["approx_kl"].isnan()
        assert logprobs.grad[1].item() == -1.0
        return out.tokens.loss[0].item(), logprobs.grad[0].item()

    assert run(0.0, "ppo", gap) == (0.0, 0.0)
    assert run(1.0, "ppo", gap) == (pytest.approx(-1.2), 0.0)
    assert run(-1.0, bk.PPO(dual_clip=3.0), gap) == (3.0, 0.0)
    assert run(-1.0, "ppo", gap) == (pytest.approx(math.exp(20.0)), 0.0)  # the clamped value, without gradient
    assert run(0.0, "ppo", -gap) == (0.0, 0.0)
    assert run(-1.0, "ppo", -gap) == (pytest.approx(0.8), 0.0)
    assert run(1.0, "ppo", -gap) == (pytest.approx(-math.exp(-20.0)), 0.0)


def test_nan_in_an_active_token_shows():
    for name in ("old_logprobs", "advantages", "logprobs"):
        values = {"logprobs": torch.zeros(3), "old_logprobs": torch.zeros(3), "advantages": torch.ones(3)}
        values[name][1] = NAN
        out = bk.policy_loss(values.pop("logprobs"), values.pop("advantages"), loss="ppo", **values)
        assert out.loss.isnan(), name


@pytest.mark.parametrize("gap", [0.5, -0.5, 2.0, 100.0, -1e4])
def test_kl_estimators(gap):
    """x = ref - new; x is clamped before exp."""
    bounded = min(max(gap, -20.0), 20.0)
    k3 = math.exp(bounded) - gap - 1
    want = {
        "k1": (-gap, 1.0),
        "k2": (gap**2 / 2, -gap),
        "k3": (k3, 1 - math.exp(gap) if bounded == gap else 1.0),
        "k3+": (k3, -gap),
    }
    for estimator, (value, gradient) in want.items():
        logprobs = torch.full((1,), -1.0, dtype=torch.float64, requires_grad=True)
        out = bk.policy_loss(
            logprobs,
            torch.zeros(1, dtype=torch.float64),
            loss="ppo",
            ref_logprobs=torch.full((1,), -1.0 + gap, dtype=torch.float64),
            kl_coef=1.0,
            kl_estimator=estimator,
        )
        out.loss.backward()
        assert out.loss.item() == pytest.approx(value)
        assert out.metrics["kl"].item() == pytest.approx(value)
        assert logprobs.grad.item() == pytest.approx(gradient), estimator


def test_known_values_of_k3():
    for gap, value in ((0.5, 0.148721), (-0.5, 0.106531), (2.0, 4.389056)):
        zero = torch.zeros(1)
        out = bk.policy_loss(zero, zero, loss="ppo", ref_logprobs=zero + gap, kl_coef=1.0)
        assert out.loss.item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("function", [bk.policy_loss, bk.reference.policy_loss], ids=["policy_loss", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_on_policy(name, function):
    """Without old log-probs the loss is -mean(A), its gradient -A / n; the same as with the current ones given, which are constants."""
    advantages = torch.tensor([1.0, -2.0, 0.5, 3.0])
    results = []
    for given in (False, True):
        logprobs = torch.tensor([-1.0, -2.0, -0.1, -7.0], requires_grad=True)
        out = function(logprobs, advantages, loss=name, old_logprobs=logprobs if given else None)
        out.loss.backward()
        assert out.loss.item() == pytest.approx(-0.625)
        close(logprobs.grad, -advantages / 4)
        assert out.metrics["clip_frac_low"] == out.metrics["clip_frac_high"] == out.metrics["approx_kl"] == 0
        results.append((out.loss, logprobs.grad))
    assert_bits(results[0][0], results[1][0])
    assert_bits(results[0][1], results[1][1])


@pytest.mark.parametrize("function", [bk.policy_loss, bk.reference.policy_loss], ids=["policy_loss", "reference"])
def test_everything_recorded_is_a_constant(function):
    batch = Batch.random()
    recorded = {
        k: getattr(batch, k).clone().requires_grad_() for k in ("old_logprobs", "rollout_logprobs", "ref_logprobs")
    }
    batch.advantages = batch.advantages.clone().requires_grad_()
    out, *_ = batch.call(function, loss="bapo", kl_coef=0.1, **recorded)
    out.loss.backward()
    assert all(t.grad is None for t in (*recorded.values(), batch.advantages))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_garbage_in_masked_tokens_changes_nothing(name, layout):
    options = {"loss": name, "kl_coef": 0.1, "entropy_coef": 0.1, "top_entropy": 0.5, "return_tokens": True}
    clean = Batch.random(layout)
    want, want_lp, want_h = clean.call(rollout_logprobs=clean.rollout_logprobs, **options)
    want.loss.backward()
    fields = ("logprobs", "advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs", "entropy")
    for poisoned in (*((f,) for f in fields), fields):
        for value in (NAN, INF, -INF, -1e10):
            dirty = Batch.random(layout)
            for f in poisoned:
                getattr(dirty, f)[~dirty.mask] = value
            got, lp, h = dirty.call(rollout_logprobs=dirty.rollout_logprobs, **options)
            got.loss.backward()
            assert_bits(got.loss, want.loss)
            assert_bits(lp.grad, want_lp.grad)
            assert_bits(h.grad, want_h.grad)
            for k, v in want.metrics.items():
                assert_bits(got.metrics[k], v, k)
            for a, b in zip(got.tokens, want.tokens, strict=True):
                assert_bits(a, b)


@pytest.mark.parametrize(
    "options", [{}, {"kl_coef": 0.1, "entropy_coef": 0.2, "top_entropy": 0.5}, {"normalizer": 0}, {"normalizer": 8}]
)
@pytest.mark.parametrize("how", ["masked", "empty flat", "empty padded", "no columns", "empty packed"])
@pytest.mark.parametrize("name", NAMES)
def test_no_active_token(name, how, options):
    shape = {"masked": (2, 3), "empty flat": (0,), "empty padded": (0, 4), "no columns": (3, 0), "empty packed": (0,)}[
        how
    ]
    zeros = torch.zeros(shape)
    logprobs, entropy = torch.zeros(shape, requires_grad=True), torch.zeros(shape, requires_grad=True)
    out = bk.policy_loss(
        logprobs,
        zeros,
        loss=name,
        mask=zeros.bool(),
        entropy=entropy,
        ref_logprobs=zeros,
        return_tokens=True,
        cu_seqlens=torch.tensor([0, 0, 0]) if how == "empty packed" else None,
        **options,
    )
    assert out.loss.item() == 0
    assert out.loss.requires_grad
    out.loss.backward()
    assert_bits(logprobs.grad, torch.zeros(shape))
    if options.get("entropy_coef"):
        assert_bits(entropy.grad, torch.zeros(shape))
    bounds = {"c_low": 0.6, "c_high": 1.2}
    for k, v in out.metrics.items():
        if k == "kl" and not options.get("kl_coef"):
            assert v.isnan()
        else:
            assert v.item() == pytest.approx(bounds.get(k, 0.0)), k
    assert all(t.shape == shape for t in out.tokens)
