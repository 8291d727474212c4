"""Corrections for the mismatch of trainer and sampler: their weights in plain numbers, and that they weigh the policy term only."""

import dataclasses
import itertools
import math
import pickle

import naive_losses
import numpy as np
import pytest
import torch
from batches import LAYOUTS
from helpers import BACKENDS, INF, NAN, Problem, assert_bits, close, normal
from loss_batches import batch_of, call, plain

import bapo_kernels as bk

LEVELS = ("token", "sequence")
OBJECTS = [
    *(bk.TruncatedIS(cap=c, level=level) for c in (0.7, 2.0) for level in LEVELS),
    *(bk.MaskedIS(low=low, high=high, level=level) for low, high in ((0.5, 5.0), (0.2, 1.2)) for level in LEVELS),
    bk.IcePop(),
    bk.IcePop(low=0.9, high=1.2),
    bk.KPop(),
    bk.KPop(phi=0.02),
]


def weight(correction, batch, **options):
    """Of each token, as the policy term of REINFORCE shows it."""
    bare = call(batch, "reinforce", **options).out.tokens
    used = call(batch, "reinforce", correction=correction, **options).out.tokens
    assert not used.clipped.any()
    return torch.where(bare.coef == 0, 0.0, used.coef / torch.where(bare.coef == 0, 1.0, bare.coef))


def tokens(old, rollout, correction, advantages=None, dtype=torch.float64, **options):
    lp = torch.tensor([-1.0] * len(old), dtype=dtype, requires_grad=True)
    given = {"old_logprobs": torch.tensor(old, dtype=dtype), "rollout_logprobs": torch.tensor(rollout, dtype=dtype)}
    advantages = torch.ones(len(old)) if advantages is None else torch.tensor(advantages)
    out = bk.policy_loss(
        lp, advantages, loss="reinforce", correction=correction, return_tokens=True, **(given | options)
    )
    out.loss.backward()
    return out, lp.grad


def weights(old, rollout, correction, **options):
    return (-tokens(old, rollout, correction, **options)[0].tokens.coef).tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("correction", OBJECTS, ids=str)
def test_weights(correction, layout):
    seen = set()
    for seed in range(6):
        batch = batch_of(layout, 100 * seed)
        batch.advantages = torch.where(batch.advantages == 0, 1.0, batch.advantages)
        x = plain(batch)
        kind, fields = type(correction).__name__, dataclasses.asdict(correction)
        want = [naive_losses.correction(kind, x, i, **fields) if a else 0.0 for i, a in enumerate(x.active)]
        close(weight(correction, batch), torch.tensor(want, dtype=torch.float64).view(batch.mask.shape))
        seen |= {want[i] for i in x.tokens()}
    if layout != "flat" and correction != bk.KPop():
        assert len(seen) > 1  # some tokens are stopped, some are not


def test_published_defaults():
    assert dataclasses.astuple(bk.TruncatedIS()) == (2.0, "token")
    assert dataclasses.astuple(bk.MaskedIS()) == (0.5, 5.0, "token")
    assert dataclasses.astuple(bk.IcePop()) == (0.5, 5.0)
    assert dataclasses.astuple(bk.KPop()) == (2.0,)


def test_a_cap_on_ratios_far_apart():
    ratios = [0.606531, 12.182494, 0.818731]
    log_ratios = list(map(math.log, ratios))
    got = weights(log_ratios, [0.0] * 3, bk.TruncatedIS(cap=2.0))
    assert sum(ratios) / 3 == pytest.approx(4.535918, abs=1e-6)
    assert sum(got) / 3 == pytest.approx(1.141754, abs=1e-6)
    assert got == pytest.approx([0.606531, 2.0, 0.818731])


