"""`plan` says which engine a call takes, what it costs, and why; and the call does just that."""

import inspect
import itertools
import re

import pytest
import torch
from engine_batches import ALL, HIDDEN, Trace, batch, pool_of, run, to, trace  # noqa: F401
from helpers import FUSED, normal
from torch.utils._python_dispatch import TorchDispatchMode

import bapo_kernels as bk
from bapo_kernels.head import frozen
from bapo_kernels.head.backends import resolve_budget
from bapo_kernels.head.eager import GemmBackend, TorchEpilogues
from bapo_kernels.head.engines import Work, choose

SIZES = {"tokens": 4096, "hidden_size": 1024, "vocab_size": 50_000}
RL = {"unmasked": 0.7, "active": 0.25}
MIB = 2**20


@pytest.mark.parametrize(
    ("engine", "weight_grad", "shares", "passes"),
    [
        # design.md: recompute f_m + 3 f_a, one-pass f_m + 2 f_a, frozen 2 f_m; one product less with a weight that is not trained
        ("recompute", True, {}, 4.0),
        ("recompute", True, RL, 0.7 + 3 * 0.25),
        ("recompute", False, {}, 3.0),
        ("recompute", False, RL, 0.7 + 2 * 0.25),
        ("one-pass", True, {}, 3.0),
        ("one-pass", True, RL, 0.7 + 2 * 0.25),
        ("one-pass", False, {}, 2.0),
        ("one-pass", False, RL, 0.7 + 0.25),
        ("frozen", False, {}, 2.0),
        ("frozen", False, RL, 1.4),
    ],
)
def test_passes(engine, weight_grad, shares, passes):
    found = bk.plan(**SIZES, engine=engine, weight_grad=weight_grad, **shares)
    assert found.engine == engine
    assert found.passes == pytest.approx(passes)
    assert found.memory_bytes > 0
    assert found.reason == "asked for"


def test_passes_of_the_weight_alone_and_of_nothing():
    assert bk.plan(**SIZES, engine="one-pass", hidden_grad=False).passes == pytest.approx(2.0)
    assert bk.plan(**SIZES, engine="recompute", hidden_grad=False).passes == pytest.approx(3.0)
    for engine in ("auto", "recompute", "one-pass", "frozen"):
        found = bk.plan(**SIZES, hidden_grad=False, weight_grad=False, engine=engine, **RL)
        assert found[:2] == ("recompute", pytest.approx(0.7))
        assert found.reason == "no gradient is wanted"


def test_where_every_token_has_a_gradient():
    """The KL and the entropy bonus reach tokens that are clipped, or have no advantage."""
    for options in ({"kl_coef": 0.1}, {"entropy_coef": 0.1}):
        assert bk.plan(**SIZES, engine="one-pass", **RL, **options).passes == pytest.approx(3 * 0.7)


