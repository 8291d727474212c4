"""The engines of `linear_policy_loss` on the Triton backend against the fp64 reference, in Triton's interpreter: collected only by
`test_triton_interpreter.py`, which turns it on."""

import pytest
import torch
from engine_batches import pool_of
from helpers import integers, normal

import bapo_kernels as bk
from bapo_kernels.head import chunked
from bapo_kernels.launching import INTERPRETED

assert INTERPRETED, "run with TRITON_INTERPRET=1"

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
N, D, V, K = 37, 20, 300, 3
ENGINES = ("recompute", "one-pass", "frozen")


@pytest.fixture(autouse=True)
def narrow_slices(monkeypatch):
    """Several slices of the vocabulary, the last one of another width."""
    monkeypatch.setattr(chunked, "MAX_COLUMNS_GPU", 128)
    chunked.slice_edges.cache_clear()
    assert len(chunked.slice_edges(V, D, gpu=True)) == 4
    yield
    chunked.slice_edges.cache_clear()


def batch(dtype: torch.dtype) -> dict:
    hidden, weight, bias = normal(N, D, seed=1), 0.3 * normal(V, D, seed=2), normal(V, seed=3)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    targets, mask = integers(V, N, seed=4), integers(4, N, seed=5) > 0
    bias = bias.to(F64 if dtype == F64 else F32)
    exact = bk.reference.linear_policy_loss(
        *(hidden.double(), weight.double(), targets, torch.zeros(N, dtype=F64)),
        bias=bias.double(),
        softcap=4.0,
        temperature=0.8,
        return_tokens=True,
        loss="reinforce",
    ).tokens.logprobs
    # Ratios from 0.5 to 1.6, none near a bound.
    old = (exact + torch.linspace(-0.47, 0.69, N, dtype=F64)).float()
    return {
        "hidden": hidden,
        "weight": weight,
        "targets": targets,
        "advantages": normal(N, seed=6).float(),
        "bias": bias,
        "mask": mask,
        "old_logprobs": old,
        "softcap": 4.0,
        "temperature": 0.8,
    }


def run(given: dict, dtype: torch.dtype | None, learns: tuple[str, ...], **options) -> dict[str, torch.Tensor]:
    """Loss, log-probs and gradients; in fp64 on the reference where `dtype` is given."""
    given = dict(given)
    for name in ("hidden", "weight", "bias"):
        leaf = given[name].clone() if dtype is None else given[name].to(dtype)
        given[name] = leaf.requires_grad_(name in learns)
    function = bk.linear_policy_loss if dtype is None else bk.reference.linear_policy_loss
    out = function(**given, **options, return_tokens=True)
    grads = torch.autograd.grad(1.5 * out.loss, [given[name] for name in learns])
    return {"loss": out.loss, "logprobs": out.tokens.logprobs, **dict(zip(learns, grads, strict=True))}


def topk() -> dict:
    ids = torch.stack([torch.randperm(V, generator=torch.Generator().manual_seed(i))[:K] for i in range(N)])
    ids[1, 2] = -1
    return {"rollout_topk_ids": ids, "rollout_topk_logprobs": -2.0 - normal(N, K, seed=7).abs().float()}


LOSSES = {
    "dapo": ({"loss": "dapo", "entropy_coef": 0.1}, ENGINES),
    "bapo": ({"loss": bk.BAPO(target=0.55)}, ENGINES),
    "gspo": ({"loss": "gspo"}, ("recompute", "frozen")),
    "score-centering": ({"loss": "score-centering"}, ("recompute", "one-pass")),
}


