"""BAPO's controller against the paper's loop in plain Python, and the loss with its bounds."""

import itertools
import math

import naive
import pytest
import torch
from batches import LAYOUTS, Batch
from helpers import assert_bits, close, integers, normal

import bapo_kernels as bk

OPTIONS = list(
    itertools.product(
        ("share", "signed", "ratio"), ("surrogate", "gradient"), ("rollout", "none"), ("high-first", "low-first")
    )
)


def random_batch(seed: int, n: int = 40):
    """Ratios from well below to well above every bound; how much positives weigh differs widely with the seed."""
    old = -normal(n, seed=seed).abs() - 0.05
    logprobs = old + 0.7 * normal(n, seed=seed + 1)
    advantages = normal(n, seed=seed + 2) + (seed % 7 - 3) * 0.3
    advantages[integers(6, n, seed=seed + 3) == 0] = 0.0
    rollout = old + 0.2 * normal(n, seed=seed + 4)
    return logprobs, advantages, old, rollout, integers(5, n, seed=seed + 5) > 0


def python_bounds(logprobs, advantages, old, rollout, mask, weighting, **options):
    active = mask.nonzero().squeeze(1).tolist()
    ratios = [math.exp((logprobs[i] - old[i]).item()) for i in active]
    weights = [math.exp(rollout[i].item()) if weighting == "rollout" else 1.0 for i in active]
    return naive.bapo_bounds(ratios, advantages[active].tolist(), weights, **options)


@pytest.mark.parametrize(("contribution", "measure", "weighting", "order"), OPTIONS)
def test_bounds_are_those_of_the_papers_loop(contribution, measure, weighting, order):
    stops = set()
    for seed, target in itertools.product(range(20), (0.3, 0.4, 0.6)):
        logprobs, advantages, old, rollout, mask = random_batch(10 * seed)
        options = {"contribution": contribution, "measure": measure, "order": order}
        target = target if contribution == "share" else target * 1.6
        got = bk.bapo_bounds(
            logprobs,
            advantages,
            loss=bk.BAPO(target=target, weighting=weighting, **options),
            mask=mask,
            old_logprobs=old,
            rollout_logprobs=rollout,
        )
        want = python_bounds(logprobs, advantages, old, rollout, mask, weighting, target=target, **options)
        for name, a, b in zip(("c_low", "c_high", "contribution", "positive", "negative"), got, want, strict=True):
            assert a.dtype == torch.float64
            assert a.item() == pytest.approx(b, rel=1e-9), f"seed {seed}: {name}"
        stops.add((round(want[0], 6), round(want[1], 6)))
    assert len(stops) >= (3 if contribution == "share" else 2)  # the batches do exercise the search


@pytest.mark.parametrize(
    "options",
    [
        {"c_low": (0.5, 0.8), "c_high": (1.1, 1.7), "step_low": 0.05, "step_high": 0.1},
        {"c_low": (0.7, 0.7), "c_high": (1.2, 2.0)},
        {"c_low": (0.6, 0.9), "c_high": (1.3, 1.3)},
        {"c_low": (0.0, 1.0), "c_high": (1.0, 10.0), "step_low": 0.1, "step_high": 0.3},
        {"target": 0.0},
        {"target": 1.0},
    ],
    ids=str,
)
def test_other_grids_and_targets(options):
    for seed in range(10):
        batch = random_batch(10 * seed)
        logprobs, advantages, old, rollout, mask = batch
        got = bk.bapo_bounds(
            logprobs, advantages, loss=bk.BAPO(**options), mask=mask, old_logprobs=old, rollout_logprobs=rollout
        )
        want = python_bounds(*batch, "rollout", **options)
        assert [t.item() for t in got] == pytest.approx(list(want), rel=1e-9)


def test_a_grid_ends_where_a_step_would_pass_the_end():
    """1.0, 1.3, 1.6 with an end of 1.75: the last point is 1.6."""
    logprobs, advantages = torch.tensor([2.0, 0.0]), torch.tensor([1e-6, -1.0])
    rule = bk.BAPO(c_high=(1.0, 1.75), step_high=0.3, c_low=(0.5, 0.69), step_low=0.1)
    got = bk.bapo_bounds(logprobs, advantages, loss=rule, old_logprobs=torch.zeros(2))
    assert got.c_high.item() == pytest.approx(1.6, abs=1e-12)
    assert got.c_low.item() == pytest.approx(0.6, abs=1e-12)


