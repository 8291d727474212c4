"""`policy_loss` with clipped losses against the same arithmetic in plain Python numbers, over layouts, aggregations and options."""

import pytest
import torch
from batches import LAYOUTS, Batch, gradcheck
from helpers import NAN, close

import bapo_kernels as bk

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum")
LOSSES = {  # loss, low, high, its own aggregation
    "grpo": ("grpo", 0.8, 1.2, "seq-mean-token-mean"),
    "ppo": ("ppo", 0.8, 1.2, "token-mean"),
    "dapo": ("dapo", 0.8, 1.28, "token-mean"),
    "grpo-object": (bk.GRPO(clip_low=0.1, clip_high=0.3), 0.9, 1.3, "seq-mean-token-mean"),
    "bapo-fixed": (bk.BAPO.fixed(0.7, 1.1), 0.7, 1.1, "token-mean"),
}
METRICS = {
    "policy_loss",
    "kl",
    "entropy",
    "ratio_mean",
    "ratio_max",
    "approx_kl",
    "clip_frac_low",
    "clip_frac_high",
    "entropy_clip_cov",
    "num_tokens",
}
BAPO_METRICS = METRICS | {"c_low", "c_high", "contribution", "positive", "negative"}


def check(batch: Batch, loss, low, high, aggregation, function=None, dual_clip=None, **options) -> None:
    out, logprobs, entropy = batch.call(function, loss=loss, return_tokens=True, aggregation=aggregation, **options)
    want = batch.expected(low, high, aggregation=aggregation, dual_clip=dual_clip, **options)
    shape, scale = batch.logprobs.shape, max(1.0, abs(want.loss))
    exact = batch.logprobs.dtype == torch.float64
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if exact else {"rtol": 2e-5, "atol": 2e-6}

    def compare(got, values, what):
        close(got, torch.tensor(values, dtype=torch.float64).reshape(got.shape), what, **tolerance)

    assert out.loss.dtype == batch.logprobs.dtype
    compare(out.loss, want.loss, "loss")
    out.loss.backward()
    compare(logprobs.grad, want.grad, "gradient of logprobs")
    if options.get("entropy_coef"):
        compare(entropy.grad, want.grad_entropy, "gradient of entropy")
    else:
        assert entropy.grad is None
    for name in ("ratio", "coef", "clipped"):
        compare(getattr(out.tokens, name), getattr(want, name), f"tokens.{name}")
    compare(out.tokens.loss, want.token_loss, "tokens.loss")
    compare(out.tokens.logprobs, torch.where(batch.mask, batch.logprobs, 0.0).flatten().tolist(), "tokens.logprobs")
    compare(out.tokens.entropy, torch.where(batch.mask, batch.entropy, 0.0).flatten().tolist(), "tokens.entropy")
    assert out.tokens.clipped.dtype == torch.int8
    assert all(t.shape == shape and not t.requires_grad for t in out.tokens)
    assert set(out.metrics) == (BAPO_METRICS if isinstance(loss, bk.BAPO) else METRICS)
    for name, value in want.metrics.items():
        got = out.metrics[name]
        assert got.dtype == torch.float32
        assert got.dim() == 0
        assert not got.requires_grad
        close(got, torch.tensor(value), name, rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("function", [bk.policy_loss, bk.reference.policy_loss], ids=["policy_loss", "reference"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_with_their_own_aggregation(name, layout, function):
    loss, low, high, own = LOSSES[name]
    for seed in range(3):
        batch = Batch.random(layout, seed=10 * seed)
        check(batch, loss, low, high, own, function)
        by_default, *_ = batch.call(loss=loss)
        explicit, *_ = batch.call(loss=loss, aggregation=own)
        assert by_default.loss == explicit.loss


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregations(aggregation, layout, masked):
    extra = {"max_length": 11} if aggregation.endswith("norm") else {}
    check(Batch.random(layout, masked=masked), "grpo", 0.8, 1.2, aggregation, **extra)
    if aggregation != "token-sum":
        check(Batch.random(layout, masked=masked), "grpo", 0.8, 1.2, aggregation, normalizer=7, **extra)
        check(Batch.random(layout, masked=masked), "grpo", 0.8, 1.2, aggregation, normalizer=2.5, **extra)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3+"])
def test_kl(estimator, layout):
    check(Batch.random(layout), "ppo", 0.8, 1.2, "token-mean", kl_coef=0.3, kl_estimator=estimator)
    check(Batch.random(layout), "grpo", 0.8, 1.2, "seq-mean-token-mean", kl_coef=-2, kl_estimator=estimator)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("coef", [0.01, -0.5, 3])
def test_entropy_bonus(coef, layout):
    check(Batch.random(layout), "ppo", 0.8, 1.2, "token-mean", entropy_coef=coef)
    check(Batch.random(layout), "grpo", 0.8, 1.2, "seq-mean-token-sum", entropy_coef=coef, kl_coef=0.1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fraction", [1e-6, 0.2, 0.5, 0.9, 1, 1.0])
def test_top_entropy(fraction, layout):
    batch = Batch.random(layout)
    check(batch, "ppo", 0.8, 1.2, "token-mean", top_entropy=fraction)
    check(batch, "grpo", 0.8, 1.2, "seq-mean-token-mean", top_entropy=fraction, kl_coef=0.1, entropy_coef=0.1)


@pytest.mark.parametrize(
    ("fraction", "count", "kept"),
    [(0.28, 25, 7), (0.07, 100, 7), (0.2, 5, 1), (0.2, 6, 2), (0.3, 10, 3), (0.7, 10, 7), (0.01, 3, 1)],
)
def test_top_entropy_counts(fraction, count, kept):
    """ceil(fraction * n), without the rounding of 0.28 * 25 = 7.000000000000001."""
    entropy = torch.arange(count, dtype=torch.float64) / 7
    logprobs = torch.zeros(count, dtype=torch.float64)
    out = bk.policy_loss(logprobs, logprobs + 1, loss="ppo", entropy=entropy, top_entropy=fraction, return_tokens=True)
    assert (out.tokens.coef != 0).tolist() == [i >= count - kept for i in range(count)]


def test_top_entropy_keeps_ties_and_ignores_masked_tokens():
    entropy = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0, 9.0])
    mask = torch.tensor([1, 1, 1, 1, 1, 0])
    logprobs = torch.zeros(6, requires_grad=True)
    out = bk.policy_loss(
        logprobs, torch.ones(6), loss="ppo", entropy=entropy, mask=mask, top_entropy=0.2, return_tokens=True
    )
    assert out.tokens.coef.tolist() == [0, -1, -1, -1, 0, 0]
    assert out.loss.item() == pytest.approx(-3 / 5)  # the denominator stays 5


@pytest.mark.parametrize("dual_clip", [1.1, 1.5, 3.0])
def test_dual_clip(dual_clip):
    for loss in (
        bk.GRPO(dual_clip=dual_clip),
        bk.PPO(dual_clip=dual_clip),
        bk.BAPO.fixed(0.8, 1.2, dual_clip=dual_clip),
    ):
        check(Batch.random(spread=0.8), loss, 0.8, 1.2, "token-mean", dual_clip=dual_clip)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_everything_at_once(dtype):
    for seed in range(4):
        for layout in LAYOUTS:
            batch = Batch.random(layout, seed=seed, dtype=dtype)
            check(
                batch,
                "dapo",
                0.8,
                1.28,
                "seq-mean-token-mean",
                normalizer=5,
                kl_coef=0.2,
                entropy_coef=0.3,
                top_entropy=0.6,
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_recorded_values_of_any_dtype_are_upcast_first(dtype):
    """The log-ratio is a difference in fp32, not in the dtype that something was stored in."""
    logprobs = torch.tensor([-12.34, -0.7])
    old = torch.tensor([-12.34, -0.7]).to(dtype)
    out = bk.policy_loss(logprobs, torch.ones(2), loss="ppo", old_logprobs=old, return_tokens=True)
    assert out.tokens.ratio.dtype == torch.float32
    close(out.tokens.ratio, (logprobs - old.float()).exp(), rtol=1e-6)
    if dtype == torch.bfloat16:
        assert out.tokens.ratio[0].item() == pytest.approx(0.9729, abs=1e-4)
    learns = logprobs.to(torch.bfloat16).requires_grad_()
    out = bk.policy_loss(learns, torch.ones(2), loss="ppo", old_logprobs=old)
    assert out.loss.dtype == torch.float32
    out.loss.backward()
    assert learns.grad.dtype == torch.bfloat16


def test_metrics_that_were_not_computed_are_nan():
    batch = Batch.random()
    out, *_ = batch.call(loss="ppo", entropy=None)
    assert out.metrics["entropy"].isnan()
    assert out.metrics["kl"].isnan()
    assert set(out.metrics) == METRICS
    out, *_ = batch.call(loss="bapo", entropy=None)
    assert set(out.metrics) == BAPO_METRICS


def test_without_kl_the_reference_is_never_read():
    batch = Batch.random()
    want, *_ = batch.call(loss="ppo")
    for ref in (None, torch.full_like(batch.logprobs, NAN), torch.zeros(1)):
        got, *_ = batch.call(loss="ppo", ref_logprobs=ref, kl_coef=0.0)
        assert got.loss == want.loss


def test_gradients_scale_with_the_upstream():
    batch = Batch.random()
    out, logprobs, entropy = batch.call(loss="bapo", entropy_coef=0.1, kl_coef=0.1)
    (3 * out.loss).backward()
    once, logprobs_once, entropy_once = batch.call(loss="bapo", entropy_coef=0.1, kl_coef=0.1)
    once.loss.backward()
    close(logprobs.grad, 3 * logprobs_once.grad)
    close(entropy.grad, 3 * entropy_once.grad)


@pytest.mark.parametrize("loss", ["grpo", "ppo", "dapo", "bapo", bk.GRPO(dual_clip=1.2)], ids=str)
def test_gradcheck(loss):
    """In fp64, away from the corners of the clip."""
    batch = Batch.random(seed=5)
    gradcheck(batch, loss, mask=batch.mask, kl_coef=0.1, entropy_coef=0.2)
