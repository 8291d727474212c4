"""What has to hold on a GPU: values and gradients, and what only a GPU has: streams, graphs, devices, settings, an allocator.

`pytest -m gpu` is all of it. Whatever a CPU can run too runs there, on the torch backend, so that the tests themselves are known to work.
"""

from typing import NamedTuple

import pytest
import torch
from engine_batches import ALL, HIDDEN, LEAVES, Result, assert_identical, batch, run
from helpers import as_under_capture, assert_bits
from torch import Tensor

import bapo_kernels as bk
from bapo_kernels.cli.check import Case, Shape, check
from bapo_kernels.head.api import linear_logprobs
from bapo_kernels.head.engines import Plan
from bapo_kernels.head.rows import Selection
from bapo_kernels.policy import linear_policy_loss

CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device (torch.cuda.is_available() is False)"),
]
MIB, GIB = 2**20, 2**30


class Place(NamedTuple):
    device: str
    backend: str
    design: str = "auto"

    def __str__(self) -> str:
        return "-".join(part for part in self if part != "auto")

    def move(self, args: dict) -> dict:
        return {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in args.items()}


CPU = Place("cpu", "torch")
GPUS = [Place("cuda", "torch"), Place("cuda", "triton", "gemm"), Place("cuda", "triton", "tile")]


def places(*which: Place):
    return pytest.mark.parametrize(
        "place", [pytest.param(p, marks=CUDA if p.device == "cuda" else [], id=str(p)) for p in which], indirect=True
    )


everywhere, on_gpus = places(CPU, *GPUS), places(*GPUS)


@pytest.fixture
def place(request, monkeypatch) -> Place:
    monkeypatch.setenv("BAPO_KERNELS_DESIGN", request.param.design)
    return request.param


@pytest.fixture
def as_users_run_it():
    """Without the settings of `conftest.py`: deterministic variants of PyTorch's operations have waits of their own."""
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = True


ENGINES = [
    pytest.param(engine, learns, id=f"{engine}-{'trained' if learns == ALL else 'frozen'}")
    for engine, learns in (
        ("recompute", ALL),
        ("one-pass", ALL),
        ("recompute", HIDDEN),
        ("one-pass", HIDDEN),
        ("frozen", HIDDEN),
    )
]
engines = pytest.mark.parametrize(("engine", "learns"), ENGINES)


def skip_unless_served(
    place: Place, engine: str, dtype: torch.dtype, learns=ALL, size=(150, 65, 1003), memory_budget: int = 64 * GIB
) -> Plan:
    """A design without an engine says so; that it refuses is tested elsewhere."""
    try:
        return bk.plan(
            *size,
            loss="dapo",
            dtype=dtype,
            device=place.device,
            backend=place.backend,
            engine=engine,
            weight_grad=learns[1],
            memory_budget=memory_budget,
        )
    except ValueError as reason:
        pytest.skip(str(reason))


def with_garbage(args: dict) -> dict:
    """The same call, with nothing to rely on in the rows that do not count."""
    off = ~args["mask"]
    dirty = dict(args, targets=args["targets"].masked_fill(off, 2**40))
    for name in ("hidden", "advantages", "old_logprobs", "rollout_logprobs"):
        dirty[name] = args[name].clone()
        dirty[name][off] = float("nan")
    return dirty


def assert_rows_alike(place: Place, got: Tensor, want: Tensor, name: str) -> None:
    """Of calls with other rows beside these. A GPU's library may then sum their products in another order; the fused tiles may not."""
    if place.device == "cpu" or place.design == "tile":
        assert_bits(got, want, name)
    else:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True, msg=lambda text: f"{name}: {text}")


def call(place: Place, args: dict, engine: str = "recompute", learns=ALL, **options) -> Result:
    """Forward and backward, with room for one pass in a single block."""
    return run(args, learns, backend=place.backend, engine=engine, **{"memory_budget": GIB, **options})


# Against fp64: errors at most twice PyTorch's own on full logits in the same dtype, and some units in the last place

