"""Losses that users add: on every backend, with parameters, over sequences, and what is refused."""

import pytest
import torch
from batches import LAYOUTS, Batch
from helpers import BACKENDS, FUSED, INF, NAN, Problem, assert_bits, close, integers, normal

import bapo_kernels as bk


@pytest.fixture(autouse=True)
def _clean_registry():
    before = dict(bk.losses._LOSSES)
    yield
    bk.losses._LOSSES.clear()
    bk.losses._LOSSES.update(before)


def asymmetric(x, scale):
    return -torch.where(x.advantages > 0, 1.0, scale) * x.advantages * x.ratio


def ppo(x, low, high):
    return -torch.minimum(x.ratio * x.advantages, x.ratio.clamp(low, high) * x.advantages)


def sequence_ratio(x):
    """GSPO without its clip, as a true function of the log-probs."""
    return -x.sequence_mean(x.logprobs - x.old_logprobs).exp() * x.advantages


def per_sequence(x, power):
    return (x.sequence_sum(x.logprobs) * x.sequence_mean(x.rollout_logprobs)).abs() ** power + 0 * x.logprobs


def test_it_is_a_loss_like_the_others():
    bk.losses.register("mine", asymmetric, scale=0.5, aggregation="seq-mean-token-sum")
    assert "mine" in bk.losses.available()
    assert bk.losses.available() == sorted(bk.losses.available())
    loss = bk.losses.get("mine")
    assert isinstance(loss, bk.losses.Loss)
    assert loss.name == "mine"
    assert loss.aggregation == "seq-mean-token-sum"
    assert loss == bk.losses.get("mine", scale=0.5) != bk.losses.get("mine", scale=0.6)
    assert hash(loss) == hash(bk.losses.get("mine"))
    assert "mine" in str(loss)
    with pytest.raises(AttributeError):
        loss.name = "other"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rule_decides_value_and_gradient(layout):
    bk.losses.register("mine", asymmetric, scale=0.5)
    batch = Batch.random(layout)
    for loss, scale in (("mine", 0.5), (bk.losses.get("mine", scale=0.1), 0.1)):
        out, logprobs, _ = batch.call(loss=loss, return_tokens=True)
        out.loss.backward()
        ratio = (batch.logprobs - batch.old_logprobs).exp()
        coef = -torch.where(batch.advantages > 0, 1.0, scale) * batch.advantages * ratio
        coef = torch.where(batch.mask, coef, 0.0)
        close(out.tokens.coef, coef)
        close(out.tokens.loss, coef)  # linear in the ratio
        close(out.loss.detach(), coef.sum() / batch.mask.sum())
        close(logprobs.grad, coef / batch.mask.sum())
        assert not out.tokens.clipped.any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rewritten_ppo_is_ppo(layout):
    bk.losses.register("mine", ppo, low=0.8, high=1.2)
    options = {"kl_coef": 0.1, "entropy_coef": 0.2, "top_entropy": 0.6, "correction": bk.TruncatedIS()}
    for seed in range(4):
        batch = Batch.random(layout, seed)
        got, got_lp, got_h = batch.call(loss="mine", return_tokens=True, **options)
        want, want_lp, want_h = batch.call(loss="ppo", return_tokens=True, **options)
        for out in (got, want):
            out.loss.backward()
        close(got.loss.detach(), want.loss.detach())
        close(got_lp.grad, want_lp.grad)
        close(got_h.grad, want_h.grad)
        close(got.tokens.coef, want.tokens.coef)
        assert set(got.metrics) == set(want.metrics)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_and_means_of_sequences_are_differentiable(layout):
    bk.losses.register("ratio", sequence_ratio)
    bk.losses.register("powers", per_sequence, power=1.5, needs=())
    batch = Batch.random(layout)
    for loss in ("ratio", "powers"):

        def function(logprobs, loss=loss):
            return bk.policy_loss(
                logprobs,
                batch.advantages,
                loss=loss,
                mask=batch.mask,
                cu_seqlens=batch.cu_seqlens,
                old_logprobs=batch.old_logprobs,
                rollout_logprobs=batch.rollout_logprobs,
            ).loss

        assert torch.autograd.gradcheck(function, batch.logprobs.clone().requires_grad_())
    out, logprobs, _ = batch.call(loss="ratio", return_tokens=True, aggregation="token-sum")
    sequence = torch.tensor(batch.sequence).view(batch.logprobs.shape)
    for s in range(batch.sequences):
        rows = batch.mask & (sequence == s)
        mean = (batch.logprobs - batch.old_logprobs)[rows].mean()
        close(out.tokens.loss[rows], -mean.exp() * batch.advantages[rows])
    out.loss.backward()
    close(logprobs.grad, out.tokens.coef)
    assert not logprobs.grad[~batch.mask].any()


