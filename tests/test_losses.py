"""Every loss against plain Python numbers: value, coefficient and clip flag in every corner, and what must not reach them."""

import dataclasses
import math

import naive_losses
import pytest
import torch
from batches import LAYOUTS, Batch
from helpers import INF, NAN, assert_bits, close, normal
from loss_batches import CLIPPED, NAMES, PER_TOKEN, batch_of, call, expected, inputs, recorded

import bapo_kernels as bk

VARIANTS = [
    bk.BAPO(measure="gradient", weighting="none", order="low-first", dual_clip=1.3),
    bk.BAPO.fixed(0.9, 1.1),
    bk.GRPO(dual_clip=1.2),
    bk.BPO(smoothing=0.01, cap=1.1, clip_low=0.9, clip_high=0.05),
    bk.BPO(cap=1.02, clip_high=0.3),  # the mask looks at the ratio before the cap
    bk.GSPO(clip_low=0.1, clip_high=0.3),
    bk.CISPO(ratio_low=0.8, ratio_high=1.2),
    bk.DPPO(ratio_cap=1.1, delta_low=0.3, delta_high=0.01),
    bk.DPPOKL(ratio_cap=1.1, delta_low=0.3, delta_high=0.01),
    bk.TOPR(ratio="token", floor=0.6, cap=1.4),
    bk.TOPR(floor=0.1, cap=3.0),
    bk.DCPO(eps_low=0.02, eps_high=0.03, ratio_cap=1.5, dual_clip=1.6),
    bk.SAPO(tau_pos=0.5, tau_neg=3.0),
    bk.GMPO(clip_low=0.05, clip_high=0.1),
    bk.VESPO(k_pos=0.5, lambda_pos=1.0, k_neg=1.5, lambda_neg=0.0),
    bk.DRO(beta=2.0),
    bk.ClipCov(fraction=0.3, cov_low=-5.0),
    bk.ClipCov(fraction=1.0, cov_low=-100.0, cov_high=100.0),
    bk.KLCov(fraction=0.3, beta=0.5),
    bk.ScoreCentering(weight="tis", tis_cap=1.1),
    bk.ScoreCentering(weight="mis", mis_low=0.8, mis_high=1.3),
    bk.ScoreCentering(tail_floor=0.9),
]
LOSSES = [*map(bk.losses.get, NAMES), *VARIANTS]


def compare(batch, loss, seed=0, rtol=1e-9, atol=1e-10):
    """Per-token outputs, and the gradient that autograd takes through the mean over tokens."""
    got = call(batch, loss, seed, aggregation="token-sum")
    want = expected(batch, loss, seed, got)

    def check(tensor, values, what):
        close(tensor, torch.tensor(values, dtype=torch.float64).view(tensor.shape), what, rtol, atol)

    check(got.out.tokens.loss, want.loss, "tokens.loss")
    check(got.out.tokens.coef, want.coef, "tokens.coef")
    assert got.out.tokens.clipped.flatten().tolist() == want.clipped
    check(got.out.loss, sum(want.loss), "loss")
    got.out.loss.backward()
    check(got.logprobs.grad, want.coef, "gradient")
    if got.topk is not None:
        check(got.topk.grad, want.head_coef, "gradient of topk_logprobs")
    return want


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_values(loss, layout):
    for seed in range(5):
        for masked in (True, False):
            compare(batch_of(layout, 100 * seed, masked=masked), loss, seed)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_values_in_single_precision(loss):
    compare(batch_of("packed", 7, dtype=torch.float32), loss, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CLIPPED)
def test_every_sign_of_the_advantage_is_seen_clipped_and_not(name):
    cells = set()
    for seed in range(8):
        batch = batch_of(LAYOUTS[seed % 3], 100 * seed)
        want = compare(batch, bk.losses.get(name), seed)
        rows = zip(batch.advantages.flatten().tolist(), want.clipped, batch.mask.flatten().tolist(), strict=True)
        cells |= {((a > 0) - (a < 0), flag) for a, flag, active in rows if active}
    assert cells == {(1, 0), (1, 1), (-1, 0), (-1, -1), (0, 0)}


@pytest.mark.parametrize("loss", [x for x in LOSSES if x.name not in CLIPPED], ids=str)
def test_a_truncated_weight_does_not_count_as_clipped(loss):
    for seed in range(4):
        out = call(batch_of(seed=100 * seed), loss, seed).out
        assert not out.tokens.clipped.any()
        assert out.metrics["clip_frac_low"] == out.metrics["clip_frac_high"] == 0


