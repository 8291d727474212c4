"""What must never pass in silence: NaN in active tokens, second derivatives, reused buffers, masks that are weights, odd numbers."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import BACKENDS, FUSED, NAN, Problem, integers, normal

import bapo_kernels as bk


@pytest.mark.parametrize("backend", FUSED)
def test_second_derivatives_are_refused(backend):
    problem = Problem.random().requires_grad()
    loss = problem.run(backend).logprobs.sum()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(loss, problem.hidden, create_graph=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_buffers_may_be_reused_before_the_backward(backend):
    def gradient(reuse: bool):
        problem = Problem.random(6, k=2).requires_grad()
        buffers = {
            "targets": problem.targets.clone(),
            "mask": torch.ones(6),
            "temperature": normal(6).abs() + 1,
            "topk_ids": problem.options["topk_ids"].clone(),
        }
        out = bk.linear_logprobs(problem.hidden, problem.weight, backend=backend, return_entropy=True, **buffers)
        if reuse:
            for t in buffers.values():
                t.zero_()
        (out.logprobs.sum() + out.topk_logprobs.sum() + out.entropy.sum()).backward()
        return problem.hidden.grad

    torch.testing.assert_close(gradient(True), gradient(False), rtol=0, atol=0)


LP, A = -normal(6).abs() - 0.1, normal(6, seed=1)


def with_nan(t: torch.Tensor, at: int = 2) -> torch.Tensor:
    return t.clone().index_fill(0, torch.tensor([at]), NAN)


READ = ["logprobs", "advantages", "old_logprobs", "ref_logprobs"]
CASES = [
    *((name, loss, top) for name in READ for loss in ("ppo", "bapo") for top in (None, 0.2, 1.0)),
    *(("rollout_logprobs", "bapo", top) for top in (None, 0.2, 1.0)),
    *(("entropy", loss, top) for loss in ("ppo", "bapo") for top in (0.2, 1.0)),
]


@pytest.mark.parametrize(("name", "loss", "top_entropy"), CASES)
def test_nan_of_an_active_token_shows(name, loss, top_entropy):
    given = {"logprobs": LP, "advantages": A, "old_logprobs": LP + 0.1, "rollout_logprobs": LP, "ref_logprobs": LP}
    given["entropy"] = torch.arange(6.0).double()  # token 2 is not among the highest
    given[name] = with_nan(given[name])
    leaf = given["logprobs"].detach().clone().requires_grad_()
    out = bk.policy_loss(
        leaf,
        given.pop("advantages"),
        loss=loss,
        kl_coef=0.1,
        top_entropy=top_entropy,
        **{k: v for k, v in given.items() if k != "logprobs"},
    )
    assert out.loss.isnan()
    out.loss.backward()
    assert leaf.grad.isnan().any()


def test_nan_of_an_active_token_shows_in_the_bounds():
    for name in ("advantages", "old_logprobs", "rollout_logprobs"):
        given = {"advantages": A, "old_logprobs": LP, "rollout_logprobs": LP}
        given[name] = with_nan(given[name])
        assert bk.bapo_bounds(LP, **given).contribution.isnan(), name


@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, NAN])
def test_a_mask_of_weights_is_refused(value):
    mask = torch.tensor([1.0, 0.0, value, 1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="mask must hold 0 or 1"):
        bk.policy_loss(LP, A, mask=mask)
    problem = Problem.random(6)
    with pytest.raises(ValueError, match="mask must hold 0 or 1"):
        problem.run("torch", mask=mask)


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_may_be_numpys(backend):
    problem = Problem.random(
        6, vocab_size=np.int64(11), temperature=np.float32(0.5), softcap=np.float64(3), logit_scale=np.int32(2)
    )
    plain = Problem(
        *problem.leaves, problem.targets, {"vocab_size": 11, "temperature": 0.5, "softcap": 3.0, "logit_scale": 2.0}
    )
    torch.testing.assert_close(
        problem.run(backend, ignore_index=np.int64(-100)).logprobs, plain.run(backend).logprobs, rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("name", "value"), [("softcap", 1e-300), ("softcap", 1e300), ("temperature", 1e-39), ("logit_scale", 1e300)]
)
def test_numbers_that_fp32_cannot_hold_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        Problem.random().run("torch", **{name: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"c_low": (0.6, 3.5)},
        {"c_high": (0.5, 3.0)},
        {"step_high": 1e-9},
        {"step_low": 1e-320},
        {"c_high": (1.2, 1e300)},
        {"c_low": (torch.ones(2),) * 2},
    ],
    ids=str,
)
def test_bounds_that_make_no_sense_are_refused(fields):
    with pytest.raises(ValueError, match="BAPO"):
        bk.BAPO(**fields)


def test_swapped_fixed_bounds_are_refused():
    with pytest.raises(ValueError, match="c_high"):
        bk.BAPO.fixed(2.0, 0.7)


def test_equal_losses_hash_alike():
    low, high = torch.tensor(0.7), torch.tensor(2.0)
    same = bk.BAPO.fixed(low, high), bk.BAPO.fixed(low, high)
    assert same[0] == same[1]
    assert hash(same[0]) == hash(same[1])
    assert bk.BAPO.fixed(low.clone(), high) != same[0]
    assert bk.BAPO() == bk.BAPO()
    assert bk.BAPO(target=0.5) != bk.BAPO()


@pytest.mark.parametrize(("name", "value"), [("dp_group", 1), ("dp_group", "x"), ("return_tokens", 1)])
def test_options_of_the_wrong_type_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        bk.policy_loss(LP, A, loss="grpo", **{name: value})


def test_approx_kl_is_not_negative_where_the_ratio_is_clamped():
    out = bk.policy_loss(LP, A, loss="grpo", old_logprobs=LP.index_fill(0, integers(6, 1), -torch.inf))
    assert 0 <= out.metrics["approx_kl"] < torch.inf


def test_command_line_ends_quietly_when_nobody_reads_on():
    line = f"{sys.executable} -m bapo_kernels env | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("python")
    assert done.stderr == ""


def test_the_design_that_the_environment_asks_for_is_reported(monkeypatch):
    monkeypatch.delenv("BAPO_KERNELS_DESIGN", raising=False)
    assert bk.env_report()["design on GPUs"] == "auto"
    monkeypatch.setenv("BAPO_KERNELS_DESIGN", "tile")
    assert bk.env_report()["design on GPUs"] == "tile"


def test_a_wrong_correction_is_told_the_public_ones():
    from bapo_kernels.integrations import batches

    assert issubclass(batches.Weighted, bk.corrections.Correction)
    with pytest.raises(ValueError, match="one of TruncatedIS, MaskedIS, IcePop, KPop, got 'icepop'"):
        bk.policy_loss(LP, A, loss="grpo", correction="icepop")


def test_a_wrong_budget_in_the_environment_is_reported(monkeypatch, capsys):
    monkeypatch.setenv("BAPO_KERNELS_MEMORY_BUDGET", "much")
    assert "must be a number of bytes" in bk.env_report()["memory budget"]
    monkeypatch.setenv("BAPO_KERNELS_MEMORY_BUDGET", "")
    assert bk.env_report()["memory budget"] == "256 MiB"


INF = float("inf")
UNLIKELY = [
    *((name, -1.0) for name in ("dppo-tv", "dppo-kl", "bpo")),  # masked: A < 0 and p < q
    *(
        (name, 0.0)
        for name in (
            "reinforce",
            "cispo",
            "bpo",
            "dppo-tv",
            "dppo-kl",
            "topr",
            "vespo",
            "gmpo",
            "score-centering",
        )
    ),
]


@pytest.mark.parametrize(("name", "advantage"), UNLIKELY)
def test_an_excluded_token_without_a_coefficient_costs_nothing(name, advantage):
    """log p = -inf before a coefficient of 0."""
    records = {}
    if name == "score-centering":
        ids = torch.tensor([[0], [0]])
        records = {
            "topk_logprobs": torch.tensor([[-INF], [-1.0]]),
            "rollout_topk_ids": ids,
            "rollout_topk_logprobs": -torch.ones(2, 1),
        }
    lp = torch.tensor([-INF, -1.0], requires_grad=True)
    advantages = torch.tensor([advantage, 1.0])
    out = bk.policy_loss(
        lp, advantages, loss=name, rollout_logprobs=-torch.ones(2), old_logprobs=-torch.ones(2),
        return_tokens=True, **records,
    )  # fmt: skip
    assert out.loss.isfinite()
    assert out.tokens.coef[0] == 0


@pytest.mark.parametrize("divergence", ["topk-tv", "topk-kl"])
@pytest.mark.parametrize("side", ["topk_logprobs", "rollout_topk_logprobs"])
def test_nan_of_a_record_shows(divergence, side):
    lp = torch.tensor([-0.1], requires_grad=True)
    records = {"topk_logprobs": torch.tensor([[-0.1, -3.0]]), "rollout_topk_logprobs": torch.tensor([[-2.0, -1.0]])}
    records[side][0, 0] = NAN
    out = bk.policy_loss(
        lp,
        torch.ones(1),
        loss=bk.DPPO(divergence),
        rollout_logprobs=torch.tensor([-2.0]),
        rollout_topk_ids=torch.tensor([[0, 1]]),
        **records,
    )
    out.loss.backward()
    assert out.loss.isnan()
    assert lp.grad.isnan()


@pytest.mark.parametrize("loss", ["gspo", "gmpo", "vespo", "topr"])
def test_sequences_of_tensors_made_in_inference_mode(loss):
    with torch.inference_mode():
        edges = torch.tensor([0, 2, 6])
        out = bk.policy_loss(-torch.rand(6), torch.ones(6), loss=loss, cu_seqlens=edges, return_tokens=True)
    assert out.tokens.coef.isfinite().all()


def test_a_normalizer_of_zero_is_never_a_plausible_number():
    leaf = LP.clone().requires_grad_()
    for zero in (0, torch.tensor(0.0)):
        assert not bk.policy_loss(leaf, A, loss="ppo", normalizer=zero).loss.isfinite()
        out = bk.policy_loss(leaf, A, loss="ppo", normalizer=zero, mask=torch.zeros(6))
        out.loss.backward()
        assert out.loss == 0
        assert (leaf.grad == 0).all()


def test_an_infinite_entropy_hides_no_gradient():
    leaf = LP[:3].clone().requires_grad_()
    entropy = torch.tensor([INF, 1.0, 2.0]).double()
    bk.policy_loss(leaf, torch.ones(3), loss="reinforce", entropy=entropy, top_entropy=0.34).loss.backward()
    torch.testing.assert_close(leaf.grad, torch.tensor([-1.0, 0.0, -1.0]).double() / 3)


@pytest.mark.parametrize(
    "build",
    [
        lambda: bk.CISPO(ratio_high=1e300),
        lambda: bk.SAPO(tau_pos=1e-40),
        lambda: bk.DRO(beta=1e300),
        lambda: bk.TruncatedIS(cap=1e39),
        lambda: bk.GRPO(dual_clip=1e40),
        lambda: bk.VESPO(lambda_pos=1e39),
        lambda: bk.TargetEntropy(coef=1.0),
    ],
)
def test_parameters_that_fp32_cannot_hold_are_refused(build):
    with pytest.raises(ValueError, match=r"\(\w+=\.\.\.\) must be"):
        build()


@pytest.mark.parametrize("options", [{"engine": "x"}, {"backend": "x"}, {"loss": "x"}, {"aggregation": "x"}])
def test_modules_refuse_bad_options_when_made(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        bk.LinearPolicyLoss(**options)


def test_recorded_log_probs_are_floating_point():
    for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs"):
        with pytest.raises(ValueError, match=name):
            bk.policy_loss(LP, A, loss="bapo", kl_coef=0.1, **{"ref_logprobs": LP, name: torch.ones(6).long()})


@pytest.mark.parametrize("size", [1e-3, 1e-4, 1e-5])
def test_small_divergences_are_not_rounding(size):
    """e^x - 1 - x of a policy that has hardly moved, in fp32."""
    reference = -torch.rand(64, generator=torch.Generator().manual_seed(0)) * 1e-2
    lp = reference + size * normal(64).float()
    x = reference.double() - lp.double()
    out = bk.policy_loss(lp, torch.ones(64), loss="ppo", old_logprobs=reference, ref_logprobs=reference, kl_coef=0.1)
    for name, want in (("kl", torch.expm1(x) - x), ("approx_kl", torch.expm1(-x) + x)):
        assert out.metrics[name].item() == pytest.approx(want.mean().item(), rel=1e-3), name


def test_fixed_bounds_keep_the_other_fields():
    loss = bk.BAPO.fixed(0.7, 1.5, weighting="none", measure="gradient", dual_clip=3.0)
    assert (loss.weighting, loss.measure, loss.dual_clip) == ("none", "gradient", 3.0)


def test_a_broken_reward_shows():
    assert bk.group_advantages(torch.tensor([INF, INF]), group_size=2).isnan().all()


@pytest.mark.parametrize("value", [None, "x", 1.5])
def test_ignore_index_is_an_integer(value):
    problem = Problem.random()
    with pytest.raises(ValueError, match="ignore_index"):
        bk.linear_policy_loss(problem.hidden, problem.weight, problem.targets, normal(5), ignore_index=value)
