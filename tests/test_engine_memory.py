"""Peak memory of the engines: within the budget, and within what `plan` says, whatever the number of tokens.

Measured by PyTorch's record of its allocations, which is exact and the same on every run (the BLAS library's own buffers are not in it)."""

import pytest
import torch
from helpers import normal
from torch.profiler import ProfilerActivity, profile

import bapo_kernels as bk

MIB = 2**20
V, D = 20_000, 64
PATTERNS = {"full": (1.0, 1.0), "rl": (0.7, 0.25)}


@pytest.fixture(autouse=True)
def _one_thread():
    """Of many small products, where threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def peak(function) -> int:
    """Bytes alive at once, beyond those at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def inputs(n: int, pattern: str, dtype=torch.float32, v: int = V, d: int = D) -> dict:
    """As many tokens that count, and that have a gradient, as the pattern says, at places without an order."""
    unmasked, active = PATTERNS[pattern]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    args = {
        "hidden": normal(n, d, dtype=dtype),
        "weight": normal(v, d, seed=1, dtype=dtype) * 0.2,
        "targets": torch.arange(n) * 7 % v,
        "advantages": torch.zeros(n),
        "mask": torch.zeros(n, dtype=torch.bool),
        "loss": "ppo",
    }
    args["mask"][order[: round(n * unmasked)]] = True
    args["advantages"][order[: round(n * active)]] = 1.0
    return args


def measured(args: dict, learns, **options) -> int:
    leaves = {k: args[k].clone().requires_grad_(f) for k, f in zip(("hidden", "weight"), learns, strict=True)}

    def call():
        bk.linear_policy_loss(**(args | leaves), **options).loss.backward()

    gradients = sum(t.nbytes for t in leaves.values() if t.requires_grad)
    return peak(call) - gradients


def vectors(n: int) -> int:
    """A few vectors of N numbers, of which a loss and its metrics are made."""
    return MIB // 4 + 80 * 4 * n


ENGINES = {
    "recompute": ("recompute", (True, True)),
    "one-pass": ("one-pass", (True, True)),
    "frozen": ("frozen", (True, False)),
    "recompute, frozen head": ("recompute", (True, False)),
    "one-pass, frozen head": ("one-pass", (True, False)),
}


CASES = [(e, n, b) for e in ("recompute", "one-pass", "frozen") for n, b in ((256, 32), (4096, 32), (4096, 8))]
CASES += [(e, 4096, 8) for e in ENGINES if e.endswith("frozen head")]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("engine", "n", "budget"), CASES)
def test_within_the_budget_and_the_plan(engine, n, budget, pattern):
    engine, learns = ENGINES[engine]
    unmasked, active = PATTERNS[pattern]
    options = {"engine": engine, "memory_budget": budget * MIB, "backend": "cpu"}
    plan = bk.plan(
        n, D, V, loss="ppo", unmasked=unmasked, active=active, weight_grad=learns[1], old_logprobs=False, **options
    )
    found = measured(inputs(n, pattern), learns, **options)
    assert plan.memory_bytes <= budget * MIB
    assert found <= plan.memory_bytes + vectors(n), (
        f"{found / MIB:.2f} MiB, and the plan says {plan.memory_bytes / MIB:.2f}"
    )
    logits = n * V * 4
    assert n == 256 or found < logits / 8


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_dtypes(dtype, engine):
    """Sums in fp32 wait beside a weight of bf16: 20 MiB here."""
    engine, learns = ENGINES[engine]
    n, d = 1024, 256
    options = {"engine": engine, "memory_budget": 48 * MIB, "backend": "cpu"}
    plan = bk.plan(n, d, V, loss="ppo", dtype=dtype, weight_grad=learns[1], old_logprobs=False, **options)
    found = measured(inputs(n, "full", dtype, d=d), learns, **options)
    assert found <= plan.memory_bytes + vectors(n), f"{found / MIB:.2f} MiB, not {plan.memory_bytes / MIB:.2f}"


@pytest.mark.parametrize("engine", ["recompute", "one-pass", "frozen"])
def test_the_torch_backend(engine):
    learns = (True, engine != "frozen")
    options = {"engine": engine, "memory_budget": 16 * MIB, "backend": "torch"}
    plan = bk.plan(1024, D, V, loss="ppo", weight_grad=learns[1], old_logprobs=False, **options)
    found = measured(inputs(1024, "full"), learns, **options)
    assert found <= plan.memory_bytes + vectors(1024), f"{found / MIB:.2f} MiB, not {plan.memory_bytes / MIB:.2f}"


@pytest.mark.parametrize("engine", ["recompute", "one-pass"])
def test_a_part_that_is_frozen_has_no_gradient_anywhere(engine):
    """LoRA on the head: nothing of V times D beside the gradient of the small part."""
    d, v = 256, 40_000
    args = inputs(256, "full", v=v, d=d)
    extra = normal(v, 4, seed=3, dtype=torch.float32).requires_grad_()
    hidden = normal(256, d + 4, seed=4, dtype=torch.float32).requires_grad_()
    given = args | {"hidden": hidden, "weight": (args["weight"], extra)}
    budget = 16 * MIB

    def call():
        bk.linear_policy_loss(**given, engine=engine, memory_budget=budget).loss.backward()

    found = peak(call) - hidden.nbytes - extra.nbytes
    assert found < args["weight"].nbytes
    assert found < budget + vectors(256)


def test_the_first_gradient_of_the_weight_is_not_copied():
    v, d = 4000, 512
    found = measured(inputs(32, "full", v=v, d=d), (True, True), engine="one-pass", memory_budget=4 * MIB)
    assert found < 4 * MIB + vectors(32) < v * d * 4


@pytest.mark.parametrize("engine", ["recompute", "one-pass", "frozen"])
def test_without_gradient_there_is_only_a_tile(engine):
    args = inputs(2048, "full")
    options = {"engine": engine, "memory_budget": 8 * MIB, "backend": "cpu"}
    plan = bk.plan(2048, D, V, loss="ppo", hidden_grad=False, weight_grad=False, **options)
    found = peak(lambda: bk.linear_policy_loss(**args, **options))
    assert found <= plan.memory_bytes + vectors(2048)
