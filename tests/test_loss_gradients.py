"""Gradients of `policy_loss` with every loss: against finite differences where the loss is a true function of the log-probs, against the
formula's coefficient where it holds stop-gradients; and small cases worked out by hand."""

import dataclasses
import math

import naive
import naive_losses
import pytest
import torch
from batches import LAYOUTS, gradcheck
from helpers import close
from loss_batches import NAMES, batch_of, call, expected, inputs, plain

import bapo_kernels as bk

CORRECTIONS = (
    None,
    bk.TruncatedIS(cap=1.2),
    bk.TruncatedIS(level="sequence"),
    bk.MaskedIS(low=0.7, high=1.6),
    bk.MaskedIS(level="sequence"),
    bk.IcePop(low=0.7, high=1.6),
    bk.KPop(phi=0.05),
)
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum")
ESTIMATORS = ("k1", "k2", "k3", "k3+")


def mix(seed: int) -> dict:
    """Options of the call number `seed`: every correction meets every aggregation and every KL estimator."""
    aggregation = AGGREGATIONS[seed % 5]
    options = {"correction": CORRECTIONS[seed % 7], "aggregation": aggregation}
    options |= {"kl_coef": 0.3, "kl_estimator": ESTIMATORS[seed % 4], "entropy_coef": 0.2}
    options["top_entropy"] = (None, 0.5)[seed % 2]
    if aggregation.endswith("norm"):
        options["max_length"] = 9
    if aggregation != "token-sum" and seed % 3 == 0:
        options["normalizer"] = 5
    return options


@pytest.mark.parametrize("seed", range(35))
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_loss_is_what_the_formulas_add_up_to(name, seed):
    batch, loss, options = batch_of(LAYOUTS[seed % 3], 100 * seed), bk.losses.get(name), mix(seed)
    bare = call(batch, loss, seed)  # without options: what Clip-Cov drew
    want, x = expected(batch, loss, seed, bare), plain(batch)
    got = call(batch, loss, seed, **options)
    got.out.loss.backward()

    tokens = x.tokens()
    lengths = [sum(x.sequence[i] == s for i in tokens) for s in range(batch.sequences)]
    weights = naive.token_weights(options["aggregation"], lengths, options.get("normalizer"), options.get("max_length"))
    entropy, ref = batch.entropy.flatten().tolist(), batch.ref_logprobs.flatten().tolist()
    threshold = -math.inf
    if options["top_entropy"]:
        count = math.ceil(options["top_entropy"] * len(tokens) - 1e-9)
        threshold = sorted((entropy[i] for i in tokens), reverse=True)[count - 1]
    total, grad, grad_entropy, factors = 0.0, [0.0] * len(ref), [0.0] * len(ref), [0.0] * len(ref)
    for i in tokens:
        correction, weight = options["correction"], weights[x.sequence[i]]
        factors[i] = float(entropy[i] >= threshold)
        if correction is not None:
            fields = dataclasses.asdict(correction)
            factors[i] *= naive_losses.correction(type(correction).__name__, x, i, **fields)
        kl, slope = naive.kl_token(options["kl_estimator"], ref[i] - x.logprobs[i])
        total += weight * (factors[i] * want.loss[i] + 0.3 * kl - 0.2 * entropy[i])
        grad[i] = weight * (factors[i] * want.coef[i] + 0.3 * slope)
        grad_entropy[i] = -0.2 * weight

    def check(tensor, values, what):
        close(tensor, torch.tensor(values, dtype=torch.float64).view(tensor.shape), what)

    check(got.out.loss, total, "loss")
    check(got.logprobs.grad, grad, "gradient")
    check(got.entropy.grad, grad_entropy, "gradient of entropy")
    check(got.out.tokens.loss, [f * v for f, v in zip(factors, want.loss, strict=True)], "tokens.loss")
    check(got.out.tokens.coef, [f * v for f, v in zip(factors, want.coef, strict=True)], "tokens.coef")
    assert got.out.tokens.clipped.flatten().tolist() == want.clipped  # the loss's own clip only
    if got.topk is not None:
        rows = zip(want.head_coef, factors, x.sequence, strict=True)
        check(got.topk.grad, [[weights[s] * f * c for c in row] for row, f, s in rows], "gradient of topk_logprobs")