@pytest.mark.parametrize("loss", [bk.GRPO(dual_clip=1.2), bk.DCPO(dual_clip=1.6), bk.BAPO(dual_clip=1.3)], ids=str)
def test_the_dual_clip_stops_negatives_only(loss):
    stopped = 0
    for seed in range(8):
        batch = batch_of(seed=100 * seed)
        want = compare(batch, loss, seed)
        for a, flag in zip(batch.advantages.flatten().tolist(), want.clipped, strict=True):
            stopped += flag == 1 and a < 0
    assert stopped > 0


@pytest.mark.parametrize("name", NAMES)
def test_without_advantage_there_is_no_policy_gradient(name):
    batch = batch_of()
    batch.advantages = torch.zeros_like(batch.advantages)
    got = call(batch, name)
    got.out.loss.backward()
    coef = torch.zeros_like(batch.logprobs)
    if name in ("dro", "kl-cov"):  # the pull to the old policy does not need an advantage
        want = expected(batch, bk.losses.get(name)).coef
        coef = torch.tensor(want, dtype=coef.dtype).view_as(coef)
    close(got.out.tokens.coef, coef)
    assert not got.out.tokens.clipped.any()
    assert got.topk is None or not got.topk.grad.any()


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_the_coefficient_is_the_advantage(name):
    batch = batch_of()
    options = {"old_logprobs": None, "rollout_logprobs": None}
    loss = bk.losses.get(name)
    if name == "score-centering":  # p = q: nothing to centre
        given = recorded(batch.logprobs.shape)
        options["rollout_topk_logprobs"] = given["topk_logprobs"].masked_fill(given["rollout_topk_ids"] == -1, -INF)
    if name == "clip-cov":
        loss = bk.ClipCov(cov_low=100.0, cov_high=200.0)  # no candidates
    got = call(batch, loss, **options)
    close(got.out.tokens.coef, torch.where(batch.mask, -batch.advantages, 0.0))
    close(got.out.tokens.ratio, batch.mask.double())
    assert not got.out.tokens.clipped.any()
    same = call(batch, loss, **(options | {"old_logprobs": batch.logprobs.clone().requires_grad_()}))
    assert_bits(same.out.tokens.coef, got.out.tokens.coef)
    assert_bits(same.out.loss.detach(), got.out.loss.detach())
    got.out.loss.backward()
    assert got.topk is None or got.topk.grad.abs().max() < 1e-12


R, UP = math.exp(0.5), math.exp(-0.5)  # ratios of the log-ratios 0.5 and -0.5; 1 + (R - 1) and 1 - (1 - UP) are exact


def stepped(x: float, to: float) -> float:
    return math.nextafter(x, to)


def omega(p, q, smoothing=0.1):
    return (smoothing - math.expm1(q)) / (smoothing - math.expm1(p))


OMEGA = omega(-0.25, -0.75)
# name, bound -> loss, bound, the side on which the token is stopped, (logprob, old, rollout)
ON_A_BOUND = {
    "ppo-high": (lambda b: bk.PPO(clip_high=b - 1), R, 0.0, (-0.5, -1.0, -1.0), 1),
    "ppo-low": (lambda b: bk.PPO(clip_low=1 - b), UP, 1.0, (-1.0, -0.5, -1.0), -1),
    "ppo-dual": (lambda b: bk.PPO(dual_clip=b), R, 0.0, (-0.5, -1.0, -1.0), -1),
    "bapo-high": (lambda b: bk.BAPO.fixed(0.5, b), R, 0.0, (-0.5, -1.0, -1.0), 1),
    "bapo-low": (lambda b: bk.BAPO.fixed(b, 2.0), UP, 1.0, (-1.0, -0.5, -1.0), -1),
    "clip-cov-high": (lambda b: bk.ClipCov(clip_high=b - 1), R, 0.0, (-0.5, -1.0, -1.0), 1),
    "gspo-high": (lambda b: bk.GSPO(clip_high=b - 1), R, 0.0, (-0.5, -1.0, -1.0), 1),
    "gspo-low": (lambda b: bk.GSPO(clip_low=1 - b), UP, 1.0, (-1.0, -0.5, -1.0), -1),
    "gmpo-high": (lambda b: bk.GMPO(clip_high=b), 0.5, 0.0, (-0.5, -1.0, -1.0), 1),
    "gmpo-low": (lambda b: bk.GMPO(clip_low=b), 0.5, 0.0, (-1.0, -0.5, -1.0), -1),
    "dcpo-high": (lambda b: bk.DCPO(eps_high=9.0, ratio_cap=b), R, 1.0, (-0.5, -1.0, -1.0), 1),
    "dcpo-low": (lambda b: bk.DCPO(eps_low=0.25 if b == 0.5 else 0.2499), 0.5, 1.0, (-math.log(2), 0.0, 0.0), -1),
    "bpo-high": (lambda b: bk.BPO(clip_high=b), OMEGA - 1, 0.0, (-0.25, -0.25, -0.75), 1),
    "tv-high": (lambda b: bk.DPPO(delta_high=b), math.exp(-0.25) - math.exp(-0.75), 0.0, (-0.25, -1.0, -0.75), 1),
    "tv-low": (lambda b: bk.DPPO(delta_low=b), math.exp(-0.25) - math.exp(-0.75), 0.0, (-0.75, -1.0, -0.25), -1),
}


