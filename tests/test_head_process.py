"""What the head does to, and takes from, the process around it: precision settings, threads, memory it holds, graph capture."""

import gc
import threading
import weakref

import pytest
import torch
from helpers import BACKENDS, FUSED, NAN, Problem, as_under_capture, assert_bits, integers, normal, weighted

import bapo_kernels as bk
from bapo_kernels.head.precision import full_precision

SETTINGS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


def precisions() -> list[str]:
    return [s.fp32_precision for s in SETTINGS]


@pytest.fixture
def restore_precision():
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = "none"
    for s in SETTINGS:
        s.fp32_precision = "none"


@pytest.mark.parametrize("setting", ["medium", "high", "highest"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_reduced_precision_of_the_process_changes_no_bit(setting, backend, restore_precision):
    problem = Problem.random(40, 65, 300, dtype=torch.float32).requires_grad()
    weighted(out := problem.run(backend)).backward()
    torch.set_float32_matmul_precision(setting)
    before = precisions()
    again = problem.requires_grad()
    weighted(repeated := again.run(backend)).backward()
    assert precisions() == before
    assert_bits(repeated.logprobs, out.logprobs)
    if backend != "reference":  # whose backward is plain autograd
        for a, b in zip(again.grads(), problem.grads(), strict=True):
            assert_bits(a, b)


def test_precision_inherited_from_the_general_setting_stays_inherited(restore_precision):
    torch.backends.fp32_precision = "tf32"
    with full_precision("cpu"):
        assert not {"tf32", "bf16"} & set(precisions())
    torch.backends.fp32_precision = "ieee"
    assert not {"tf32", "bf16"} & set(precisions())


def test_fp16_products_are_not_summed_in_fp16(restore_precision):
    products = torch.backends.cuda.matmul
    for before in (True, False):
        products.allow_fp16_accumulation = before
        with full_precision("cpu"), full_precision("cpu"):
            assert not products.allow_fp16_accumulation
        assert products.allow_fp16_accumulation == before


def test_precision_is_restored_by_the_last_of_overlapping_threads(restore_precision):
    torch.set_float32_matmul_precision("high")
    before, inside, leave, seen = precisions(), threading.Event(), threading.Event(), []

    def longer():
        with full_precision("cpu"):
            inside.set()
            leave.wait(10)
            seen.append(precisions())

    thread = threading.Thread(target=longer)
    thread.start()
    assert inside.wait(10)
    with full_precision("cpu"):
        pass
    leave.set()
    thread.join()
    assert not {"tf32", "bf16"} & set(seen[0])
    assert precisions() == before


@pytest.mark.parametrize("backend", FUSED)
def test_autocast_changes_no_bit(backend):
    problem = Problem.random(20, 65, 300, dtype=torch.float32).requires_grad()
    weighted(out := problem.run(backend)).backward()
    again = problem.requires_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weighted(repeated := again.run(backend)).backward()
    assert_bits(repeated.logprobs, out.logprobs)
    for a, b in zip(again.grads(), problem.grads(), strict=True):
        assert_bits(a, b)


@pytest.mark.parametrize("backend", FUSED)
def test_hidden_states_are_freed_by_the_backward(backend):
    """A trainer that keeps the loss for its logs must not keep the batch with it."""
    leaf, weight = normal(6, 8, dtype=torch.float32).requires_grad_(), normal(20, 8, dtype=torch.float32)
    hidden = leaf * 2
    out = bk.linear_policy_loss(hidden, weight, integers(20, 6), normal(6), loss="dapo", backend=backend)
    out.loss.backward()
    alive = weakref.ref(hidden)
    del hidden
    gc.collect()
    assert alive() is None
    assert out.loss.requires_grad


@pytest.mark.parametrize("backend", FUSED)
def test_rows_that_cannot_be_compacted_are_masked_instead(monkeypatch, backend):
    """While a CUDA graph is captured the host may not learn how many rows count."""
    options = {"softcap": 3.0, "temperature": normal(12, seed=9).abs() + 0.5, "logit_scale": 1.2, "k": 3}
    problem = Problem.random(12, 7, 30, **options)
    problem.bias[3] = 300.0  # exp of it is inf where there is no maximum to subtract
    mask = integers(3, 12, seed=1) > 0
    for t in (problem.hidden, problem.options["temperature"]):
        t[~mask] = NAN
    problem.targets[~mask] = 2**40
    upstream = torch.where(integers(2, 12, seed=2) > 0, normal(12, seed=3), 0.0)

    def run(p):
        out = p.run(backend, mask=mask)
        ((out.logprobs + 0.1 * out.topk_logprobs.sum(-1) + 0.3 * out.entropy) * upstream).sum().backward()
        return out, p.grads()

    out, grads = run(problem.requires_grad())
    as_under_capture(monkeypatch)
    masked_out, masked_grads = run(problem.requires_grad())
    for a, b in zip((*masked_out, *masked_grads), (*out, *grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert (masked_grads[0][~mask] == 0).all()


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("loss", ["dapo", "bapo"])
def test_nan_in_an_active_row_shows_in_the_gradients(backend, loss):
    """A trainer that looks only at gradient norms has to see it."""
    problem = Problem.random(6, 5, 20).requires_grad()
    with torch.no_grad():
        problem.hidden[2] = NAN
    bk.linear_policy_loss(
        problem.hidden,
        problem.weight,
        problem.targets,
        normal(6),
        loss=loss,
        kl_coef=0.1,
        ref_logprobs=normal(6),
        backend=backend,
    ).loss.backward()
    assert problem.hidden.grad[2].isnan().all()
    assert problem.weight.grad.isnan().any()