def test_the_weight_of_a_sequence_is_a_product_over_what_counts():
    old = torch.tensor([[0.1, 0.2, 9.0], [-0.3, 0.1, 0.1]], dtype=torch.float64)
    given = {"old_logprobs": old, "rollout_logprobs": torch.zeros_like(old), "return_tokens": True}
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    lp, ones = torch.full_like(old, -1.0), torch.ones(2, 3)
    correction = bk.TruncatedIS(cap=5.0, level="sequence")
    padded = bk.policy_loss(lp, ones, loss="reinforce", correction=correction, mask=mask, **given).tokens.coef
    exact = [[-math.exp(0.3)] * 2 + [0.0], [-math.exp(-0.1)] * 3]
    close(padded, torch.tensor(exact, dtype=torch.float64))
    keep = mask.bool()
    packed = {k: v[keep] if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    packed |= {"cu_seqlens": torch.tensor([0, 2, 5]), "correction": correction}
    close(bk.policy_loss(lp[keep], ones[keep], loss="reinforce", **packed).tokens.coef, padded[keep])


def test_a_ratio_on_a_bound_is_inside():
    r = math.exp(0.5)
    for make in (bk.MaskedIS, bk.IcePop):
        for low, high, inside in (
            (0.5, r, True),
            (0.5, math.nextafter(r, 0), False),
            (r, 5.0, True),
            (math.nextafter(r, 9), 5.0, False),
        ):
            (got,) = weights([-0.5], [-1.0], make(low=low, high=high))
            assert got == pytest.approx({bk.MaskedIS: 1.0, bk.IcePop: r}[make] if inside else 0.0)


def test_kpop_at_probabilities_zero_and_one():
    """Certain on both sides is no divergence; certain on one side only is an infinite one."""
    sure, never, even = 0.0, -INF, math.log(0.5)
    for old, rollout, kept in (
        (sure, sure, True),
        (never, never, True),
        (sure, never, False),
        (never, sure, False),
        (even, sure, False),
        (sure, even, False),
        (even, never, False),
        (even, even, True),
    ):
        assert weights([old], [rollout], bk.KPop()) == [float(kept)]
    assert weights([even], [even], bk.KPop(phi=0)) == [1.0]


def test_kpop_looks_both_ways():
    p, q = 0.9, 0.001
    forward, backward = naive_losses.binary_kl(p, q), naive_losses.binary_kl(q, p)
    phi = (forward + backward) / 2
    assert min(forward, backward) < phi < max(forward, backward)
    for old, rollout in ((p, q), (q, p)):
        assert weights([math.log(old)], [math.log(rollout)], bk.KPop(phi=phi)) == [0.0]
        assert weights([math.log(old)], [math.log(rollout)], bk.KPop(phi=max(forward, backward) + 1e-9)) == [1.0]


def test_kpop_keeps_confident_tokens():
    assert weights([0.0, -1e-9], [-1e-7, -1e-7], bk.KPop(), dtype=torch.float32) == [1.0, 1.0]


@pytest.mark.parametrize("correction", OBJECTS, ids=str)
@pytest.mark.parametrize("loss", ["bapo", "grpo", "gspo", "bpo", "cispo", "score-centering", "kl-cov"])
def test_the_policy_term_only(loss, correction):
    """KL, entropy bonus and denominators are those of the call without correction."""
    batch = batch_of()
    none = {"kl_coef": 0.3, "entropy_coef": 0.2}
    bare, used = call(batch, loss, **none), call(batch, loss, correction=correction, **none)
    policy = call(batch, loss, correction=correction).out.loss.detach()
    rest = (bare.out.loss - call(batch, loss).out.loss).detach()
    close(used.out.loss.detach(), policy + rest)
    found, plainly = used.tensors(), bare.tensors()
    for k in ("kl", "entropy", "ratio_mean", "approx_kl", "num_tokens", "clip_frac_low", "clip_frac_high"):
        assert_bits(found[k], plainly[k], k)
    assert_bits(found["grad of entropy"], plainly["grad of entropy"])
    assert_bits(found["tokens.clipped"], plainly["tokens.clipped"])
    w = weight(correction, dataclasses.replace(batch, advantages=torch.ones_like(batch.advantages)))
    close(found["tokens.coef"], w * plainly["tokens.coef"])
    close(found["tokens.loss"], w * plainly["tokens.loss"])


@pytest.mark.parametrize("correction", OBJECTS, ids=str)
def test_weights_have_no_gradient(correction):
    """Neither to the recorded log-probs, nor through old_logprobs=None, which is the policy itself."""
    batch = batch_of()
    old, rollout = batch.old_logprobs.clone().requires_grad_(), batch.rollout_logprobs.clone().requires_grad_()
    call(batch, "ppo", correction=correction, old_logprobs=old, rollout_logprobs=rollout).out.loss.backward()
    assert old.grad is None and rollout.grad is None
    got = call(batch, "reinforce", correction=correction, old_logprobs=None)
    want = call(batch, "reinforce", correction=correction, old_logprobs=batch.logprobs)
    got.out.loss.backward()
    assert_bits(got.out.tokens.coef, want.out.tokens.coef)
    close(got.logprobs.grad, got.out.tokens.coef / batch.mask.sum())


def test_without_rollout_log_probs_nothing_is_corrected():
    batch = batch_of()
    for correction in OBJECTS:
        if isinstance(correction, bk.TruncatedIS) and correction.cap < 1:
            continue
        got = call(batch, "grpo", correction=correction, rollout_logprobs=None)
        assert_bits(got.out.loss.detach(), call(batch, "grpo", rollout_logprobs=None).out.loss.detach())


@pytest.mark.parametrize("correction", OBJECTS, ids=str)
def test_nan_of_an_active_token_shows_and_of_a_masked_one_does_not(correction):
    for field in ("old_logprobs", "rollout_logprobs"):
        batch = batch_of("packed")
        want = call(batch, "reinforce", correction=correction).tensors()
        bad = getattr(batch, field).clone()
        for value in (NAN, INF, -INF, 1e30):
            masked = bad.masked_fill(~batch.mask, value)
            got = call(batch, "reinforce", correction=correction, **{field: masked}).tensors()
            for k, t in want.items():
                assert_bits(got[k], t, k)
        bad[int(batch.mask.nonzero()[0])] = NAN
        got = call(batch, "reinforce", correction=correction, **{field: bad})
        got.out.loss.backward()
        assert got.out.loss.isnan()
        assert got.logprobs.grad.isnan().any()


@pytest.mark.parametrize("correction", OBJECTS, ids=str)
def test_overflow(correction):
    for jump in (100.0, 1e4, INF):
        for old, rollout in ((-jump, -1.0), (-1.0, -jump)):
            out, grad = tokens([old, -1.0], [rollout, -1.1], correction)
            assert out.loss.isfinite()
            assert grad.isfinite().all()
    assert weights([-1.0], [-INF], bk.TruncatedIS(cap=1e9)) == pytest.approx([math.exp(20)])
    assert weights([-INF], [-1.0], bk.TruncatedIS()) == pytest.approx([math.exp(-20)])


@pytest.mark.parametrize(
    ("old", "rollout", "level"), [([-INF], [-INF], "token"), ([-INF, -1.0], [-1.0, -INF], "sequence")], ids=str
)
def test_infinities_on_both_sides(old, rollout, level):
    out, _ = tokens(old, rollout, bk.TruncatedIS(level=level))
    assert not out.loss.isnan()


def test_partial_rollouts_of_several_policies():
    """Each token has the log-prob of the policy that made it, and is corrected by that."""
    versions = torch.tensor([0, 0, 1, 1, 1, 2])
    behaviour = torch.stack([-normal(6, seed=s).abs() - 0.1 for s in range(3)])
    rollout = behaviour.gather(0, versions[None]).squeeze(0)
    old = -normal(6, seed=9).abs() - 0.1
    for correction in (bk.TruncatedIS(cap=1.5), bk.MaskedIS(), bk.IcePop(), bk.KPop(phi=0.1)):
        mixed = weights(old.tolist(), rollout.tolist(), correction)
        for v in range(3):
            alone = weights(old.tolist(), behaviour[v].tolist(), correction)
            for i in (versions == v).nonzero().flatten().tolist():
                assert mixed[i] == alone[i]


BAD = {
    bk.TruncatedIS: {"cap": (0.0, -1.0, NAN, INF, None, "2", True), "level": ("seq", None, 1)},
    bk.MaskedIS: {
        "low": (-0.1, NAN, None, True),
        "high": (0.4, NAN, INF, None, True),
        "level": ("geometric", None),
    },
    bk.IcePop: {"low": (-0.1, NAN, "0"), "high": (0.4, INF, None)},
    bk.KPop: {"phi": (-0.1, NAN, INF, None, "2", True)},
}


@pytest.mark.parametrize("cls", BAD)
def test_validation(cls):
    for field, values in BAD[cls].items():
        for value in values:
            with pytest.raises(ValueError, match=f"{cls.__name__}.*{field}"):
                cls(**{field: value})
    with pytest.raises(TypeError):
        cls(no_such=1)
    assert cls() == cls() and hash(cls()) == hash(cls())
    assert pickle.loads(pickle.dumps(cls())) == cls()
    field = next(iter(BAD[cls]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(cls(), field, 1.0)
    numpy = cls(**{field: np.float32(0.25)})
    assert tokens([-1.0], [-1.2], numpy)[0].loss.isfinite()


@pytest.mark.parametrize("wrong", ["tis", bk.TruncatedIS, 2.0, {"cap": 2.0}, "TruncatedIS"], ids=str)
def test_what_is_no_correction_is_refused(wrong):
    with pytest.raises(ValueError, match=r"correction.*TruncatedIS.*MaskedIS.*IcePop.*KPop"):
        tokens([-1.0], [-1.0], wrong)


@pytest.mark.parametrize("backend", BACKENDS)
def test_straight_from_the_head(backend):
    p = Problem.random(6, 4, 9)
    rollout = p.oracle().logprobs + 0.5 * normal(6, seed=4)
    old = p.oracle().logprobs + 0.2 * normal(6, seed=5)
    for correction, loss in itertools.product(OBJECTS, ("bapo", "bpo")):
        options = {"loss": loss, "old_logprobs": old, "rollout_logprobs": rollout, "correction": correction}
        leaf, again = p.requires_grad(), p.requires_grad()
        got = bk.linear_policy_loss(
            leaf.hidden, leaf.weight, p.targets, normal(6, seed=6), bias=leaf.bias, backend=backend, **options
        )
        got.loss.backward()
        want = bk.policy_loss(again.oracle().logprobs, normal(6, seed=6), **options)
        want.loss.backward()
        close(got.loss.detach(), want.loss.detach())
        for a, b in zip(leaf.grads(), again.grads(), strict=True):
            close(a, b)
