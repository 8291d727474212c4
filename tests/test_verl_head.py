"""verl's fused heads, replaced by ours, on a CPU."""

import importlib
import importlib.util
import sys
import warnings

import pytest
import torch
from helpers import close, integers, normal
from verl_model import tiny_model

import bapo_kernels as bk
from bapo_kernels.integrations import verl as integration

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed (it has no version for this Python)", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    dense_common = pytest.importorskip(
        "verl.models.transformers.dense_common", reason="packages that verl imports are missing", exc_type=ImportError
    )
    from verl.utils.experimental import torch_functional
    from verl.utils.kernel import linear_cross_entropy as kernel

THEIRS = torch_functional.FusedLinearForPPO, kernel.linear_cross_entropy


@pytest.fixture(autouse=True)
def _as_it_was():
    yield
    integration.use_fused_head(False)


def head(calls, hidden, weight, *arguments):
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    logprobs, entropy = calls(leaves[0], leaves[1], *arguments)
    (logprobs.sin().sum() + 0.3 * entropy.sum()).backward()
    return logprobs.detach(), entropy.detach(), *(t.grad for t in leaves)


def test_fused_head_replaces_both_and_goes_again():
    assert (torch_functional.FusedLinearForPPO, kernel.linear_cross_entropy) == THEIRS
    hidden, weight = normal(2, 5, 8, dtype=torch.float32), normal(30, 8, seed=1, dtype=torch.float32)
    ids = integers(30, 2, 5, seed=2)
    want = head(THEIRS[0](chunk_size=3).forward, hidden, weight, ids, 0.7)
    for _ in range(2):  # twice is as once
        integration.use_fused_head()
    assert torch_functional.FusedLinearForPPO is integration.FusedLinearForPPO
    got = head(torch_functional.FusedLinearForPPO(impl_backend="liger").forward, hidden, weight, ids, 0.7)
    for a, b in zip(got, want, strict=True):
        close(a, b, rtol=1e-5, atol=1e-5)
    flat = head(kernel.linear_cross_entropy, hidden, weight, ids, 0.7, "none")
    for a, b in zip(flat, want, strict=True):
        close(a.reshape(b.shape), b, rtol=1e-5, atol=1e-5)
    assert flat[0].shape == flat[1].shape == (10,)  # as verl's kernel returns them
    integration.use_fused_head(False)
    assert (torch_functional.FusedLinearForPPO, kernel.linear_cross_entropy) == THEIRS
    sys.modules.pop("bapo_kernels.integrations.verl_head", None)
    importlib.import_module("bapo_kernels.integrations.verl_head")  # as VERL_USE_EXTERNAL_MODULES does
    assert kernel.linear_cross_entropy is integration.linear_cross_entropy


def test_fused_head_multiplies_in_the_dtype_of_autocast():
    hidden, weight = (normal(*shape, dtype=torch.float32).requires_grad_() for shape in ((6, 8), (30, 8)))
    ids = integers(30, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = integration.linear_cross_entropy(hidden, weight, ids)
    want = bk.linear_logprobs(hidden.bfloat16(), weight.bfloat16(), ids, return_entropy=True)
    assert torch.equal(got[0], want.logprobs)
    assert torch.equal(got[1], want.entropy)
    assert not torch.equal(got[0], bk.linear_logprobs(hidden, weight, ids).logprobs)


def test_fused_head_in_the_forwards_that_verl_patches_in():
    model = tiny_model()
    ids = integers(40, 2, 6)
    want = dense_common.forward_with_torch_backend(model, ids, return_dict=True, temperature=0.8)
    integration.use_fused_head()
    for forward in (dense_common.forward_with_torch_backend, dense_common.forward_with_triton_backend):
        got = forward(model, ids, return_dict=True, temperature=0.8)
        close(got.log_probs.detach().flatten(), want.log_probs.detach().flatten(), rtol=1e-5, atol=1e-5)
        close(got.entropy.detach().flatten(), want.entropy.detach().flatten(), rtol=1e-5, atol=1e-5)
        model.zero_grad()
        got.log_probs.sum().backward()
        assert model.lm_head.weight.grad.abs().max() > 0


def test_fused_head_says_what_it_cannot(monkeypatch):
    integration.use_fused_head()
    hidden, weight, ids = torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="reduction"):
        kernel.linear_cross_entropy(hidden, weight, ids, 1.0, "mean")
    group = object()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda g: 2)
    with pytest.raises(ValueError, match="tp_group"):
        kernel.linear_cross_entropy(hidden, weight, ids, 1.0, "none", group)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda g: 1)
    assert kernel.linear_cross_entropy(hidden, weight, ids, 1.0, "none", group)[0].shape == (2,)


def test_names_that_were_imported_before_are_replaced_too(monkeypatch):
    holder = type(sys)("holder")
    holder.linear_cross_entropy = theirs = kernel.linear_cross_entropy
    monkeypatch.setitem(sys.modules, "verl.models.mcore.model_forward_fused", holder)
    integration.use_fused_head()
    assert holder.linear_cross_entropy is integration.linear_cross_entropy
    integration.use_fused_head(False)
    assert holder.linear_cross_entropy is theirs


def test_a_head_that_is_gone_is_an_error(monkeypatch):
    theirs = kernel.linear_cross_entropy
    monkeypatch.delattr(torch_functional, "FusedLinearForPPO")
    with pytest.raises(RuntimeError, match="FusedLinearForPPO"):
        integration.use_fused_head()
    assert kernel.linear_cross_entropy is theirs  # all or nothing