HEAD = {"mask": "@mask", "temperature": 0.8}
LOSS = {**HEAD, "old_logprobs": "@old", "rollout_logprobs": "@rollout", "memory_budget": GIB}
FROZEN = ("weight", "bias")
CASES = [
    Case("log-probs", linear_logprobs, HEAD),
    Case("entropy, top-k", linear_logprobs, {**HEAD, "bias": "@bias", "return_entropy": True, "topk_ids": "@topk_ids"}),
    Case(
        "every transform", linear_logprobs, {"softcap": 5.0, "logit_scale": 0.5, "vocab_size": "@real", "bias": "@bias"}
    ),
    *(
        Case(f"{x}, {e}", linear_policy_loss, {**LOSS, "loss": x, "engine": e})
        for x in ("dapo", "bapo")
        for e in ("recompute", "one-pass")
    ),
    *(
        Case(f"dapo, {e}, frozen head", linear_policy_loss, {**LOSS, "loss": "dapo", "engine": e}, FROZEN)
        for e in ("recompute", "one-pass", "frozen")
    ),
]
BASE = Shape(37, 72, 1000)
INPUTS = [
    *((BASE, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)),
    (Shape(1, 65, 129), torch.bfloat16),
    (Shape(5, 65, 151669), torch.bfloat16),
    (Shape(5, 65, 151669), torch.float32),
    (Shape(70000, 8, 129), torch.bfloat16),
]


@everywhere
@pytest.mark.parametrize(
    ("shape", "dtype"), INPUTS, ids=[f"{s.tokens}x{s.hidden}x{s.vocab}-{str(d)[6:]}" for s, d in INPUTS]
)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_values_and_gradients_against_fp64(place, case, shape, dtype):
    if place == CPU and dtype in (torch.float16, torch.float64):
        pytest.skip("on CPU these dtypes are checked elsewhere")
    learns = HIDDEN if case.frozen else ALL
    skip_unless_served(
        place, case.options.get("engine", "recompute"), dtype, learns, (shape.tokens, shape.hidden, shape.vocab)
    )
    (result,) = check(case, place.device, [place.backend], dtype, shape)
    assert result.passed, f"{result.output}: off by {result.error:.2e}, allowed {result.allowed:.2e}"


# Bits


@everywhere
@engines
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_same_call_gives_the_same_bits(place, engine, learns, dtype):
    skip_unless_served(place, engine, dtype, learns)
    args = place.move(batch("bapo", dtype=dtype, return_tokens=True))
    assert_identical(call(place, args, engine, learns), call(place, args, engine, learns))


@everywhere
@engines
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scoring_gives_the_bits_of_training(place, engine, learns, dtype):
    """So that an on-policy ratio is exactly 1."""
    skip_unless_served(place, engine, dtype, learns)
    args = place.move(batch("dapo", dtype=dtype, return_tokens=True))
    trained = call(place, args, engine, learns).out.tokens.logprobs
    head = [args[name] for name in ("hidden", "weight", "targets")]
    options = {"bias": args["bias"], "mask": args["mask"], "backend": place.backend}
    with torch.no_grad():
        scored = bk.linear_logprobs(*head, **options).logprobs
        if engine == "recompute":
            assert_bits(scored, trained, "all rows")
        assert_rows_alike(place, scored, trained, "all rows")
        some = slice(17, 60)
        options["mask"] = args["mask"][some]
        part = bk.linear_logprobs(head[0][some], head[1], head[2][some], **options).logprobs
    assert_rows_alike(place, part, trained[some], "some rows")


def _medium():
    torch.set_float32_matmul_precision("medium")


def _tf32():
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def _reduced():
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True


@pytest.fixture
def settings():
    """As they were before, afterwards."""
    matmul = torch.backends.cuda.matmul
    names = (
        "allow_fp16_accumulation",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    )
    before = [getattr(matmul, name) for name in names]
    yield
    torch.set_float32_matmul_precision("highest")
    for setting in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        setting.fp32_precision = "none"
    for name, value in zip(names, before, strict=True):
        setattr(matmul, name, value)