def test_the_ratio_has_its_gradient_whoever_asks_first():
    def rule(x, look):
        if look:
            with torch.no_grad():
                assert x.ratio.isfinite().all()
        return -x.ratio * x.advantages

    bk.losses.register("mine", rule, look=True)
    batch, gradients = Batch.random("padded"), []
    for look in (True, False):
        out, logprobs, _ = batch.call(loss=bk.losses.get("mine", look=look))
        out.loss.backward()
        gradients.append(logprobs.grad)
    assert gradients[0].any()
    assert_bits(*gradients)


def test_what_a_rule_sees():
    seen = {}

    def rule(x):
        seen.update({k: getattr(x, k) for k in ("logprobs", "ratio", "advantages", "mask")})
        seen.update(old=x.old_logprobs, rollout=x.rollout_logprobs)
        return x.logprobs * 1.0

    bk.losses.register("mine", rule)
    batch = Batch.random("packed")
    for field in ("logprobs", "advantages", "old_logprobs", "rollout_logprobs"):
        setattr(batch, field, getattr(batch, field).masked_fill(~batch.mask, NAN))
    out, logprobs, _ = batch.call(loss="mine", rollout_logprobs=batch.rollout_logprobs)
    out.loss.backward()
    assert logprobs.grad.isfinite().all()
    assert_bits(seen["mask"], batch.mask)
    for name, t in seen.items():
        assert t.shape == batch.mask.shape, name
        assert t.isfinite().all(), name
        assert name == "logprobs" or name == "ratio" or not t.requires_grad, name
    assert_bits(seen["old"][batch.mask], batch.old_logprobs[batch.mask])
    assert_bits(seen["rollout"][batch.mask], batch.rollout_logprobs[batch.mask])
    bk.policy_loss(torch.tensor([-1.0]), torch.ones(1), loss="mine", old_logprobs=torch.tensor([-INF]))
    assert seen["ratio"].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", [asymmetric, sequence_ratio], ids=["token", "sequence"])
def test_straight_from_the_head(rule, backend):
    bk.losses.register("mine", rule, **({"scale": 0.3} if rule is asymmetric else {}))
    p = Problem.random(9, 4, 13)
    mask, edges = integers(4, 9, seed=3) > 0, torch.tensor([0, 4, 9])
    options = {"loss": "mine", "mask": mask, "cu_seqlens": edges, "old_logprobs": p.oracle().logprobs - 0.1}
    leaf, again = p.requires_grad(), p.requires_grad()
    advantages = normal(9, seed=4)
    got = bk.linear_policy_loss(
        leaf.hidden, leaf.weight, p.targets, advantages, bias=leaf.bias, backend=backend, **options
    )
    got.loss.backward()
    want = bk.policy_loss(again.oracle().logprobs, advantages, **options)
    want.loss.backward()
    close(got.loss.detach(), want.loss.detach())
    for a, b in zip(leaf.grads(), again.grads(), strict=True):
        close(a, b)
    module = bk.LinearPolicyLoss(loss="mine", backend=backend)
    rest = {k: v for k, v in options.items() if k != "loss"}
    assert_bits(module(p.hidden, p.weight, p.targets, advantages, bias=p.bias, **rest).loss, got.loss.detach())


@pytest.mark.parametrize("backend", FUSED)
def test_a_rule_that_ignores_the_policy_is_refused(backend):
    """It would train on nothing, without a word."""
    bk.losses.register("constant", lambda x: x.advantages)
    p = Problem.random().requires_grad()
    options = {"bias": p.bias, "loss": "constant", "old_logprobs": torch.zeros(5), "backend": backend}
    with pytest.raises(ValueError, match=r"'constant'.*differentiable"):
        bk.linear_policy_loss(p.hidden, p.weight, p.targets, torch.ones(5), **options)
    with torch.no_grad():
        assert bk.linear_policy_loss(p.hidden, p.weight, p.targets, torch.ones(5), **options).loss == 1


@pytest.mark.parametrize(
    "rule", [lambda x: x.ratio, lambda x, other: x.ratio, lambda: 0], ids=["none", "other", "no x"]
)
def test_a_rule_that_does_not_take_the_parameters_is_refused(rule):
    with pytest.raises(ValueError, match=r"rule.*scale"):
        bk.losses.register("mine", rule, scale=0.5)