SMALL, LARGE = 8 * MIB, 4096 * MIB
CHOICES = {
    "trained head, room": ({"memory_budget": LARGE}, "one-pass", "fewest passes"),
    "trained head, no room": ({"memory_budget": SMALL}, "recompute", "memory_budget=8388608 holds the products of"),
    "trained head, no row fits": ({"memory_budget": 1}, "recompute", "memory_budget=1 does not hold"),
    "whole batch": ({"loss": "gspo", "memory_budget": LARGE}, "recompute", "gspo.*whole batch"),
    "top entropy": ({"top_entropy": 0.2, "memory_budget": LARGE}, "recompute", "top_entropy"),
    "sequence weights without old": (
        {"correction": bk.TruncatedIS(level="sequence"), "old_logprobs": False, "memory_budget": LARGE},
        "recompute",
        "TruncatedIS",
    ),
    "sequence weights": (
        {"correction": bk.TruncatedIS(level="sequence"), "memory_budget": LARGE}, "one-pass", "fewest passes"
    ),
    "bf16, room": ({"dtype": torch.bfloat16, "memory_budget": LARGE}, "one-pass", "fewest passes"),
    # d_weight in fp32 beside the bf16 weight takes 195 MiB here
    "bf16, default": ({"dtype": torch.bfloat16, "memory_budget": 200 * MIB}, "recompute", "memory_budget"),
    "fp32, default": ({"memory_budget": 200 * MIB}, "one-pass", "fewest passes"),
    "frozen head, all active": ({"weight_grad": False, "memory_budget": LARGE}, "frozen", "fewest passes"),
    "frozen head, rl": ({"weight_grad": False, "memory_budget": LARGE, **RL}, "one-pass", "fewest passes"),
    "frozen head, rl, whole batch": (
        {"weight_grad": False, "loss": "gspo", "memory_budget": LARGE, **RL}, "recompute", "gspo"
    ),
    "frozen head, no room": ({"weight_grad": False, "memory_budget": SMALL}, "recompute", "d logprob / d hidden"),
    "frozen head, recorded ids, rl": (
        {"weight_grad": False, "loss": "score-centering", "memory_budget": SMALL}, "recompute", "recorded ids"
    ),
    "weight alone": ({"hidden_grad": False, "memory_budget": LARGE}, "one-pass", "fewest passes"),
    "few tokens": ({"tokens": 20, "memory_budget": LARGE}, "one-pass", "fewest passes"),
    "no tokens": ({"tokens": 0, "memory_budget": LARGE}, None, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOICES)
def test_choice(case):
    options, engine, reason = CHOICES[case]
    found = bk.plan(**(SIZES | options))
    assert engine is None or found.engine == engine
    assert re.search(reason, found.reason), found.reason
    assert isinstance(found.memory_bytes, int) and isinstance(found.passes, float)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_devices(device):
    assert bk.plan(**SIZES, device=device, memory_budget=LARGE).engine == "one-pass"


@pytest.mark.parametrize("loss", bk.losses.available())
def test_a_forced_engine_that_cannot_serve(loss):
    whole = loss in ("clip-cov", "gmpo", "gspo", "kl-cov", "luspo", "topr", "vespo")
    if whole:
        with pytest.raises(ValueError, match=f"one-pass.*{loss}"):
            bk.plan(**SIZES, loss=loss, engine="one-pass")
    else:
        assert bk.plan(**SIZES, loss=loss, engine="one-pass").engine == "one-pass"
    with pytest.raises(ValueError, match=r"frozen.*gradient"):
        bk.plan(**SIZES, loss=loss, engine="frozen")


def test_blocks_of_few_rows_do_not_pay_on_a_gpu():
    """There the sum of d_weight is read and written for each block; on a CPU blocks of 64 rows pay."""
    sizes = {
        "tokens": 8192,
        "unmasked": 1.0,
        "active": 1.0,
        "vocab_size": 50_000,
        "hidden_grad": True,
        "bias_grad": False,
    }
    rest = {"late_because": None, "topk": False, "entropy_grad": False, "captured": False, "traced": False}

    def plan(gpu: bool, budget: int):
        backend = GemmBackend(TorchEpilogues(), narrow=gpu, gpu=gpu)
        parts = [(1024, torch.float32, True)]
        return choose("auto", Work.of(backend, torch.float32, parts, torch.float32, budget=budget, **sizes, **rest))

    assert plan(False, 256 * MIB).engine == plan(True, 1024 * MIB).engine == "one-pass"
    few = plan(True, 256 * MIB)
    assert few.engine == "recompute"
    assert "fewer than 2048 do not pay" in few.reason


def test_the_default_budget_is_that_of_the_device(monkeypatch):
    monkeypatch.delenv("BAPO_KERNELS_MEMORY_BUDGET", raising=False)
    assert resolve_budget(None, torch.device("cpu")) == 256 * MIB
    assert resolve_budget(None, torch.device("cuda")) == 1024 * MIB
    monkeypatch.setenv("BAPO_KERNELS_MEMORY_BUDGET", "12345")
    assert resolve_budget(None, torch.device("cuda")) == 12345


def test_the_reference_has_no_engines():
    for engine in ("auto", "recompute", "one-pass", "frozen"):
        with pytest.raises(ValueError, match="backend='reference' has no engines"):
            bk.plan(**SIZES, backend="reference", engine=engine)


BAD = {
    "tokens": [-1, 1.5, "x", None, True],
    "hidden_size": [0, -1, 2.5],
    "vocab_size": [0, -3, "x"],
    "unmasked": [-0.1, 1.1, "x", float("nan")],
    "active": [-0.1, 1.1, "x", float("nan")],
    "dtype": [torch.int32, "float32", None],
    "backend": ["x"],
    "engine": ["x", "one_pass", ["x"]],
    "loss": ["x", 3],
    "memory_budget": [0, -1, 1.5, "x"],
    "correction": ["x", 3],
    "kl_coef": ["x", float("nan")],
    "entropy_coef": ["x", float("inf")],
    "top_entropy": [0.0, 1.5],
    "device": ["nonsense", None, 1.5],
    "weight_grad": ["x", None, 2],
    "hidden_grad": ["x", None],
    "old_logprobs": ["x", None],
}
BAD_CALLS = [(name, value) for name, values in BAD.items() for value in values]


@pytest.mark.parametrize(("name", "value"), BAD_CALLS, ids=[f"{n}={v}" for n, v in BAD_CALLS])
def test_bad_arguments_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        bk.plan(**(SIZES | {name: value}))


def test_more_active_than_unmasked():
    with pytest.raises(ValueError, match=r"active.*0\.5"):
        bk.plan(**SIZES, unmasked=0.5, active=0.6)
    with pytest.raises(TypeError):
        bk.plan(**SIZES, nonsense=1)


def test_arguments_are_those_of_the_loss():
    """Same names and defaults, where they mean the same."""
    of_loss = inspect.signature(bk.linear_policy_loss).parameters
    for name, parameter in inspect.signature(bk.plan).parameters.items():
        if name in of_loss and name not in ("old_logprobs", "vocab_size"):
            assert parameter.default == of_loss[name].default, name


# -- the call does what the plan says ---------------------------------------------------------------------------------


@pytest.fixture
def taken(trace: Trace, monkeypatch):  # noqa: F811
    """The engine of a call."""
    seen, forward = [], frozen.forward
    monkeypatch.setattr(frozen, "forward", lambda *args: seen.append(1) or forward(*args))

    def engine_of(args, learns, **options):
        del seen[:]
        trace.__init__()
        run(args, learns, **options)
        return "frozen" if seen else "one-pass" if trace.capacity else "recompute"

    return engine_of


@pytest.mark.parametrize("pattern", ["full", "rl"])
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("loss", ["bapo", "gspo", "score-centering"])
def test_the_call_does_what_the_plan_says(loss, backend, pattern, taken):
    n, d, v = 320, 9, 300
    mask = torch.arange(n) % 10 < (7 if pattern == "rl" else 10)
    args = batch(loss, n=n, d=d, v=v, mask=mask, bias=None)
    args["advantages"] = torch.where(torch.arange(n) % 4 == 0, 1.0, 0.0 if pattern == "rl" else -1.0).double()
    active = float((mask & (args["advantages"] != 0)).double().mean())
    shares = {"unmasked": float(mask.double().mean()), "active": active}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        typed = to(args, dtype, ("hidden", "weight"))
        if dtype != torch.float64:
            typed = to(typed, torch.float32, [k for k in typed if k not in ("hidden", "weight")])
        for learns, budget in itertools.product(
            (ALL, HIDDEN, (False, True, True), (False,) * 3), (None, 200_000, 20_000)
        ):
            given = {"backend": backend, "memory_budget": budget}
            plan = bk.plan(
                n, d, v, loss=loss, dtype=dtype, hidden_grad=learns[0], weight_grad=learns[1], **shares, **given
            )
            assert taken(typed, learns, **given) == plan.engine, (dtype, learns, budget, plan)


class Products(TorchDispatchMode):
    """Counts the operations of matrix products."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._overloadpacket.__name__
        assert name not in ("bmm", "baddbmm", "matmul")
        if name in ("mm", "addmm", "addmm_"):
            a, b = args[-2:] if name != "mm" else args[:2]
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("pattern", ["full", "rl"])
@pytest.mark.parametrize(
    ("engine", "learns"),
    [
        ("recompute", ALL),
        ("one-pass", ALL),
        ("recompute", HIDDEN),
        ("one-pass", HIDDEN),
        ("frozen", HIDDEN),
        ("recompute", (False, True, False)),
        ("one-pass", (False, True, False)),
        ("one-pass", (False, False, False)),
    ],
)
def test_rows_without_a_gradient_cost_nothing(engine, learns, pattern, backend):
    n, d, v = 1600, 16, 500
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    counted, active = (1120, 400) if pattern == "rl" else (n, n)
    mask = torch.zeros(n, dtype=torch.bool)
    mask[order[:counted]] = True
    advantages = torch.zeros(n)
    advantages[order[:active]] = normal(active, seed=1).float().abs() + 0.1
    args = {
        "hidden": normal(n, d).float(),
        "weight": normal(v, d, seed=2).float(),
        "targets": torch.arange(n) % v,
        "advantages": advantages,
        "mask": mask,
        "loss": "ppo",
    }
    for rows in (None, 64, 320):  # on-policy: no token is clipped
        budget = rows and pool_of(rows, args, learns, backend=backend)
        plan = bk.plan(
            n, d, v, loss="ppo", unmasked=counted / n, active=active / n, engine=engine, backend=backend,
            hidden_grad=learns[0], weight_grad=learns[1], memory_budget=budget, old_logprobs=False,
        )  # fmt: skip
        with Products() as products:
            run(args, learns, engine=engine, backend=backend, memory_budget=budget)
        # Rows go into a product in units of 16, and a small pool gives its rows away when it is half full.
        padding = 15 / (rows // 2) * sum(learns[:2]) * active / n if rows and engine == "one-pass" else 0.0
        assert 0.99 * plan.passes < products.flops / (2 * n * v * d) < 1.02 * plan.passes + padding


def test_parts_of_a_weight_that_are_not_trained_cost_nothing():
    """LoRA on the head: d_weight is a product with the columns that learn."""
    n, d, v = 1600, 32, 500
    base, extra = normal(v, d).float(), normal(v, 8, seed=1).float().requires_grad_()
    args = {"targets": torch.arange(n) % v, "advantages": torch.ones(n), "loss": "ppo"}
    for engine, passes in (("recompute", 3 + 8 / 40), ("one-pass", 2 + 8 / 40)):
        hidden = normal(n, d + 8, seed=2).float().requires_grad_()
        with Products() as products:
            bk.linear_policy_loss(hidden, (base, extra), **args, engine=engine).loss.backward()
        assert products.flops / (2 * n * v * (d + 8)) == pytest.approx(passes, rel=0.03)