@everywhere
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("change", [_medium, _tf32, _reduced], ids=lambda f: f.__name__.strip("_"))
def test_settings_of_the_user_change_no_bit(place, change, dtype, settings):
    args = place.move(batch("dapo", d=256, dtype=dtype, return_tokens=True, entropy_coef=0.01))
    want = call(place, args)
    change()
    assert_identical(call(place, args), want)
    with torch.autocast(place.device, dtype=torch.bfloat16):
        assert_identical(call(place, args), want)


# What the host waits for


@on_gpus
@engines
@pytest.mark.parametrize("loss", ["dapo", "bapo", "gspo"])
def test_the_host_waits_for_nothing_but_the_count_of_rows(place, engine, learns, loss, monkeypatch, as_users_run_it):
    """The same is counted on a CPU in test_sync.py. One pass counts the rows that stay in its pool as it goes."""
    if engine == "one-pass":
        pytest.skip("one pass counts rows as it goes")
    skip_unless_served(place, engine, torch.bfloat16, learns)
    args = place.move(batch(loss, dtype=torch.bfloat16, return_tokens=True))
    call(place, args, engine, learns)  # compiles
    count = Selection.of

    def counted(wanted: Tensor) -> Selection:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return count(wanted)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(Selection, "of", counted)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(place, args, engine, learns)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def replayed(place: Place, args: dict, fresh: dict, monkeypatch) -> Result:
    """A step captured with `args` and replayed on `fresh`. A CPU has no graphs: there, a step as under capture, with rows masked and not
    counted."""
    leaves = {name: args[name].detach().clone().requires_grad_() for name in LEAVES}
    static = args | leaves

    def step() -> bk.PolicyLossOutput:
        for t in leaves.values():
            t.grad = None
        out = bk.linear_policy_loss(**static, backend=place.backend, engine="recompute")
        out.loss.backward()
        return out

    def refill() -> None:
        with torch.no_grad():
            for name, t in static.items():
                if isinstance(t, Tensor):
                    t.copy_(fresh[name])

    if place.device == "cpu":
        as_under_capture(monkeypatch)
        refill()
        out = step()
        monkeypatch.undo()
    else:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        refill()
        graph.replay()
        torch.cuda.synchronize()
    return Result(out, {name: t.grad for name, t in leaves.items()})


@everywhere
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("loss", ["dapo", "bapo", "gspo"])
def test_a_captured_step_replayed_equals_eager(place, loss, dtype, monkeypatch, as_users_run_it):
    args, fresh = (place.move(batch(loss, dtype=dtype, seed=s, return_tokens=True)) for s in (0, 100))
    fresh = with_garbage(fresh)
    got = replayed(place, args, fresh, monkeypatch)
    want = run(fresh, backend=place.backend, engine="recompute")
    assert_rows_alike(place, got.out.tokens.logprobs, want.out.tokens.logprobs, "log-probs")
    tolerance = 16 * torch.finfo(dtype).eps  # sums over other numbers of rows
    for name, t in want.tensors().items():
        found = got.tensors()[name]
        if t is not None and t.is_floating_point():
            assert torch.equal(found.isnan(), t.isnan()), name
            size = float(t.nan_to_num().abs().max())
            assert float((found - t).nan_to_num().abs().max()) <= tolerance * max(size, 1e-3), name


@on_gpus
@engines
def test_a_side_stream_is_the_stream_of_all_work(place, engine, learns):
    """The inputs arrive late on it: whatever ran elsewhere would have read NaN."""
    skip_unless_served(place, engine, torch.bfloat16, learns)
    args = place.move(batch("dapo", dtype=torch.bfloat16, return_tokens=True))
    want = call(place, args, engine, learns)
    late = {k: torch.full_like(v, float("nan")) if k in LEAVES else v for k, v in args.items()}
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for name in LEAVES:
            late[name].copy_(args[name])
        got = call(place, late, engine, learns)
    side.synchronize()
    assert_identical(got, want)