@pytest.mark.parametrize("name", ON_A_BOUND)
def test_a_token_on_a_bound_keeps_its_gradient(name):
    make, bound, stops, (lp, old, rollout), advantage = ON_A_BOUND[name]

    def token(b):
        given = {"old_logprobs": torch.tensor([old]).double(), "rollout_logprobs": torch.tensor([rollout]).double()}
        leaf = torch.tensor([lp], dtype=torch.float64)
        return bk.policy_loss(leaf, torch.tensor([advantage]), loss=make(b), return_tokens=True, **given).tokens

    if name == "bpo-high":  # 1 + (omega - 1) has to be omega again
        assert 1 + bound == OMEGA
    on, beyond = token(bound), token(bound * (0.999 if stops < bound else 1.001))
    assert on.clipped.item() == 0
    assert on.coef.item() != 0
    assert abs(beyond.clipped.item()) == 1
    assert beyond.coef.item() == 0


QUIET = {"clip-cov": bk.ClipCov(cov_low=100.0, cov_high=200.0), "bapo": bk.BAPO.fixed(0.8, 1.2)}


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("jump", [100.0, -100.0, 1e4, INF])
@pytest.mark.parametrize("name", NAMES)
def test_overflow_is_never_nan_and_stays_where_it_is(name, jump, advantage):
    """One token whose log-ratio is far out, in old and rollout log-probs: its sequence feels it, others do not."""
    batch = batch_of("packed", masked=False)
    loss = QUIET.get(name, bk.losses.get(name))
    batch.advantages[4] = advantage
    if jump < 0:
        batch.logprobs[4] += jump
    calm = call(batch, loss, aggregation="token-sum")
    for which in ("old_logprobs", "rollout_logprobs"), ("old_logprobs",), ("rollout_logprobs",):
        stale = dataclasses.replace(batch)
        for field in which:
            setattr(stale, field, getattr(batch, field).clone())
            getattr(stale, field)[4] = batch.logprobs[4] - jump
        got = call(stale, loss, aggregation="token-sum")
        got.out.loss.backward()
        unbounded = jump == INF and "old_logprobs" in which and name in ("dro", "kl-cov")
        for what, t in (("loss", got.out.tokens.loss), ("coef", got.out.tokens.coef), ("grad", got.logprobs.grad)):
            assert not t.isnan().any(), (what, which)
            assert unbounded or t.isfinite().all(), (what, which)
        assert got.out.metrics["ratio_max"].isfinite()
        others = torch.tensor([i for i in range(14) if not 3 <= i < 9])
        assert_bits(got.out.tokens.coef[others], calm.out.tokens.coef[others])
        assert_bits(got.out.tokens.loss[others], calm.out.tokens.loss[others])
        assert_bits(got.logprobs.grad[others], got.out.tokens.coef[others])
        if not unbounded:
            want = torch.tensor(expected(stale, loss, got=got).coef, dtype=torch.float64)
            close(got.out.tokens.coef, want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_garbage_in_masked_tokens_changes_no_bit(name, layout):
    batch, loss = batch_of(layout), bk.losses.get(name)
    options = {"kl_coef": 0.1, "entropy_coef": 0.1, "top_entropy": 0.7, "correction": bk.TruncatedIS(level="sequence")}
    clean = call(batch, loss, **options).tensors()
    assert (~batch.mask).any()
    for value in (NAN, INF, -INF, -1e30, 1e30):
        dirty = dataclasses.replace(batch, **{k: getattr(batch, k).masked_fill(~batch.mask, value) for k in PER_TOKEN})
        given = inputs(batch, loss) | {"rollout_logprobs": dirty.rollout_logprobs}
        for k in ("topk_logprobs", "rollout_topk_logprobs", "rollout_topk_ids"):
            if k in given:
                given[k] = given[k].masked_fill(~batch.mask[..., None], 7 if k.endswith("ids") else value)
        got = call(dirty, loss, **options, **given).tensors()
        assert got.keys() == clean.keys()
        for k, t in clean.items():
            assert_bits(got[k], t, f"{k} with {value}")
        for k in ("grad", "grad of entropy", "grad of topk"):
            assert k not in got or not got[k][~batch.mask].any()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_active_is_a_zero_that_trains(name):
    for batch in (batch_of(), batch_of("packed"), batch_of("flat")):
        batch.mask = torch.zeros_like(batch.mask)
        got = call(batch, name).tensors()
        for k, t in got.items():
            if k not in ("kl", "c_low", "c_high"):
                assert not t.any(), k
    empty = torch.zeros(0, requires_grad=True)
    given = {"topk_logprobs": torch.zeros(0, 3), "rollout_topk_logprobs": torch.zeros(0, 3)}
    given["rollout_topk_ids"] = torch.zeros(0, 3, dtype=torch.int64)
    out = bk.policy_loss(empty, torch.zeros(0), loss=name, **(given if name == "score-centering" else {}))
    out.loss.backward()
    assert out.loss == 0
    assert empty.grad.shape == (0,)


READ = {  # of each token
    **dict.fromkeys(NAMES, ("logprobs", "advantages", "old_logprobs")),
    **dict.fromkeys(("dppo-tv", "dppo-kl", "bpo"), ("logprobs", "advantages", "rollout_logprobs")),
    **dict.fromkeys(("topr", "reinforce", "score-centering"), ("logprobs", "advantages")),
}
LINEAR = ("topr", "reinforce", "score-centering")  # the coefficient does not depend on the log-prob


def with_nan(name: str, field: str):
    batch = batch_of()
    at = tuple(batch.mask.nonzero()[3].tolist())
    setattr(batch, field, getattr(batch, field).clone())
    getattr(batch, field)[at] = NAN
    got = call(batch, name)
    got.out.loss.backward()
    return got


@pytest.mark.parametrize(("name", "field"), [(n, f) for n in NAMES for f in READ[n]])
def test_nan_of_active_tokens_shows(name, field):
    got = with_nan(name, field)
    assert got.out.loss.isnan()
    if field == "advantages" or name not in (*LINEAR, "gspo", "luspo", "gmpo"):
        assert got.logprobs.grad.isnan().any()


@pytest.mark.parametrize("field", ["logprobs", "old_logprobs"])
@pytest.mark.parametrize("name", ["gspo", "luspo", "gmpo"])
def test_nan_of_a_sequence_shows_in_its_gradient(name, field):
    assert with_nan(name, field).logprobs.grad.isnan().any()


def test_the_lottery_does_not_hide_nan():
    old = torch.tensor([NAN, -2.0, -3.0])
    loss = bk.ClipCov(fraction=1.0, cov_low=-100.0, cov_high=100.0)
    out = bk.policy_loss(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([1.0, 0.5, -1.0]), loss=loss, old_logprobs=old)
    assert out.loss.isnan()


@pytest.mark.parametrize("loss", [bk.DRO(beta=0.0), bk.KLCov(beta=0.0)], ids=str)
def test_a_pull_of_no_strength_does_not_see_the_distance(loss):
    old = torch.tensor([-INF, -2.0])
    out = bk.policy_loss(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 0.0]), loss=loss, old_logprobs=old)
    assert out.loss.isfinite()