@pytest.mark.parametrize("design", ["gemm", "tile"])
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("loss", "engine"), [(loss, e) for loss, (_, engines) in LOSSES.items() for e in engines])
def test_against_the_reference(loss, engine, dtype, design, monkeypatch):
    monkeypatch.setenv("BAPO_KERNELS_DESIGN", design)
    options, given = dict(LOSSES[loss][0]), batch(dtype)
    if loss == "score-centering":
        options |= topk()
    learns = ("hidden",) if engine == "frozen" else ("hidden", "weight", "bias")
    ours = {"backend": "triton", "engine": engine}
    if engine == "one-pass" and design == "gemm":
        ours["memory_budget"] = pool_of(16, given, backend="triton")
    if design == "tile" and engine != "recompute":
        with pytest.raises(ValueError, match=f"engine='{engine}'.*does not keep"):
            run(given, None, learns, **options, **ours)
        return
    want = run(given, F64, learns, **options)
    got = run(given, None, learns, **options, **ours)
    plain = run(given, F64 if dtype == F64 else F32, learns, **options)  # PyTorch's own, rounded in the end
    for name, expected in want.items():
        scale = expected.abs().max()
        peer = (plain[name].to(got[name].dtype).double() - expected).abs().max()
        allowed = 2 * peer + 64 * torch.finfo(F64 if dtype == F64 else F32).eps * scale
        if dtype == BF16 and name in ("hidden", "weight"):  # dz is rounded to bf16 once, and so is the gradient
            allowed += 2**-8 * scale
        assert (got[name].double() - expected).abs().max() <= allowed, name


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("design", ["gemm", "tile"])
def test_scoring_sees_the_bits_of_training(design, dtype, monkeypatch):
    monkeypatch.setenv("BAPO_KERNELS_DESIGN", design)
    given = batch(dtype)
    head = {name: given[name] for name in ("bias", "softcap", "temperature")}
    with torch.no_grad():
        scored = bk.linear_logprobs(
            *(given["hidden"], given["weight"], given["targets"]), mask=given["mask"], backend="triton", **head
        ).logprobs
    given |= {"old_logprobs": scored}
    for engine in ENGINES if design == "gemm" else ENGINES[:1]:
        learns = ("hidden",) if engine == "frozen" else ("hidden", "weight", "bias")
        budget = {"memory_budget": pool_of(16, given, backend="triton")} if engine == "one-pass" else {}
        out = run(given, None, learns, loss="dapo", backend="triton", engine=engine, **budget)
        assert torch.equal(out["logprobs"], scored), engine


def test_designs():
    from bapo_kernels.head.triton.backend import choose_design

    assert choose_design(True, BF16, [BF16]).name == "gemm"
    assert choose_design(False, BF16, [BF16]).name == "tile"
    assert choose_design(False, F32, [F32]).name == "gemm"
    assert choose_design(False, BF16, [F32]).name == "gemm"


def test_plan_says_the_design(monkeypatch):
    size = {"loss": "dapo", "dtype": BF16, "backend": "triton"}
    assert bk.plan(N, D, V, **size).reason.endswith(
        "design gemm: kept products save a pass of four, more than a fused tile could"
    )
    monkeypatch.setenv("BAPO_KERNELS_DESIGN", "tile")
    plan = bk.plan(N, D, V, **size)
    assert plan.engine == "recompute"
    assert plan.reason.endswith("does not keep the products of a tile; design tile: BAPO_KERNELS_DESIGN asks for it")
    assert "design" not in bk.plan(N, D, V, loss="dapo", backend="torch").reason


def test_a_design_that_there_is_not(monkeypatch):
    monkeypatch.setenv("BAPO_KERNELS_DESIGN", "fast")
    with pytest.raises(ValueError, match=r"BAPO_KERNELS_DESIGN must be one of auto, gemm, tile, got 'fast'"):
        run(batch(F32), None, ("hidden",), loss="dapo", backend="triton")


@pytest.mark.parametrize("design", ["gemm", "tile"])
def test_a_bias_in_fp64_widens_a_head_of_16_bits(design, monkeypatch):
    monkeypatch.setenv("BAPO_KERNELS_DESIGN", design)
    given = batch(BF16)
    head = given["hidden"], given["weight"], given["targets"]
    got = bk.linear_logprobs(*head, bias=given["bias"].double(), backend="triton").logprobs
    want = bk.linear_logprobs(*head, bias=given["bias"].double(), backend="reference").logprobs
    assert got.dtype == F64
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
