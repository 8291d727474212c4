"""The kernel of the token-local losses against their rules in PyTorch, in Triton's interpreter. Collected only by
`test_triton_interpreter.py`, which turns it on."""

import itertools
from dataclasses import replace

import pytest
import torch
from batches import Batch
from helpers import INF, NAN, assert_bits, normal
from torch import Tensor

import bapo_kernels as bk
from bapo_kernels import controller
from bapo_kernels.launching import find_config
from bapo_kernels.layout import Layout
from bapo_kernels.losses import triton as fused
from bapo_kernels.losses.base import TokenLoss, Tokens
from bapo_kernels.losses.triton import launch
from bapo_kernels.metrics import metrics

assert launch.INTERPRETED, "run with TRITON_INTERPRET=1"

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities

DUAL = {"dual_clip": 3.0}
LOSSES = {
    "grpo": bk.GRPO(),
    "grpo-dual": bk.GRPO(**DUAL),
    "grpo-wide": bk.GRPO(clip_low=2, clip_high=0),
    "ppo": bk.PPO(),
    "dapo": bk.DAPO(),
    "dcpo": bk.DCPO(),
    "dcpo-dual": bk.DCPO(eps_low=0.05, eps_high=0.4, ratio_cap=2.0, **DUAL),
    "bapo": bk.BAPO(),
    "bapo-options": bk.BAPO(target=0.9, measure="gradient", order="low-first", weighting="none", **DUAL),
    "bapo-fixed": bk.BAPO.fixed(0.7, 1.3),
    "bapo-tensors": bk.BAPO.fixed(torch.tensor(0.7), torch.tensor(1.3, dtype=torch.float64)),
    "cispo": bk.CISPO(),
    "cispo-low": bk.CISPO(ratio_low=0.5, ratio_high=2.0),
    "dppo-tv": bk.DPPO(),
    "dppo-kl": bk.DPPOKL(),
    "dppo-options": bk.DPPO(divergence="kl", delta_low=0.01, delta_high=0.3, ratio_cap=1.2),
    "bpo": bk.BPO(),
    "bpo-options": bk.BPO(smoothing=0.01, cap=1.1, clip_low=0.5, clip_high=0.05),
    "sapo": bk.SAPO(),
    "sapo-steep": bk.SAPO(tau_pos=900.0, tau_neg=0.5),
    "dro": bk.DRO(beta=0.3),
    "reinforce": bk.Reinforce(),
    "topr": bk.TOPR(ratio="token"),
    "topr-options": bk.TOPR(ratio="token", floor=0.2, cap=1.5),
}
CLIPPING = [name for name in LOSSES if not name.startswith(("cispo", "sapo", "dro", "reinforce", "topr"))]
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


def tokens(logprobs, old, rollout, advantages, mask) -> Tokens:
    layout = Layout.of("logprobs", logprobs.shape, None, logprobs.device)
    return Tokens(logprobs.detach().clone().requires_grad_(), old, rollout, advantages, mask, layout)


def grid(masked: bool = True) -> Tokens:
    """Ratios below, on and above the bounds and beyond their clamp, by the sign of the advantage, of likely and unlikely tokens. Many
    programs of the kernel, and a remainder."""
    on = [torch.tensor(v).log().item() for v in (0.6, 0.7, 0.8, 1.2, 1.28, 1.3, 3.0)]
    shifts = [-25.0, -20.0, -3.0, -0.6, -0.1, 0.0, 0.1, 0.6, 1.5, 3.0, 20.0, 25.0, *on]
    cells = list(itertools.product((-1e-3, -0.4, -2.5, -60.0), shifts, (-0.7, 0.0, 1.3)))
    old, shift, advantages = torch.tensor(cells).unbind(1)
    rollout = old - 0.3 * normal(len(cells), seed=1, dtype=torch.float32).abs()
    rollout[::7] = old[::7]
    rollout[::11] = -INF
    mask = normal(len(cells), seed=2) < 1 if masked else torch.ones(len(cells), dtype=torch.bool)
    return tokens(old + shift, old, rollout, advantages, mask)