def test_confident_tokens_have_not_moved():
    """p = 1 and q = 1 - 1e-7 are next to each other, whatever 1 - p rounds to."""
    out = bk.policy_loss(
        torch.tensor([0.0, -1e-9]),
        torch.ones(2),
        loss="dppo-kl",
        rollout_logprobs=torch.tensor([-1e-7, -1e-7]),
        return_tokens=True,
    )
    assert out.tokens.clipped.tolist() == [0, 0]
    close(out.tokens.coef, torch.tensor([-1.0, -1.0]), rtol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clip_cov_draws_as_many_as_it_should(layout):
    batch = batch_of(layout, masked=True)
    batch.advantages = normal(*batch.advantages.shape, seed=77) + 0.01
    n, drawn = int(batch.mask.sum()), set()
    for fraction in (0.0, 1e-4, 0.2, 0.5, 1.0):
        for seed in range(5):
            loss = bk.ClipCov(fraction=fraction, cov_low=-100.0, cov_high=100.0, seed=seed)
            got = call(batch, loss)
            tokens = got.out.tokens
            stopped = (tokens.coef == 0) & (tokens.clipped == 0) & batch.mask
            want = expected(batch, loss, got=got)
            assert int(stopped.sum()) == min(naive_losses.share(fraction, n), len(want.candidates))
            assert set(stopped.flatten().nonzero().flatten().tolist()) <= want.candidates
            assert_bits(call(batch, loss).out.tokens.coef, tokens.coef)
            drawn.add((fraction, tuple(stopped.flatten().tolist())))
    assert len([1 for fraction, _ in drawn if fraction == 0.2]) > 1  # the seed decides
    state = torch.random.get_rng_state()
    call(batch, "clip-cov")
    assert_bits(torch.random.get_rng_state(), state)


def test_a_clean_batch_really_has_all_kinds_of_tokens():
    batch = Batch.random()
    assert (batch.advantages == 0).any() and (batch.advantages > 0).any() and (batch.advantages < 0).any()