# Losses without a stop-gradient; those of a sequence ratio under the aggregation that makes their token form the loss itself.
TRUE = {
    **dict.fromkeys(("grpo", "ppo", "dapo", "dcpo", "sapo", "reinforce", "dro", "clip-cov", "kl-cov"), AGGREGATIONS),
    **dict.fromkeys(("gspo", "luspo", "gmpo"), ("seq-mean-token-mean", "seq-mean-token-sum", "token-sum")),
}
OBJECTS = {
    "gspo": bk.GSPO(clip_low=0.1, clip_high=0.1),
    "luspo": bk.LUSPO(clip_low=0.1, clip_high=0.1),
    "clip-cov": bk.ClipCov(fraction=0.2, cov_low=-9.0, cov_high=9.0),
    "kl-cov": bk.KLCov(fraction=0.3),
}


def check_by_differences(batch, loss, **options):
    gradcheck(batch, loss, **(inputs(batch, loss) | {"mask": batch.mask, "cu_seqlens": batch.cu_seqlens} | options))


@pytest.mark.parametrize(("name", "aggregation"), [(n, a) for n, names in TRUE.items() for a in names])
def test_finite_differences(name, aggregation):
    loss = OBJECTS.get(name, bk.losses.get(name))
    for seed, correction in enumerate((None, bk.TruncatedIS(level="sequence"), bk.IcePop(low=0.2, high=9.0))):
        batch = batch_of(LAYOUTS[seed], 100 * seed)
        if name in ("gspo", "luspo", "gmpo"):  # one advantage and one weight for each sequence
            sign = torch.tensor([0.7, -1.3, 0.4][: batch.sequences], dtype=torch.float64)
            batch.advantages = sign[torch.tensor(batch.sequence)].view(batch.logprobs.shape)
            correction = bk.TruncatedIS(level="sequence") if correction else None
        options = {"max_length": 8} if aggregation.endswith("norm") else {}
        check_by_differences(
            batch,
            loss,
            aggregation=aggregation,
            correction=correction,
            kl_coef=0.2,
            kl_estimator=ESTIMATORS[seed],
            entropy_coef=0.3,
            **options,
        )


@pytest.mark.parametrize("loss", [bk.BAPO.fixed(0.8, 1.3), bk.BAPO.fixed(0.8, 1.1, dual_clip=1.4)], ids=str)
def test_finite_differences_of_fixed_bounds(loss):
    check_by_differences(batch_of(), loss, kl_coef=0.2, entropy_coef=0.3)


@pytest.mark.parametrize("name", ["gspo", "luspo", "gmpo"])
def test_the_token_form_is_the_sequence_loss(name):
    """The gradient of -A s of the sequence, whatever form the token's ratio is written in."""
    logprobs = torch.tensor([-0.5, -1.0, -0.2, -0.7], dtype=torch.float64, requires_grad=True)
    old, edges = torch.tensor([-0.6, -1.3, -0.2, -0.4], dtype=torch.float64), [(0, 1), (1, 4)]
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    loss = bk.losses.get(name, clip_low=0.35, clip_high=0.35)
    bk.policy_loss(
        logprobs, advantages, loss=loss, old_logprobs=old, cu_seqlens=torch.tensor([0, 1, 4])
    ).loss.backward()
    leaf = logprobs.detach().clone().requires_grad_()
    terms = [
        -a * (leaf[i:j] - old[i:j]).mean().exp() * (j - i if name == "luspo" else 1)
        for a, (i, j) in zip(advantages, edges, strict=True)
    ]
    (sum(terms) / 2).backward()
    close(logprobs.grad, leaf.grad)


def one(lp, old, advantage, loss, **options):
    leaf = torch.tensor(lp, dtype=torch.float64, requires_grad=True)
    given = {"old_logprobs": torch.tensor(old, dtype=torch.float64)} | options
    out = bk.policy_loss(leaf, torch.tensor(advantage, dtype=torch.float64), loss=loss, return_tokens=True, **given)
    out.loss.backward()
    return out.loss.item(), leaf.grad.tolist()


