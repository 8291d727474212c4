"""The modules are the functions with their options given once; the reference has the same signatures."""

import inspect

import pytest
import torch
from helpers import Problem, assert_bits, integers, normal

import bapo_kernels as bk

P = Problem.random(8, 5, 13)
INPUTS = {"mask": integers(4, 8) > 0, "old_logprobs": P.oracle().logprobs + 0.2 * normal(8), "bias": P.bias}


def test_linear_logprobs():
    module = bk.LinearLogprobs(temperature=0.7, softcap=5.0, return_entropy=True, backend="torch")
    got = module(P.hidden, P.weight, P.targets, mask=INPUTS["mask"])
    want = bk.linear_logprobs(
        P.hidden,
        P.weight,
        P.targets,
        mask=INPUTS["mask"],
        temperature=0.7,
        softcap=5.0,
        return_entropy=True,
        backend="torch",
    )
    assert_bits(got.logprobs, want.logprobs)
    assert_bits(got.entropy, want.entropy)
    at_the_call = module(P.hidden, P.weight, P.targets, mask=INPUTS["mask"], temperature=1.3)
    assert not torch.equal(at_the_call.logprobs, want.logprobs)
    assert "temperature=0.7" in repr(module)
    assert not list(module.parameters())


@pytest.mark.parametrize("loss", ["bapo", "grpo", bk.DAPO(clip_high=0.4)], ids=str)
def test_linear_policy_loss(loss):
    options = {"temperature": 0.7, "aggregation": "token-mean", "entropy_coef": 0.1}
    results = []
    for function in (
        bk.LinearPolicyLoss(loss=loss, **options),
        lambda *a, **k: bk.linear_policy_loss(*a, loss=loss, **options, **k),
    ):
        hidden, weight = P.hidden.clone().requires_grad_(), P.weight.clone().requires_grad_()
        out = function(hidden, weight, P.targets, normal(8, seed=3), **INPUTS)
        out.loss.backward()
        results.append((out.loss, hidden.grad, weight.grad))
    for a, b in zip(*results, strict=True):
        assert_bits(a, b)


def test_the_default_loss_is_bapo():
    module = bk.LinearPolicyLoss()
    out = module(P.hidden, P.weight, P.targets, normal(8))
    assert "c_low" in out.metrics
    assert "bapo" in repr(module)
    for function in (bk.linear_policy_loss, bk.policy_loss):
        assert inspect.signature(function).parameters["loss"].default == "bapo"


def test_modules_refuse_wrong_options_when_made():
    for wrong in ({"loss": "grop"}, {"aggregation": "mean"}, {"top_entropy": 2.0}, {"kl_estimator": "k9"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            bk.LinearPolicyLoss(**wrong)
    for cls in (bk.LinearPolicyLoss, bk.LinearLogprobs):
        with pytest.raises(TypeError, match="temprature"):
            cls(temprature=1.0)


@pytest.mark.parametrize("name", ["linear_logprobs", "linear_policy_loss", "policy_loss"])
def test_the_reference_has_the_same_signature(name):
    assert inspect.signature(getattr(bk.reference, name)) == inspect.signature(getattr(bk, name))


def test_the_reference_has_one_backend():
    with pytest.raises(ValueError, match="backend"):
        bk.reference.linear_logprobs(P.hidden, P.weight, P.targets, backend="torch")


def test_auto_is_a_backend_that_works():
    report = bk.env_report()
    assert report["backend reference on cpu"] == report["backend torch on cpu"] == "usable"
    chosen = report["backend auto on cpu"]
    assert chosen == ("cpu" if report["backend cpu on cpu"] == "usable" else "torch")
    assert_bits(P.run("auto").logprobs, P.run(chosen).logprobs)


def test_everything_public_exists():
    for name in bk.__all__:
        assert hasattr(bk, name), name