def by_kernel(loss, x: Tokens) -> fused.FusedTerm:
    with fused.using("triton"):
        term = fused.evaluate(loss, x)
    assert term is not None
    return term


def results(x: Tokens, term: TokenLoss) -> dict[str, Tensor]:
    """Everything of a term, 0 where masked."""
    (coef,) = torch.autograd.grad(x.active(term.loss).sum(), x.logprobs)
    clipped = torch.zeros_like(x.mask, dtype=torch.int8) if term.clipped is None else term.clipped
    ratio = term.ratio if isinstance(term, fused.FusedTerm) else x.active(x.ratio)
    found = {"loss": x.active(term.loss), "coef": coef, "ratio": ratio, "clipped": torch.where(x.mask, clipped, 0)}
    return {k: v.detach() for k, v in found.items()} | metrics(x, term, torch.zeros(()), None, None)


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        if value.is_floating_point():
            # The covariance of PyTorch is centred in fp32, by means that are rounded.
            atol = 2e-6 if name == "entropy_clip_cov" else 2e-7
            torch.testing.assert_close(
                got[name], value, rtol=5e-7, atol=atol, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}"
            )
        else:
            assert_bits(got[name], value, name)


def exact_covariance(x: Tokens, clipped: Tensor) -> Tensor:
    lp, kept = (t.detach().double()[x.mask] for t in (x.logprobs, torch.where(clipped == 0, x.advantages, 0.0)))
    return ((lp - lp.mean()) * (kept - kept.mean())).mean()