@pytest.mark.parametrize("sign", [1, -1])
def test_cispo_weighs_and_does_not_clip(sign):
    loss, (grad,) = one([-2.0], [-3.0], [float(sign)], bk.CISPO(ratio_high=1.28))
    assert loss == pytest.approx(sign * 2.56)
    assert grad == pytest.approx(-sign * 1.28)
    loss, (grad,) = one([-2.0], [-2.0 - math.log(0.1)], [float(sign)], bk.CISPO(ratio_high=1.28))  # no lower bound
    assert loss == pytest.approx(sign * 0.2)
    assert grad == pytest.approx(-sign * 0.1)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_gspo_of_a_short_and_a_long_sequence(layout):
    loss = bk.GSPO(clip_low=0.2, clip_high=0.2)
    options = {"cu_seqlens": torch.tensor([0, 1, 4])}
    logprobs, flat = torch.tensor([0.1, 0.3, 0.0, -0.3], dtype=torch.float64), [0, 1, 2, 3]
    if layout == "padded":
        logprobs = torch.tensor([[0.1, 5.0, -9.0], [0.3, 0.0, -0.3]], dtype=torch.float64)
        options, flat = {"mask": torch.tensor([[1, 0, 0], [1, 1, 1]])}, [0, 3, 4, 5]
    for aggregation, want, weights in (
        ("seq-mean-token-mean", -0.052585, [1 / 2, 1 / 6]),
        ("token-mean", 0.473707, [1 / 4, 1 / 4]),
    ):
        leaf = logprobs.clone().requires_grad_()
        out = bk.policy_loss(
            leaf,
            torch.tensor([1.0, -1.0]),
            loss=loss,
            old_logprobs=torch.zeros_like(leaf),
            aggregation=aggregation,
            **options,
        )
        out.loss.backward()
        assert out.loss.item() == pytest.approx(want, abs=1e-6)
        s = math.exp(0.1)
        exact = [-s * weights[0], *[weights[1]] * 3]
        close(leaf.grad.flatten()[flat], torch.tensor(exact, dtype=torch.float64))


@pytest.mark.parametrize(
    ("advantage", "loss", "value", "grad"),
    [
        (0.0, bk.PPO(), 0.0, 0.0),
        (1.0, bk.PPO(), -1.2, 0.0),
        (-1.0, bk.PPO(dual_clip=3.0), 3.0, 0.0),
        (-1.0, bk.PPO(), math.exp(20), 0.0),
        (1.0, bk.GSPO(), -1.0004, 0.0),
        (-1.0, bk.GSPO(), math.exp(20), 0.0),
        (-1.0, bk.GMPO(), math.exp(20), 0.0),
        (1.0, bk.SAPO(), -4.0, 0.0),
    ],
    ids=str,
)
def test_far_beyond_the_clip(advantage, loss, value, grad):
    got, (slope,) = one([-1.0], [-101.0], [advantage], loss)
    assert got == pytest.approx(value)
    assert slope == grad


@pytest.mark.parametrize(("log_ratio", "log_w"), [(-100.0, math.log(1e-8)), (-19.0, math.log(1e-8)), (2.0, 2.0)])
def test_vespo_has_a_floor_below_its_weight(log_ratio, log_w):
    """20 for each token, and 1e-8 for the sequence."""
    loss = bk.VESPO(k_pos=0.1, lambda_pos=0.5)
    phi = math.exp(0.5 + 0.1 * log_w - 0.5 * math.exp(log_w))
    got, (slope,) = one([-1.0], [-1.0 - log_ratio], [1.0], loss)
    assert got == pytest.approx(phi)
    assert slope == pytest.approx(-phi)
    _, slopes = one([-1.0] * 3, [-1.0 - x for x in (log_ratio, 30.0, 0.0)], [1.0] * 3, loss)
    total = min(max(min(max(log_ratio, -20), 20) + 20, math.log(1e-8)), 20)
    assert slopes == pytest.approx([-math.exp(0.5 + 0.1 * total - 0.5 * math.exp(total)) / 3] * 3)


def test_dual_clip_only_for_negatives():
    old = [-1.0 - math.log(10.0)]
    for advantage, loss, value, grad in (
        (1.0, bk.PPO(dual_clip=3.0), -1.2, 0.0),
        (-1.0, bk.PPO(dual_clip=3.0), 3.0, 0.0),
        (-1.0, bk.PPO(), 10.0, 10.0),
    ):
        got, (slope,) = one([-1.0], old, [advantage], loss)
        assert got == pytest.approx(value)
        assert slope == pytest.approx(grad)


def test_k3_under_a_correction_keeps_its_own_gradient():
    """The correction weighs the policy term; the KL is as it would be alone."""
    ref = torch.tensor([-0.5, -1.5], dtype=torch.float64)
    rollout = torch.tensor([-2.0, -2.0], dtype=torch.float64)
    options = {"ref_logprobs": ref, "kl_coef": 1.0, "rollout_logprobs": rollout, "correction": bk.TruncatedIS(cap=1.7)}
    loss, grad = one([-1.0, -1.0], [-1.0, -1.0], [0.0, 1.0], "ppo", **options)
    assert loss == pytest.approx((0.148721 + 0.106531 - 1.7) / 2, abs=1e-6)
    assert grad == pytest.approx([(1 - math.exp(0.5)) / 2, (1 - math.exp(-0.5) - 1.7) / 2])
