"""The custom loss of prime-rl: on stand-ins with the fields that its documentation lists, and on the package where it is installed."""

import importlib.util
import sys
import types
from dataclasses import dataclass

import pytest
import torch
from helpers import generator
from torch import Tensor

import bapo_kernels as bk
from bapo_kernels.integrations import packages, prime_rl
from bapo_kernels.integrations.prime_rl import policy_loss

INSTALLED = importlib.util.find_spec("prime_rl") is not None
LENGTHS = (5, 9, 1, 6)


@dataclass
class LossInputs:
    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None


@dataclass
class LossOutputs:
    loss: Tensor
    metrics: dict[str, Tensor]


@pytest.fixture
def documented(monkeypatch):
    """A package with what the documentation describes."""
    module = types.ModuleType("prime_rl.trainer.rl.loss")
    module.LossOutputs = LossOutputs
    for name in ("prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(packages.Package, "version", "0.8.0")
    prime_rl._outputs.cache_clear()
    yield module
    prime_rl._outputs.cache_clear()


def samples(weights=False, ref=False, seed=0):
    g = generator(seed)
    for n in LENGTHS:
        sampled = -3 * torch.rand(n, generator=g)
        yield LossInputs(
            (sampled + 0.4 * torch.randn(n, generator=g)).requires_grad_(),
            sampled,
            sampled + 0.2 * torch.randn(n, generator=g) if ref else None,
            torch.randn(n, generator=g),
            torch.rand(n, generator=g) < 0.8,
            torch.rand(n, generator=g) * 2 if weights else None,
        )


def packed(batch):
    """All samples as one packed batch."""
    cat = {
        name: torch.cat([getattr(s, name).detach() for s in batch])
        for name in ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")
    }
    edges = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    leaf = cat["trainer_logprobs"].requires_grad_()
    given = {
        "old_logprobs": cat["inference_logprobs"],
        "rollout_logprobs": cat["inference_logprobs"],
        "mask": cat["loss_mask"],
        "cu_seqlens": edges,
    }
    return leaf, cat["advantages"], given


@pytest.mark.parametrize(
    "name", [n for n in bk.losses.available() if n not in ("bapo", "clip-cov", "kl-cov", "score-centering")]
)
def test_samples_add_up_to_the_batch(documented, name):
    batch = list(samples())
    outs = [policy_loss(s, loss=name) for s in batch]
    total = sum(o.loss for o in outs)
    total.backward()
    leaf, advantages, given = packed(batch)
    want = bk.policy_loss(leaf, advantages, loss=name, aggregation="token-sum", **given).loss
    want.backward()
    assert all(type(o) is LossOutputs and o.loss.dim() == 0 for o in outs)
    torch.testing.assert_close(total, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.cat([s.trainer_logprobs.grad for s in batch]), leaf.grad, rtol=1e-6, atol=1e-6)
    assert leaf.grad.any()


def test_ppo_by_hand(documented):
    for s in samples(weights=True):
        out = policy_loss(s, loss="ppo", clip_low=0.1, clip_high=0.3)
        ratio = (s.trainer_logprobs - s.inference_logprobs).exp()
        surrogate = torch.minimum(ratio * s.advantages, ratio.clamp(0.9, 1.3) * s.advantages)
        want = -(s.loss_weights * surrogate)[s.loss_mask].sum()
        (got_grad,) = torch.autograd.grad(out.loss, s.trainer_logprobs)
        (want_grad,) = torch.autograd.grad(want, s.trainer_logprobs)
        torch.testing.assert_close(out.loss, want)
        torch.testing.assert_close(got_grad, want_grad)


def test_bapo_with_the_bounds_of_the_batch(documented):
    batch = list(samples())
    leaf, advantages, given = packed(batch)
    bounds = bk.bapo_bounds(leaf, advantages, **given)
    want = bk.policy_loss(leaf, advantages, loss="bapo", aggregation="token-sum", **given)
    low, high = float(bounds.c_low), float(bounds.c_high)
    outs = [policy_loss(s, loss="bapo", c_low=low, c_high=high) for s in batch]
    torch.testing.assert_close(sum(o.loss for o in outs), want.loss)
    assert all(o.metrics["c_high"] == torch.tensor(high) for o in outs)
    objects = [policy_loss(s, loss=bk.BAPO.fixed(low, high)) for s in batch]
    assert [o.loss for o in objects] == [o.loss for o in outs]


def test_weights_and_kl(documented):
    for s in samples(weights=True, ref=True):
        out = policy_loss(s, loss="reinforce", kl_coef=0.1, kl_estimator="k2")
        kl = (s.ref_logprobs - s.trainer_logprobs).square() / 2
        per_token = -s.advantages * s.trainer_logprobs + 0.1 * kl
        torch.testing.assert_close(out.loss, (s.loss_weights * per_token)[s.loss_mask].sum())
        torch.testing.assert_close(out.metrics["kl"], kl.detach()[s.loss_mask].sum() / s.loss_mask.sum().clamp(min=1))


def test_metrics_are_numbers(documented):
    for s in samples(ref=True):
        for options in ({}, {"kl_coef": 0.1}):
            metrics = policy_loss(s, **options).metrics
            assert {"ratio_mean", "clip_frac_high", "num_tokens"} <= set(metrics) and ("kl" in metrics) == bool(options)
            assert all(m.dim() == 0 and not m.requires_grad and m.isfinite() for m in metrics.values())


def test_what_masked_tokens_hold(documented, monkeypatch):
    # In a loss of one's own, gradients of a token may go through its whole sequence.
    monkeypatch.setattr(bk.losses, "_LOSSES", dict(bk.losses._LOSSES))
    bk.losses.register("whole", lambda x: -x.advantages * x.sequence_mean(x.logprobs - x.old_logprobs).exp())
    for name in ("ppo", "gspo", "dro", "whole"):
        for clean, dirty in zip(samples(True, True), samples(True, True), strict=True):
            for t in (
                dirty.inference_logprobs,
                dirty.ref_logprobs,
                dirty.advantages,
                dirty.loss_weights,
                dirty.trainer_logprobs.data,
            ):
                t[~dirty.loss_mask] = float("nan")
            got, want = (policy_loss(s, loss=name, kl_coef=0.1) for s in (dirty, clean))
            for s, out in ((dirty, got), (clean, want)):
                out.loss.backward()
                assert not s.trainer_logprobs.grad[~s.loss_mask].any()
            assert torch.equal(got.loss, want.loss) and got.metrics == want.metrics
            assert torch.equal(dirty.trainer_logprobs.grad, clean.trainer_logprobs.grad)


def test_refusals(documented):
    sample = next(samples())
    for loss, options, message in (
        ("bapo", {}, r"needs its bounds, c_low and c_high: .*one sample at a time"),
        ("bapo", {"c_low": 0.8}, r"needs its bounds"),
        (bk.BAPO(), {}, r"searches its bounds"),
        ("ppo", {"c_low": 0.8, "c_high": 1.2}, r"bounds of loss='bapo', got loss='ppo'"),
        ("clip-cov", {}, r"'clip-cov' chooses among the tokens of a batch"),
        (bk.KLCov(), {}, r"'kl-cov' chooses"),
        ("score-centering", {}, r"rollout_topk_ids, which prime-rl does not hand"),
        ("ppo", {"kl_coef": 0.1}, r"kl_coef needs inputs.ref_logprobs"),
        ("ppo", {"kl_coef": 0.1, "kl_estimator": "k9"}, r"kl_estimator must be one of"),
        ("pppo", {}, r"loss must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            policy_loss(sample, loss=loss, **options)
    for loss in ("ppo", bk.PPO()):
        with pytest.raises(TypeError, match=r"clip_hihg"):
            policy_loss(sample, loss=loss, clip_hihg=0.3)


def test_versions_and_hooks(documented, monkeypatch):
    monkeypatch.setattr(packages.Package, "version", "0.9.1")
    packages._warned.clear()
    with pytest.warns(UserWarning, match=r"prime-rl 0.9.1 .*tested: 0.8"):
        policy_loss(next(samples()))
    packages._warned.clear()
    prime_rl._outputs.cache_clear()
    del documented.LossOutputs
    with pytest.raises(RuntimeError, match=r"has no prime_rl.trainer.rl.loss.LossOutputs"):
        policy_loss(next(samples()))


@pytest.mark.skipif(INSTALLED, reason="prime-rl is installed")
def test_without_prime_rl():
    prime_rl._outputs.cache_clear()
    with pytest.raises(ImportError, match=r"needs prime-rl: install prime-rl"):
        policy_loss(next(samples()))


@pytest.mark.skipif(not INSTALLED, reason="prime-rl is not installed (it is no package of PyPI)")
def test_in_the_package_itself():
    from prime_rl.trainer.rl import loss as theirs

    for s in samples(weights=True):
        assert isinstance(policy_loss(theirs.LossInputs(**vars(s))), theirs.LossOutputs)