def test_needs():
    bk.losses.register("both", lambda x: x.logprobs, needs=("old_logprobs", "rollout_logprobs"))
    bk.losses.register("one", lambda x: x.logprobs, needs="rollout_logprobs")
    bk.losses.register("none", lambda x: x.logprobs, needs=())
    bk.losses.register("usual", lambda x: x.logprobs)
    lp, a = torch.zeros(2), torch.ones(2)
    for name, missing in (("both", "old_logprobs"), ("one", "rollout_logprobs"), ("usual", "old_logprobs")):
        with pytest.raises(ValueError, match=rf"{name}.*{missing}"):
            bk.policy_loss(lp, a, loss=name)
        with pytest.raises(ValueError, match=rf"{name}.*{missing}"):
            bk.linear_policy_loss(normal(2, 3), normal(4, 3), torch.zeros(2, dtype=torch.int64), a, loss=name)
    with pytest.raises(ValueError, match=r"both.*rollout_logprobs"):
        bk.policy_loss(lp, a, loss="both", old_logprobs=lp)
    assert bk.policy_loss(lp, a, loss="none").loss == 0
    assert bk.policy_loss(lp, a, loss="one", rollout_logprobs=lp).loss == 0


@pytest.mark.parametrize(
    "rule",
    [
        lambda x: x.logprobs.sum(),
        lambda x: x.logprobs[:, :1],
        lambda x: x.logprobs[None],
        lambda x: x.logprobs.flatten(),
        lambda x: None,
        lambda x: 0.0,
        lambda x: [x.logprobs],
    ],
)
def test_a_rule_has_to_return_one_number_for_each_token(rule):
    bk.losses.register("mine", rule)
    batch = Batch.random()
    with pytest.raises(ValueError, match=r"'mine'.*must return .*shape \(3, 6\)"):
        batch.call(loss="mine")


@pytest.mark.parametrize("name", ["bapo", "ppo", "score-centering", "mine"])
def test_a_name_can_be_taken_once(name):
    bk.losses.register("mine", asymmetric, scale=1.0)
    before = bk.losses.get(name)
    with pytest.raises(ValueError, match=name):
        bk.losses.register(name, sequence_ratio)
    assert bk.losses.get(name) == before


@pytest.mark.parametrize(
    ("message", "args"),
    [
        ("name", {"name": ""}),
        ("name", {"name": 3}),
        ("name", {"name": None}),
        ("rule", {"rule": None}),
        ("rule", {"rule": "ppo"}),
        ("rule", {"rule": bk.PPO()}),
        ("needs", {"needs": ("advantages",)}),
        ("needs", {"needs": "ref_logprobs"}),
        ("needs", {"needs": ("old_logprobs", "rollout_topk_ids")}),
        ("aggregation", {"aggregation": "mean"}),
        ("aggregation", {"aggregation": None}),
        ("hashable", {"scale": [1.0]}),
        ("hashable", {"scale": {"a": 1}}),
    ],
)
def test_what_is_refused(message, args):
    before = bk.losses.available()
    with pytest.raises(ValueError, match=message):
        bk.losses.register(**{"name": "mine", "rule": asymmetric} | args)
    assert bk.losses.available() == before


def test_parameters():
    bk.losses.register("mine", asymmetric, scale=0.5)
    with pytest.raises(TypeError, match=r"'mine'.*'scales'.*scale"):
        bk.losses.get("mine", scales=1.0)
    bk.losses.register("bare", sequence_ratio)
    with pytest.raises(TypeError, match=r"'bare'.*none"):
        bk.losses.get("bare", scale=1.0)
    first = bk.losses.get("mine", scale=0.1)
    bk.losses.register("other", ppo, low=0.8, high=1.2)
    assert bk.losses.get("other", high=3.0, low=0.1) == bk.losses.get("other", low=0.1, high=3.0)
    assert first == bk.losses.get("mine", scale=0.1)


def test_overrides_have_to_be_hashable_too():
    bk.losses.register("mine", asymmetric, scale=0.5)
    with pytest.raises(ValueError, match="hashable"):
        bk.losses.get("mine", scale=[1.0])


def test_nan_of_a_rule_shows_and_of_masked_tokens_does_not():
    bk.losses.register("mine", lambda x: torch.where(x.advantages == 7, NAN, 1.0) * x.logprobs)
    batch = Batch.random()
    batch.advantages[0, 0] = 7.0
    batch.mask[0, 0] = True
    assert batch.call(loss="mine")[0].loss.isnan()
    batch.mask[0, 0] = False
    out, logprobs, _ = batch.call(loss="mine")
    out.loss.backward()
    assert out.loss.isfinite()
    assert logprobs.grad.isfinite().all()