def test_the_default_grid():
    """53 points, on one path; an exhausted search ends exactly at 3.0 and 0.9."""
    old = torch.zeros(2, dtype=torch.float64)
    logprobs = torch.tensor([math.log(5.0), math.log(0.1)], dtype=torch.float64)
    seen = set()
    for i in range(400):
        a = 0.01 + 0.08 * i / 400  # S+ = 0.01 c_high, S- = a c_low: stops at c_high >= 40 a
        got = bk.bapo_bounds(
            logprobs, torch.tensor([0.01, -a], dtype=torch.float64), loss=bk.BAPO(weighting="none"), old_logprobs=old
        )
        seen.add((got.c_low.item(), got.c_high.item()))
    highs = sorted({h for low, h in seen if low == 0.6})
    assert highs == pytest.approx([1.2 + 0.05 * i for i in range(37)], abs=1e-12)
    assert (0.9, 3.0) in seen
    rule = bk.BAPO(
        measure="gradient", weighting="none"
    )  # raising c_low drops negatives: every point of the second leg is a stop
    for i in range(16):
        ratios = [1.0, *(0.6 + 0.02 * j + 0.01 for j in range(16))]
        advantages = [0.4 * sum(ratios[1 + i :]) / 0.6 + 1e-6, *(-1.0 for _ in range(16))]
        got = bk.bapo_bounds(
            torch.tensor(ratios, dtype=torch.float64).log(),
            torch.tensor(advantages, dtype=torch.float64),
            loss=rule,
            old_logprobs=torch.zeros(17, dtype=torch.float64),
        )
        seen.add((got.c_low.item(), got.c_high.item()))
    lows = sorted({low for low, h in seen if h == 3.0})
    assert lows == pytest.approx([0.6 + 0.02 * i for i in range(16)], abs=1e-12)
    assert lows[-1] == 0.9
    assert len(seen) >= 52


@pytest.mark.parametrize("order", ["high-first", "low-first"])
@pytest.mark.parametrize(
    ("advantages", "contribution", "want"),
    [
        ([1.0, 2.0], "share", 1.0),
        ([1.0, 2.0], "signed", 1.0),
        ([1.0, 2.0], "ratio", math.inf),
        ([-1.0, -2.0], "share", 0.0),
        ([-1.0, -2.0], "ratio", 0.0),
        ([0.0, 0.0], "share", 0.0),
        ([0.0, 0.0], "signed", 0.0),
        ([0.0, 0.0], "ratio", 0.0),
        ([], "share", 0.0),
    ],
)
def test_one_sided_batches_stay_at_the_start(advantages, contribution, want, order):
    n = len(advantages)
    got = bk.bapo_bounds(
        torch.full((n,), -1.0), torch.tensor(advantages), loss=bk.BAPO(contribution=contribution, order=order)
    )
    assert (got.c_low.item(), got.c_high.item()) == (0.6, 1.2)
    assert got.contribution.item() == want


def test_balance_of_the_signed_contribution_is_infinite():
    got = bk.bapo_bounds(torch.zeros(2), torch.tensor([1.0, -1.0]), loss=bk.BAPO(contribution="signed"))
    assert got.contribution.item() == math.inf
    assert got.c_high.item() == 1.2


def test_a_contribution_equal_to_the_target_reaches_it():
    """S+ = 2 and S- = 3: a share of exactly 0.4."""
    zeros = torch.zeros(2, dtype=torch.float64)
    advantages = torch.tensor([2.0, -3.0], dtype=torch.float64)
    for target, high in ((0.4, 1.2), (0.4 + 1e-12, 3.0)):
        got = bk.bapo_bounds(zeros, advantages, loss=bk.BAPO(target=target, weighting="none"), old_logprobs=zeros)
        assert got.c_high.item() == high


def test_order_and_chunking_of_tokens_do_not_show():
    logprobs, advantages, old, rollout, mask = random_batch(3, 5000)
    options = {"old_logprobs": old, "rollout_logprobs": rollout, "mask": mask}
    want = bk.bapo_bounds(logprobs, advantages, **options)
    for seed in range(5):
        p = torch.randperm(5000, generator=torch.Generator().manual_seed(seed))
        got = bk.bapo_bounds(logprobs[p], advantages[p], **{k: v[p] for k, v in options.items()})
        assert got.c_low == want.c_low
        assert got.c_high == want.c_high
        close(got.positive, want.positive, rtol=1e-12)
    for shape in ((50, 100), (1, 5000)):
        padded = bk.bapo_bounds(
            logprobs.view(shape), advantages.view(shape), **{k: v.view(shape) for k, v in options.items()}
        )
        assert [t.item() for t in padded] == pytest.approx([t.item() for t in want], rel=1e-12)
    packed = bk.bapo_bounds(logprobs, advantages, cu_seqlens=torch.tensor([0, 10, 5000]), **options)
    assert_bits(packed.contribution, want.contribution)