@on_gpus
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@engines
def test_another_device_than_the_current_one(place, engine, learns):
    skip_unless_served(place, engine, torch.float32, learns)
    args = place.move(batch("bapo", dtype=torch.float32, return_tokens=True))
    want = call(place, args, engine, learns)
    assert torch.cuda.current_device() == 0
    got = call(place, {k: v.to("cuda:1") if isinstance(v, Tensor) else v for k, v in args.items()}, engine, learns)
    for name, t in want.tensors().items():
        if t is not None:
            assert got.tensors()[name].device.index == 1
            torch.testing.assert_close(got.tensors()[name].to(t.device), t, rtol=1e-5, atol=1e-6, equal_nan=True)


@on_gpus
@pytest.mark.parametrize("fullgraph", [False, True], ids=["with breaks", "fullgraph"])
def test_compiled_equals_eager(place, fullgraph):
    """The same on a CPU, and much more, is in test_compile.py."""
    args = place.move(batch("dapo", dtype=torch.float32))
    args.pop("loss")

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        options = args | {"hidden": torch.tanh(hidden), "weight": weight, "loss": "dapo", "backend": place.backend}
        return 2 * bk.linear_policy_loss(**options).loss

    torch.compiler.reset()  # a frame that broke once is not tried again
    found = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=fullgraph)):
        leaves = [args[name].detach().clone().requires_grad_() for name in ("hidden", "weight")]
        loss = function(*leaves)
        loss.backward()
        found.append([loss.detach(), *(t.grad for t in leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


# Memory and size


@on_gpus
@engines
@pytest.mark.parametrize("budget", [256 * MIB, GIB])
def test_memory_is_what_the_plan_says(place, engine, learns, budget, as_users_run_it):
    n, d, v, dtype = 4096, 512, 64000, torch.bfloat16
    plan = skip_unless_served(place, engine, dtype, learns, (n, d, v), budget)
    given = {"loss": "dapo", "backend": place.backend, "engine": engine, "memory_budget": budget}
    hidden = torch.randn(n, d, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(v, d, device="cuda", dtype=dtype).div_(d**0.5).requires_grad_(learns[1])
    targets, advantages = torch.randint(v, (n,), device="cuda"), torch.randn(n, device="cuda")

    def extra() -> int:
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        bk.linear_policy_loss(hidden, weight, targets, advantages, **given).loss.backward()
        torch.cuda.synchronize()
        gradients = sum(t.grad.nbytes for t in (hidden, weight) if t.grad is not None)
        return torch.cuda.max_memory_allocated() - before - gradients

    extra()  # compiles, and the vendor's library takes its workspace
    vectors = 64 * 8 * n
    assert extra() <= plan.memory_bytes + vectors + 4 * MIB, plan


def needs_memory(bytes_wanted: int) -> None:
    free = torch.cuda.mem_get_info()[0]
    if free < bytes_wanted:
        pytest.skip(f"{bytes_wanted / GIB:.0f} GiB wanted, {free / GIB:.0f} free")


@everywhere
def test_offsets_of_more_than_31_bits_in_a_tile(place):
    """Rows times the width of a slice, in one block. A row does not depend on how many stand beside it."""
    n, d, v, last = (2**19 + 1040, 16, 4096, 48) if place.device == "cuda" else (544, 16, 4096, 48)
    if place.device == "cuda":
        needs_memory(6 * 4 * n * v)
    g = torch.Generator(place.device).manual_seed(0)
    hidden = torch.randn(n, d, generator=g, device=place.device).bfloat16()
    weight = torch.randn(v, d, generator=g, device=place.device).bfloat16()
    targets = torch.randint(v, (n,), generator=g, device=place.device)
    upstream = torch.randn(n, generator=g, device=place.device)

    def step(rows: slice) -> list[Tensor]:
        h, w = hidden[rows].clone().requires_grad_(), weight.clone().requires_grad_()
        out = bk.linear_logprobs(h, w, targets[rows], return_entropy=True, backend=place.backend, memory_budget=2**40)
        (out.logprobs * upstream[rows]).sum().backward()
        return [out.logprobs.detach(), out.entropy.detach(), h.grad, w.grad]

    *whole, d_weight = step(slice(0, n))
    for rows in (slice(n - last, n), slice(0, last)):
        for name, a, b in zip(("log-probs", "entropy"), whole[:2], step(rows)[:2], strict=True):
            assert_rows_alike(place, a[rows], b, name)
    pieces = [step(slice(i, i + n // 4 // 16 * 16)) for i in range(0, n, n // 4 // 16 * 16)]
    torch.testing.assert_close(whole[2], torch.cat([p[2] for p in pieces]), rtol=2e-2, atol=1e-6)
    summed = sum(p[3].float() for p in pieces)
    assert float((d_weight.float() - summed).norm() / summed.norm()) < 1e-2


@everywhere
def test_offsets_of_more_than_31_bits_in_the_weight(place):
    """Targets in the last rows of a weight of more than 2^31 elements."""
    n, d, v = (32, 16384, 140000) if place.device == "cuda" else (32, 64, 3000)
    if place.device == "cuda":
        needs_memory(4 * 2 * v * d)
    g = torch.Generator(place.device).manual_seed(0)
    hidden = torch.randn(n, d, generator=g, device=place.device).bfloat16().requires_grad_()
    weight = torch.empty(v, d, device=place.device, dtype=torch.bfloat16)
    for part in weight.split(4096):
        part.copy_(torch.randn(part.shape, generator=g, device=place.device) / d**0.5)
    weight.requires_grad_()
    targets = v - 1 - torch.arange(n, device=place.device)
    logprobs = bk.linear_logprobs(hidden, weight, targets, backend=place.backend).logprobs
    logprobs.sum().backward()
    with torch.no_grad():
        z = torch.cat([hidden.double() @ part.double().t() for part in weight.split(4096)], 1)
        want = z.log_softmax(1)
        torch.testing.assert_close(logprobs.double(), want.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-4)
        dz = -want.exp()
        dz[torch.arange(n, device=place.device), targets] += 1
        for rows in (slice(v - 64, v), slice(0, 64)):
            expected = dz[:, rows].t() @ hidden.double()
            error = (weight.grad[rows].double() - expected).norm() / expected.norm()
            assert float(error) < 1e-2, rows


# Invalid values


@everywhere
@engines
def test_an_invalid_target_is_nan_and_no_other_row_sees_it(place, engine, learns, monkeypatch):
    """On a CPU it is a ValueError, as it is with BAPO_KERNELS_CHECK=1, unless nobody looks."""
    skip_unless_served(place, engine, torch.float32, learns)
    if place.device == "cpu":
        monkeypatch.setattr("bapo_kernels.head.inputs.values_are_checked", lambda device: False)
    args = place.move(
        batch("reinforce", dtype=torch.float32, return_tokens=True, mask=torch.ones(150, dtype=torch.bool))
    )
    want = call(place, args, engine, learns).out.tokens.logprobs
    bad = dict(args, targets=args["targets"].clone())
    bad["targets"][7], bad["targets"][11] = 1003, -3
    got = call(place, bad, engine, learns).out.tokens.logprobs
    assert got[[7, 11]].isnan().all()
    others = torch.ones(150, dtype=torch.bool, device=place.device)
    others[[7, 11]] = False
    assert_bits(got[others], want[others])
    monkeypatch.undo()
    monkeypatch.setenv("BAPO_KERNELS_DESIGN", place.design)
    monkeypatch.setenv("BAPO_KERNELS_CHECK", "1")
    with pytest.raises(ValueError, match="targets must lie in"):
        call(place, bad, engine, learns)


@everywhere
@engines
def test_garbage_in_masked_rows_changes_no_bit(place, engine, learns):
    skip_unless_served(place, engine, torch.bfloat16, learns)
    args = place.move(batch("dapo", dtype=torch.bfloat16, return_tokens=True))
    assert_identical(call(place, with_garbage(args), engine, learns), call(place, args, engine, learns))