@every_loss
def test_the_kernel_is_the_rule(loss):
    x = grid()
    got, want = results(x, by_kernel(loss, x)), results(x, loss.rule(x))
    covariance = got.pop("entropy_clip_cov"), want.pop("entropy_clip_cov")
    if loss.name == "sapo":  # the rule in fp32 loses 1 - sigmoid where that is small, the kernel does not
        fields = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")
        x64 = tokens(*(getattr(x, f).double() for f in fields), x.mask)
        exact, coef, rounded = results(x64, loss.rule(x64))["coef"], got.pop("coef"), want.pop("coef")
        assert ((coef - exact).abs() <= 2 * (rounded - exact).abs() + 1e-6 * exact.abs()).all()
    assert_same(got, want)
    torch.testing.assert_close(covariance[0].double(), exact_covariance(x, want["clipped"]), rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize("name", CLIPPING)
def test_the_grid_has_every_cell(name):
    x = grid()
    flags = LOSSES[name].rule(x).clipped[x.mask].tolist()
    found = set(zip(x.advantages[x.mask].sign().tolist(), flags, strict=True))
    dual = {(-1, 1)} if getattr(LOSSES[name], "dual_clip", None) else set()
    below = set() if name == "grpo-wide" else {(-1, -1)}
    assert found == {(1, 1), (1, 0), (0, 0), (-1, 0)} | below | dual


@every_loss
def test_what_masked_tokens_hold(loss):
    x = grid()
    fields = ("old_logprobs", "rollout_logprobs", "advantages")
    clean = replace(x, **{f: x.active(getattr(x, f)) for f in fields})
    broken = tokens(*(torch.where(x.mask, getattr(x, f), NAN) for f in ("logprobs", *fields)), x.mask)
    got, want = by_kernel(loss, broken), by_kernel(loss, clean)
    for name in ("loss", "ratio", "clipped"):
        assert_bits(getattr(got, name).detach(), getattr(want, name).detach(), name)
        assert not getattr(got, name)[~x.mask].any(), name
    for name, value in (want.means | want.metrics).items():
        assert_bits((got.means | got.metrics)[name], value, name)


@every_loss
@pytest.mark.parametrize("field", ["logprobs", "old_logprobs", "rollout_logprobs", "advantages"])
def test_nan_of_active_tokens_shows(loss, field):
    values = {"logprobs": [-1.0, -2.0, -30.0, -0.5], "old_logprobs": [-1.2, -1.0, -1.0, -0.5]}
    values |= {"rollout_logprobs": [-1.1, -1.3, -1.0, -0.5], "advantages": [1.0, -1.0, 1.0, 0.0]}
    if field != "advantages":
        values[field] = [NAN] * 4
    else:
        values[field][0] = NAN
    x = tokens(*map(torch.tensor, values.values()), torch.ones(4, dtype=torch.bool))
    got, want = results(x, by_kernel(loss, x)), results(x, loss.rule(x))
    assert_same(got, want)


def test_infinite_log_probs_have_no_covariance():
    for lp, a in ((-INF, 1.0), (-1.0, INF)):
        ones = torch.ones(3)
        x = tokens(torch.tensor([lp, -1.0, -2.0]), -ones, -ones, torch.tensor([a, -2.0, -3.0]), ones.bool())
        assert by_kernel(bk.Reinforce(), x).means["entropy_clip_cov"].isnan()
        assert metrics(x, bk.Reinforce().rule(x), torch.zeros(()), None, None)["entropy_clip_cov"].isnan()


def test_sums_do_not_cancel():
    """A small covariance between large means."""
    n = 100
    lp, a = -1000.0 + normal(n, seed=3, dtype=torch.float32), 50.0 + normal(n, seed=4, dtype=torch.float32)
    x = tokens(lp, lp, lp, a, torch.ones(n, dtype=torch.bool))
    term = by_kernel(bk.Reinforce(), x)
    torch.testing.assert_close(
        term.means["entropy_clip_cov"].double(), exact_covariance(x, torch.zeros(n)), rtol=1e-6, atol=0.0
    )


def test_sums_are_of_all_programs():
    """More programs than the fold reads at a time, the extremes in the last."""
    x = grid(masked=False)
    cpu = torch.device("cpu")
    at_once, sums = (find_config(kernel, cpu).blocks["BLOCK"] for kernel in ("token_losses", "fold_means"))
    n = x.mask.numel()
    assert n > sums * at_once and n % at_once
    old = torch.zeros(n)
    lp = old.clone()
    lp[-1] = 5.0
    x = tokens(lp, old, old, torch.ones(n), torch.ones(n, dtype=torch.bool))
    means = by_kernel(bk.GRPO(), x).means
    assert means["num_tokens"] == n
    assert means["ratio_max"] == torch.tensor(5.0).exp()
    assert means["clip_frac_high"] == torch.tensor(1 / n)


def test_layouts_and_strides():
    x = grid()
    flat = by_kernel(bk.GRPO(), x)
    shape = (12, -1)
    layout = Layout.of("logprobs", x.mask.reshape(shape).shape, None, x.mask.device)
    fields = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask")
    strided = {f: getattr(x, f).detach().reshape(shape).t().contiguous().t() for f in fields}
    assert not strided["mask"].is_contiguous()
    other = by_kernel(bk.GRPO(), Tokens(**strided, layout=layout))
    for name in ("loss", "ratio", "clipped"):
        assert_bits(getattr(other, name).detach(), getattr(flat, name).detach().reshape(shape), name)


def test_on_policy_ratio_is_one():
    lp = -normal(50, seed=5, dtype=torch.float32).abs()
    x = tokens(lp, lp, lp, torch.ones(50), torch.ones(50, dtype=torch.bool))
    term = by_kernel(bk.GRPO(), x)
    assert term.ratio.eq(1).all()
    assert term.means["ratio_mean"] == 1
    assert term.means["approx_kl"] == 0


class _Other(bk.GRPO):
    def rule(self, x):
        return TokenLoss(-2.0 * x.advantages * x.logprobs)


def test_what_is_not_served():
    x = grid()
    with fused.using("triton"):
        for name in ("gspo", "gmpo", "luspo", "vespo", "topr", "clip-cov", "kl-cov"):
            assert fused.evaluate(bk.losses.get(name), x) is None, name
        assert fused.evaluate(_Other(), x) is None, "a subclass with a rule of its own"
        x64 = replace(x, **{f: getattr(x, f).double() for f in ("logprobs", "old_logprobs", "advantages")})
        assert fused.evaluate(bk.GRPO(), x64) is None
        empty = torch.zeros(0)
        assert fused.evaluate(bk.GRPO(), tokens(empty, empty, empty, empty, empty.bool())) is None
    for backend in ("auto", "torch", "cpu", "reference"):
        with fused.using(backend):
            assert fused.evaluate(bk.GRPO(), x) is None, backend


def test_no_second_derivatives_in_silence():
    x = grid()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(by_kernel(bk.GRPO(), x).loss.sum(), x.logprobs, create_graph=True)


# -- BAPO's bounds ------------------------------------------------------------------------------------------------------------------


def random_tokens(n: int = 300, seed: int = 0, shift: float = 0.0, spread: float = 0.5) -> Tokens:
    old, change, rollout, advantages = (normal(n, seed=seed + i, dtype=torch.float32) for i in range(4))
    old = -old.abs() - 0.1
    return tokens(old + spread * change, old, old + 0.2 * rollout, advantages + shift, normal(n, seed=seed + 5) > -1)


SEARCHES = {
    "reached-at-the-start": {"target": 0.2},
    "reached-at-the-start-low-first": {"target": 0.355, "order": "low-first"},  # and not at the end of c_low
    "on-the-way-up": {"target": 0.39},
    "low-first": {"target": 0.25, "order": "low-first", "measure": "gradient"},
    "second-bound": {"target": 0.43, "measure": "gradient"},
    "second-bound-low-first": {"target": 0.4, "order": "low-first", "measure": "gradient"},
    "never": {"target": 0.99},
    "never-low-first": {"target": 0.99, "order": "low-first"},
    "ends-between-points": {"target": 0.99, "c_low": (0.6, 0.89), "c_high": (1.2, 2.93)},
    "signed": {"target": 1.9, "contribution": "signed"},
    "ratio": {"target": 0.5, "contribution": "ratio", "weighting": "none"},
    "one-point": {"c_low": (0.5, 0.5), "c_high": (1.1, 1.1)},
    "sixty-four": {"c_low": (0.0, 0.63), "step_low": 0.01, "c_high": (1, 1.63), "step_high": 0.01, "target": 0.385},
}


def assert_bounds(got: controller.BapoBounds | None, want: controller.BapoBounds) -> None:
    assert got is not None
    for name, value in want._asdict().items():
        found = getattr(got, name)
        assert (found.dtype, found.shape) == (value.dtype, value.shape), name
        # The ratios of the two may differ by an ulp of fp32; the points of the grid may not.
        rtol = 0.0 if name in ("c_low", "c_high") else 2e-7
        torch.testing.assert_close(found, value, rtol=rtol, atol=0.0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES.keys())
def test_bounds(options):
    loss, x = bk.BAPO(**options), random_tokens()
    assert_bounds(launch.find_bounds(loss, x), controller.find_bounds(loss, x))


def test_bounds_past_the_balance():
    """Read literally, the contribution falls again once S+ is more than S-: what the end of the path has says nothing."""
    loss, x = bk.BAPO(contribution="signed", target=20.0), random_tokens(shift=0.2)
    found = launch.find_bounds(loss, x)
    want = controller.find_bounds(loss, x)
    assert loss.c_high[0] < want.c_high < loss.c_high[1]
    assert (found.c_low, found.c_high) == (want.c_low, want.c_high)


def test_searches_end_everywhere():
    """At the start, within either grid, at the end of one and of both: else the test above sees too little."""
    places = {"high-first": set(), "low-first": set()}
    for options in SEARCHES.values():
        loss = bk.BAPO(**options)
        found = controller.find_bounds(loss, random_tokens())
        if loss.c_low[0] != loss.c_low[1]:
            at = [
                "start" if v == start else "end" if v == end else "within"
                for v, (start, end) in ((found.c_low, loss.c_low), (found.c_high, loss.c_high))
            ]
            places[loss.order].add(tuple(at))
    assert places["high-first"] >= {("start", "start"), ("start", "within"), ("within", "end"), ("end", "end")}
    assert places["low-first"] >= {("start", "start"), ("within", "start"), ("end", "within"), ("end", "end")}


def test_bounds_do_not_depend_on_the_split(monkeypatch):
    loss, x = bk.BAPO(target=0.39), random_tokens()
    one = launch.find_bounds(loss, x)
    monkeypatch.setattr(launch, "STEPS", 1)
    monkeypatch.setattr(launch, "PROGRAMS", 7)  # more blocks than that: programs have several
    assert_bounds(launch.find_bounds(loss, x), one)
    assert one.c_high == launch.find_bounds(loss, x).c_high


@pytest.mark.parametrize("measure", controller.MEASURES)
@pytest.mark.parametrize("contribution", controller.CONTRIBUTIONS)
@pytest.mark.parametrize("case", ["no-positive", "no-negative", "nothing", "none-active", "nan-advantage", "nan-ratio"])
def test_bounds_of_odd_batches(case, contribution, measure):
    loss, x = bk.BAPO(contribution=contribution, measure=measure), random_tokens(n=20)
    if case == "none-active":
        x = replace(x, mask=torch.zeros_like(x.mask))
    elif case == "nan-ratio":
        x = replace(x, logprobs=x.logprobs.detach().index_fill(0, torch.tensor([3]), NAN))
    else:
        change = {
            "no-positive": lambda a: -a.abs(),
            "no-negative": torch.abs,
            "nothing": torch.zeros_like,
            "nan-advantage": lambda a: a.index_fill(0, torch.tensor([3]), NAN),
        }[case]
        x = replace(x, advantages=change(x.advantages))
    if case.startswith("nan"):
        assert x.mask[3]
    assert_bounds(launch.find_bounds(loss, x), controller.find_bounds(loss, x))


def test_ratios_on_the_bounds_count():
    x = random_tokens(n=20, spread=0.0)
    assert x.ratio.eq(1).all()
    loss = bk.BAPO(c_low=(1.0, 1.0), c_high=(1.0, 1.0), measure="gradient")
    found = launch.find_bounds(loss, x)
    assert_bounds(found, controller.find_bounds(loss, x))
    assert found.positive > 0 and found.negative > 0


def test_a_target_that_is_just_met():
    x = random_tokens(n=20, spread=0.0)
    x = replace(x, advantages=torch.tensor([1.0, -1.0] * 10), mask=torch.ones_like(x.mask))
    found = launch.find_bounds(bk.BAPO(target=0.5, weighting="none"), x)
    assert [v.item() for v in found] == [0.6, 1.2, 0.5, 10.0, 10.0]


def test_large_grids_are_left_to_pytorch():
    loss, x = bk.BAPO(c_high=(1.0, 7.5), step_high=0.1, target=0.385), random_tokens()
    assert launch.find_bounds(loss, x) is None
    assert_same(results(x, by_kernel(loss, x)), results(x, loss.rule(x)))


def test_bounds_over_ranks(monkeypatch):
    """A second rank with the same sums, and one without tokens: the call has one shape, whatever a rank holds."""
    loss, x = bk.BAPO(target=0.39), random_tokens()
    sizes = []

    def twice(sums, group):
        sizes.append(sums.shape)
        sums *= 2

    want = controller.find_bounds(loss, x)
    monkeypatch.setattr(torch.distributed, "all_reduce", twice)
    grouped = replace(x, dp_group="a group")
    doubled = want._replace(positive=2 * want.positive, negative=2 * want.negative)
    assert_bounds(controller.find_bounds(loss, grouped), doubled)
    assert_bounds(launch.find_bounds(loss, grouped), doubled)
    assert sizes[0] == sizes[1]


def test_bapo_bounds():
    batch = Batch.random(dtype=torch.float32)
    found = []
    for backend in ("triton", "torch"):
        with fused.using(backend):
            found.append(bk.bapo_bounds(batch.logprobs, batch.advantages, mask=batch.mask))
    assert_bounds(*found)


# -- through the public functions ---------------------------------------------------------------------------------------------------


@pytest.fixture
def used(monkeypatch):
    """The losses that the kernel has served."""
    seen, evaluate = [], launch.evaluate

    def record(loss, x):
        term = evaluate(loss, x)
        if term is not None:
            seen.append(loss.name)
        return term

    monkeypatch.setattr(launch, "evaluate", record)
    return seen


def whole(batch: Batch, backend: str, **options) -> dict[str, Tensor]:
    with fused.using(backend):
        out, logprobs, entropy = batch.call(
            rollout_logprobs=batch.rollout_logprobs, ref_logprobs=batch.ref_logprobs, return_tokens=True, **options
        )
    out.loss.backward()
    found = {f"tokens.{k}": v for k, v in out.tokens._asdict().items()} | out.metrics
    entropy_grad = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
    return found | {"total": out.loss.detach(), "grad": logprobs.grad, "entropy.grad": entropy_grad}


EVERYTHING = {
    "correction": bk.TruncatedIS(cap=1.01),
    "top_entropy": 0.5,
    "kl_coef": 0.1,
    "entropy_coef": 0.01,
    "aggregation": "seq-mean-token-mean",
}


@every_loss
@pytest.mark.parametrize(("layout", "options"), [("padded", {}), ("packed", EVERYTHING)], ids=["plain", "everything"])
def test_policy_loss(loss, layout, options, used):
    batch = Batch.random(layout, dtype=torch.float32)
    want = whole(batch, "torch", loss=loss, **options)
    assert not used
    got = whole(batch, "triton", loss=loss, **options)
    assert used == [loss.name]
    assert_same(got, want)


def test_all_masked():
    batch = Batch.random(dtype=torch.float32)
    batch.mask[:] = False
    batch.logprobs[:] = NAN
    assert_same(whole(batch, "triton", loss="bapo"), whole(batch, "torch", loss="bapo"))


def test_without_gradient():
    batch = Batch.random(dtype=torch.float32)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, fused.using("triton"):
            out = bk.policy_loss(batch.logprobs, batch.advantages, old_logprobs=batch.old_logprobs, return_tokens=True)
        with fused.using("triton"):
            trained, _, _ = batch.call(mask=None, entropy=None, return_tokens=True)
        assert not out.loss.requires_grad
        assert_bits(out.loss, trained.loss.detach())
        assert_bits(out.tokens.coef, trained.tokens.coef)


def test_linear_policy_loss(used):
    hidden, weight = normal(6, 5, dtype=torch.float32), normal(9, 5, seed=1, dtype=torch.float32)
    targets, advantages = torch.arange(6), normal(6, seed=2, dtype=torch.float32)
    grads = []
    for backend in ("triton", "torch"):
        h = hidden.clone().requires_grad_()
        bk.linear_policy_loss(h, weight, targets, advantages, loss="grpo", backend=backend).loss.backward()
        grads.append(h.grad)
    assert used == ["grpo"]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


def test_the_reference_is_pytorch(used):
    batch = Batch.random(dtype=torch.float32)
    with fused.using("triton"):
        batch.call(bk.reference.policy_loss)
    assert not used