def test_small_contributions_are_not_lost_in_fp32():
    """2**24 + 1 small terms: fp32 sums would stop counting."""
    n = 300_000
    got = bk.bapo_bounds(
        torch.zeros(n), torch.cat([torch.full((n - 1,), 1e-3), torch.tensor([-1e6])]), loss=bk.BAPO(weighting="none")
    )
    assert got.positive.item() == pytest.approx((n - 1) * 1e-3 * 1.0, rel=1e-7)


def test_the_search_does_not_wait_for_the_device(monkeypatch):
    logprobs, advantages, old, rollout, mask = random_batch(3)
    rule = bk.BAPO()
    bounds = bk.bapo_bounds(logprobs, advantages, old_logprobs=old)

    def refuse(*_, **__):
        raise AssertionError("a value was brought to the host")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    options = {"mask": mask, "old_logprobs": old, "rollout_logprobs": rollout, "return_tokens": True}
    bk.bapo_bounds(logprobs, advantages, loss=rule, mask=mask, old_logprobs=old, rollout_logprobs=rollout)
    bk.policy_loss(logprobs.requires_grad_(), advantages, loss=rule, **options).loss.backward()
    bk.policy_loss(logprobs, advantages, loss=bk.BAPO.fixed(bounds.c_low, bounds.c_high), **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_uses_the_bounds_of_its_batch(layout):
    for seed in range(6):
        batch = Batch.random(layout, seed=seed, spread=0.8)
        given = {"rollout_logprobs": batch.rollout_logprobs}
        bounds = bk.bapo_bounds(
            batch.logprobs,
            batch.advantages,
            mask=batch.mask,
            cu_seqlens=batch.cu_seqlens,
            old_logprobs=batch.old_logprobs,
            **given,
        )
        out, logprobs, _ = batch.call(loss="bapo", **given)
        out.loss.backward()
        for name, value in bounds._asdict().items():
            assert out.metrics[name].item() == pytest.approx(value.item(), rel=1e-6)
        want = batch.expected(bounds.c_low.item(), bounds.c_high.item())
        close(out.loss, torch.tensor(want.loss, dtype=torch.float64))
        close(logprobs.grad, torch.tensor(want.grad, dtype=torch.float64).view_as(logprobs))
        for low, high in (bounds[:2], [b.item() for b in bounds[:2]]):
            fixed, fixed_lp, _ = batch.call(loss=bk.BAPO.fixed(low, high), **given)
            fixed.loss.backward()
            assert_bits(fixed.loss, out.loss)
            assert_bits(fixed_lp.grad, logprobs.grad)


def test_bounds_found_once_serve_micro_batches():
    batch = Batch.random("padded", seed=2, spread=0.8)
    whole, logprobs, _ = batch.call(loss="bapo")
    whole.loss.backward()
    bounds = bk.bapo_bounds(batch.logprobs, batch.advantages, mask=batch.mask, old_logprobs=batch.old_logprobs)
    rule, count = bk.BAPO.fixed(bounds.c_low, bounds.c_high), batch.mask.sum()
    leaf = batch.logprobs.clone().requires_grad_()
    for i in range(3):
        out = bk.policy_loss(
            leaf[i : i + 1],
            batch.advantages[i : i + 1],
            loss=rule,
            mask=batch.mask[i : i + 1],
            old_logprobs=batch.old_logprobs[i : i + 1],
            normalizer=count,
        )
        out.loss.backward()
    close(leaf.grad, logprobs.grad)


def test_fixed_bounds_are_grpo():
    batch = Batch.random()
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        options = {"aggregation": aggregation, "return_tokens": True, "kl_coef": 0.1}
        got, lp, _ = batch.call(loss=bk.BAPO.fixed(0.8, 1.2), **options)
        want, want_lp, _ = batch.call(loss=bk.GRPO(clip_low=0.2, clip_high=0.2), **options)
        got.loss.backward()
        want.loss.backward()
        close(got.loss, want.loss, rtol=1e-12)
        close(lp.grad, want_lp.grad, rtol=1e-12)
        for a, b in zip(got.tokens, want.tokens, strict=True):
            close(a, b, rtol=1e-12)


def authors_search(ratio, advantages, target, low, high, step_low, step_high):
    """What the authors' code does with a batch: a walk in plain Python, the lower bound first. `low`, `high` are (start, end)."""

    def balance(a, b):
        terms = [
            (min(r, b) if advantage >= 0 else max(r, a)) * advantage
            for r, advantage in zip(ratio, advantages, strict=True)
        ]
        negative = -sum(t for t in terms if t < 0)
        return sum(t for t in terms if t > 0) / (negative + 1e-8) if negative > 0 else math.inf

    (a, a_end), (b, b_end) = low, high
    while balance(a, b) < target and a < a_end and step_low > 0:
        a = min(a + step_low, a_end)
    while balance(a, b) < target and b < b_end and step_high > 0:
        b = min(b + step_high, b_end)
    return a, b, balance(a, b)


def test_authors_recipe_is_their_search():
    seen = set()
    for seed, factor in itertools.product(range(12), (0.9, 1.01, 1.05, 2.0)):
        logprobs, advantages, old, rollout, mask = random_batch(10 * seed)
        ranges = ((0.6, 0.8), (1.2, 2.0), 0.05, 0.1)
        known = ((logprobs - old)[mask].exp().tolist(), advantages[mask].tolist())
        *_, start = authors_search(*known, 0.0, *ranges)
        want = authors_search(*known, start * factor, *ranges)
        rule = bk.BAPO.authors_recipe(start * factor, 0.6, 0.8, 0.05, 1.2, 2.0, 0.1)
        got = bk.bapo_bounds(logprobs, advantages, loss=rule, mask=mask, old_logprobs=old, rollout_logprobs=rollout)
        assert [t.item() for t in got[:3]] == [pytest.approx(t, rel=1e-6) for t in want], f"seed {seed}"
        seen.add((round(want[0], 3), round(want[1], 3)))
    assert len(seen) >= 5, seen


def test_authors_recipe_fields():
    recipe = bk.BAPO.authors_recipe
    stays = recipe(clip_ratio_low=0.1, clip_ratio_high=0.3)
    assert (stays.c_low, stays.c_high) == ((0.9, 0.9), (1.3, 1.3))
    assert (stays.contribution, stays.measure, stays.weighting) == ("ratio", "surrogate", "none")
    assert (stays.order, stays.dual_clip, stays.target) == ("low-first", 3.0, 1.0)
    assert recipe(ratio_lower_start=0.6, ratio_lower_max=0.5).c_low == (
        0.6,
        0.6,
    )  # an end below the start is never reached
    assert recipe(ratio_upper_max=2.0, ratio_upper_step=0.0).c_high == (1.2, 1.2)
    assert recipe(ratio_upper_max=2.0, ratio_upper_step=0.1).c_high == (1.2, 2.0)
    assert recipe(clip_ratio_c=None).dual_clip is None
    for wrong, message in (
        ({"ratio_lower_max": 0.93}, "whole number"),
        ({"eps": 0.1}, "eps"),
        ({"adv_ratio_target": -1.0}, "adv_ratio_target"),
        ({"ratio_lower_step": -0.1}, "ratio_lower_step"),
        ({"ratio_upper_start": "1.2"}, "ratio_upper_start"),
        ({"clip_ratio_c": 0.5}, "dual_clip"),
    ):
        with pytest.raises(ValueError, match=message):
            recipe(**wrong)


def test_bounds_have_no_gradient_and_work_without():
    logprobs, advantages, old, *_ = random_batch(1)
    got = bk.bapo_bounds(logprobs.requires_grad_(), advantages, old_logprobs=old)
    assert not any(t.requires_grad for t in got)
    with torch.inference_mode():
        again = bk.bapo_bounds(logprobs, advantages, old_logprobs=old)
    assert [t.item() for t in again] == [t.item() for t in got]
    with pytest.raises(ValueError, match="bapo"):
        bk.bapo_bounds(logprobs, advantages, loss="ppo")


def test_rollout_defaults_to_old_logprobs():
    logprobs, advantages, old, rollout, mask = random_batch(1)
    a = bk.bapo_bounds(logprobs, advantages, old_logprobs=old, mask=mask)
    b = bk.bapo_bounds(logprobs, advantages, old_logprobs=old, rollout_logprobs=old, mask=mask)
    c = bk.bapo_bounds(logprobs, advantages, old_logprobs=old, rollout_logprobs=rollout, mask=mask)
    assert a.positive == b.positive
    assert a.positive != c.positive
