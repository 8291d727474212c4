"""Arguments that cannot be honoured are refused, by an error that names the argument; and every option does something."""

import dataclasses

import pytest
import torch
from batches import Batch
from helpers import INF, NAN, Problem, normal

import bapo_kernels as bk

H, W, T, A = normal(6, 4, seed=1), normal(9, 4, seed=2), torch.arange(6), normal(6, seed=3)


def head(**changed):
    args = {"hidden": H, "weight": W, "targets": T} | changed
    return bk.linear_logprobs(**args)


def policy(**changed):
    args = {"hidden": H, "weight": W, "targets": T, "advantages": A} | changed
    return bk.linear_policy_loss(**args)


def plain(**changed):
    args = {"logprobs": A, "advantages": A} | changed
    return bk.policy_loss(**args)


HEAD = [
    ("temperature", 0.0),
    ("temperature", -1.0),
    ("temperature", NAN),
    ("temperature", INF),
    ("temperature", None),
    ("temperature", torch.zeros(6)),
    ("temperature", torch.tensor([1, 1, 1, NAN, 1, 1])),
    ("temperature", torch.ones(5)),
    ("temperature", torch.ones(1)),
    ("softcap", 0.0),
    ("softcap", -3.0),
    ("softcap", INF),
    ("logit_scale", NAN),
    ("logit_scale", "1"),
    ("vocab_size", 0),
    ("vocab_size", 10),
    ("vocab_size", 2.5),
    ("vocab_size", True),
    ("bias", torch.zeros(8)),
    ("bias", torch.zeros(9, 1)),
    ("bias", torch.zeros(9, dtype=torch.int64)),
    ("mask", torch.ones(5)),
    ("mask", torch.ones(6, 1)),
    ("mask", torch.ones(1)),
    ("mask", [1] * 6),
    ("targets", torch.arange(5)),
    ("targets", torch.arange(3)),
    ("targets", torch.arange(6)[:, None]),
    ("targets", torch.arange(6).float()),
    ("targets", torch.ones(6, dtype=torch.bool)),
    ("targets", None),
    ("targets", torch.tensor([0, 1, 2, 3, 4, 9])),
    ("targets", torch.tensor([0, 1, 2, 3, 4, 2**31])),
    ("targets", torch.tensor([0, 1, 2, 3, 4, -1])),
    ("targets", torch.tensor([0, 1, 2, 3, 4, -99])),
    ("topk_ids", torch.zeros(5, 2, dtype=torch.int64)),
    ("topk_ids", torch.zeros(6, dtype=torch.int64)),
    ("topk_ids", torch.zeros(6, 2)),
    ("topk_ids", torch.full((6, 2), 9)),
    ("topk_ids", torch.full((6, 2), -2)),
    ("weight", normal(9, 5)),
    ("weight", normal(4, 9)),
    ("weight", normal(9)),
    ("weight", torch.empty(0, 4)),
    ("weight", torch.zeros(9, 4, dtype=torch.int64)),
    ("weight", None),
    ("hidden", torch.zeros(6, 4, dtype=torch.int64)),
    ("hidden", None),
    ("backend", "cuda"),
    ("backend", None),
    ("memory_budget", 0),
    ("memory_budget", -1),
    ("memory_budget", 1.5),
]


@pytest.mark.parametrize(("name", "value"), HEAD)
def test_head_arguments(name, value):
    head_only = name == "topk_ids" or (
        name == "temperature" and getattr(value, "shape", None) == (1,)
    )  # (1,): one for the one sequence
    for function in (head,) if head_only else (head, policy):
        with pytest.raises(ValueError, match=name):
            function(**{name: value})


def test_shape_errors_name_both_shapes():
    with pytest.raises(ValueError, match=r"(?s)targets.*\(6,.*\(5,\)"):
        head(targets=torch.arange(5))
    with pytest.raises(ValueError, match=r"weight.*\(6, 4\).*\(9, 5\)"):
        head(weight=normal(9, 5))
    with pytest.raises(ValueError, match=r"(?i)weight.*(shard|gather)"):
        head(weight=torch.empty(0, 4))


def test_invalid_targets_of_every_kind(monkeypatch):
    """Also where vocab_size is smaller than the head, and with other values of ignore_index."""
    with pytest.raises(ValueError, match="targets"):
        head(vocab_size=5)
    with pytest.raises(ValueError, match="targets"):
        head(targets=torch.full((6,), -100), ignore_index=-1)
    assert bool((head(targets=torch.full((6,), -1), ignore_index=-1).logprobs == 0).all())
    out = head(targets=torch.tensor([0, 1, 0, 2, 0, 3]), ignore_index=0)
    assert (out.logprobs == 0).tolist() == [True, False, True, False, True, False]


SHARED = [
    ("loss", "grop"),
    ("loss", None),
    ("loss", bk.BAPO),
    ("advantages", torch.ones(5)),
    ("advantages", 1.0),
    ("old_logprobs", torch.ones(5)),
    ("old_logprobs", torch.ones(6, 1)),
    ("old_logprobs", torch.ones(1)),
    ("rollout_logprobs", torch.ones(7)),
    ("mask", torch.ones(5)),
    ("mask", torch.ones(1)),
    ("aggregation", "mean"),
    ("normalizer", -1),
    ("normalizer", "4"),
    ("normalizer", True),
    ("normalizer", NAN),
    ("normalizer", torch.ones(1)),
    ("normalizer", torch.ones(6)),
    ("max_length", 4),  # not used by the aggregation
    ("kl_coef", NAN),
    ("kl_coef", "1"),
    ("kl_coef", True),
    ("kl_estimator", "k4"),
    ("entropy_coef", INF),
    ("entropy_coef", True),
    ("top_entropy", 0.0),
    ("top_entropy", 1.1),
    ("top_entropy", -0.2),
    ("top_entropy", NAN),
    ("top_entropy", True),
    ("cu_seqlens", [0, 6]),
    ("cu_seqlens", torch.tensor([0.0, 6.0])),
    ("cu_seqlens", torch.tensor([0, 5])),
    ("cu_seqlens", torch.tensor([1, 6])),
    ("cu_seqlens", torch.tensor([0, 4, 3, 6])),
    ("cu_seqlens", torch.tensor([0, 7])),
    ("cu_seqlens", torch.tensor([0, -1, 6])),
    ("cu_seqlens", torch.tensor([[0, 6]])),
    ("cu_seqlens", torch.tensor([], dtype=torch.int64)),
    ("cu_seqlens", torch.tensor(0)),
]


@pytest.mark.parametrize(("name", "value"), SHARED)
def test_policy_arguments(name, value):
    for function in (plain, policy):
        with pytest.raises(ValueError, match=name):
            function(**{name: value})


@pytest.mark.parametrize("function", [plain, policy])
def test_combinations_that_cannot_be_honoured(function):
    with pytest.raises(ValueError, match="ref_logprobs"):
        function(kl_coef=0.1)
    with pytest.raises(ValueError, match="ref_logprobs"):
        function(kl_coef=0.1, ref_logprobs=torch.ones(5))
    with pytest.raises(ValueError, match="max_length"):
        function(aggregation="seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="max_length"):
        function(aggregation="seq-mean-token-sum-norm", max_length=0)
    with pytest.raises(ValueError, match="normalizer"):
        function(aggregation="token-sum", normalizer=3)
    padded = {"logprobs": A.view(2, 3)} if function is plain else {"hidden": H.view(2, 3, 4), "targets": T.view(2, 3)}
    with pytest.raises(ValueError, match="cu_seqlens"):
        function(advantages=A.view(2, 3), cu_seqlens=torch.tensor([0, 6]), **padded)


def test_policy_loss_alone():
    for options in ({"entropy_coef": 0.1}, {"top_entropy": 0.5}, {"entropy": torch.ones(5)}):
        with pytest.raises(ValueError, match="entropy"):
            plain(**options)
    for name, value in (
        ("logprobs", torch.arange(6)),
        ("logprobs", None),
        ("logprobs", torch.zeros(2, 3, 1)),
        ("logprobs", torch.zeros(())),
    ):
        with pytest.raises(ValueError, match=name):
            plain(**{name: value})
    with pytest.raises(ValueError, match="hidden"):
        policy(
            hidden=normal(1, 2, 3, 4), targets=torch.zeros(1, 2, 3, dtype=torch.int64), advantages=torch.zeros(1, 2, 3)
        )
    with pytest.raises(ValueError, match="engine"):
        policy(engine="fast")


@pytest.mark.parametrize("function", [head, policy, plain, bk.LinearLogprobs, bk.LinearPolicyLoss, bk.GRPO, bk.BAPO])
def test_unknown_keywords(function):
    with pytest.raises(TypeError):
        function(temprature=0.5)


def test_unknown_loss_parameters():
    with pytest.raises(TypeError, match="eps"):
        bk.losses.get("grpo", eps=0.2)
    with pytest.raises(ValueError, match="grop"):
        bk.losses.get("grop")


FIELDS = [
    (
        bk.GRPO,
        {
            "clip_low": (-0.1, NAN, INF, None, "0.2", True),
            "clip_high": (-0.1, NAN, None, True),
            "dual_clip": (1.0, 0.5, NAN, "3", True),
        },
    ),
    (bk.PPO, {"clip_low": (-0.1,), "dual_clip": (1.0,)}),
    (bk.DAPO, {"clip_high": (-0.1,), "dual_clip": (0.0,)}),
    (
        bk.BAPO,
        {
            "target": (-0.1, NAN, None, "0.4", True),
            "c_low": ((0.9, 0.6), (-0.1, 0.9), (0.6,), 0.6, (0.6, NAN), (NAN, NAN), None, (0.6, "0.9")),
            "c_high": ((3.0, 1.2), (1.2, INF), (1.2, 2.0, 3.0), None),
            "step_low": (0.0, -0.02, NAN, None, True),
            "step_high": (0.0, -0.05, INF),
            "contribution": ("part", None),
            "measure": ("loss", None),
            "weighting": ("old", True),
            "order": ("high", None),
            "dual_clip": (1.0, 0.0, NAN),
        },
    ),
]


@pytest.mark.parametrize(("cls", "bad"), FIELDS, ids=lambda x: getattr(x, "__name__", ""))
def test_fields_of_losses(cls, bad):
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                cls(**{name: value})
    assert {f.name for f in dataclasses.fields(cls)} >= set(bad)


def test_losses_are_frozen_hashable_values():
    for name in ("grpo", "ppo", "dapo", "bapo"):
        loss = bk.losses.get(name)
        assert loss.name == name
        assert loss == bk.losses.get(name)
        assert hash(loss) == hash(bk.losses.get(name))
        assert len({loss, bk.losses.get(name), bk.losses.get(name, dual_clip=3.0)}) == 2
        with pytest.raises(dataclasses.FrozenInstanceError):
            loss.dual_clip = 2.0
    assert bk.GRPO() != bk.PPO()  # same numbers, another loss
    assert set(bk.losses.available()) >= {"grpo", "ppo", "dapo", "bapo"}
    assert bk.losses.get("dapo").clip_high == 0.28
    assert bk.BAPO(c_low=[0.6, 0.9]) == bk.BAPO()
    assert hash(bk.BAPO(c_low=[0.6, 0.9])) == hash(bk.BAPO())


def outcome(**options):
    batch = Batch.random(spread=0.8)
    out, logprobs, entropy = batch.call(
        rollout_logprobs=batch.rollout_logprobs, ref_logprobs=batch.ref_logprobs, **options
    )
    out.loss.backward()
    return torch.cat(
        [
            out.loss.detach().view(1),
            logprobs.grad.flatten(),
            torch.zeros(18) if entropy.grad is None else entropy.grad.flatten(),
        ]
    )


@pytest.mark.parametrize(
    ("base", "changed"),
    [
        ({}, {"loss": "ppo"}),
        ({}, {"aggregation": "token-sum"}),
        ({}, {"normalizer": 3}),
        ({"aggregation": "seq-mean-token-sum-norm", "max_length": 6}, {"max_length": 7}),
        ({}, {"kl_coef": 0.1}),
        ({"kl_coef": 0.1}, {"kl_estimator": "k1"}),
        ({}, {"entropy_coef": 0.1}),
        ({}, {"top_entropy": 0.3}),
        ({}, {"mask": None}),
        ({}, {"old_logprobs": None}),
        ({}, {"rollout_logprobs": None}),
        ({}, {"cu_seqlens": torch.tensor([0, 3, 14])}),
        *(
            ({"loss": bk.GRPO()}, {"loss": bk.GRPO(**{k: v})})
            for k, v in (("clip_low", 0.4), ("clip_high", 0.05), ("dual_clip", 1.1))
        ),
        *(
            ({"loss": bk.BAPO()}, {"loss": bk.BAPO(**{k: v})})
            for k, v in (
                ("target", 0.1),
                ("c_low", (0.7, 0.9)),
                ("c_high", (1.3, 2.0)),
                ("step_low", 0.07),
                ("step_high", 0.3),
                ("contribution", "ratio"),
                ("measure", "gradient"),
                ("weighting", "none"),
                ("order", "low-first"),
                ("dual_clip", 1.5),
            )
        ),
    ],
    ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()).replace("\n", "")[:70],
)
def test_every_option_changes_something(base, changed):
    if "cu_seqlens" in changed:
        batch = Batch.random("packed")
        one = batch.call(loss="grpo")[0].loss
        assert one != batch.call(loss="grpo", **changed)[0].loss
        return
    if "rollout_logprobs" in changed:  # only weighs the sums of BAPO's search
        batch = Batch.random()
        seen = {
            batch.call(loss="bapo", rollout_logprobs=r)[0].metrics["positive"].item()
            for r in (None, batch.rollout_logprobs)
        }
        assert len(seen) == 2
        return
    name = next(iter(changed))
    if isinstance(changed.get("loss"), bk.BAPO):
        # Found on some batch: a search may stop at the same bounds on others.
        assert any(
            not torch.equal(bapo_outcome(base["loss"], s), bapo_outcome(changed["loss"], s)) for s in range(30)
        ), name
        return
    assert not torch.equal(
        outcome(**base), outcome(**base, **changed) if name not in base else outcome(**{**base, **changed})
    ), name


def bapo_outcome(loss, seed):
    batch = Batch.random(seed=seed, spread=0.8)
    batch.advantages = batch.advantages - 0.3
    out, logprobs, _ = batch.call(loss=loss, rollout_logprobs=batch.rollout_logprobs)
    out.loss.backward()
    return logprobs.grad


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bias", normal(9, seed=5)),
        ("mask", torch.tensor([1, 0, 1, 1, 1, 1])),
        ("ignore_index", 2),
        ("temperature", 0.5),
        ("temperature", torch.tensor([1, 1, 1, 1, 2.0, 1], dtype=torch.float64)),
        ("logit_scale", 2.0),
        ("softcap", 1.0),
        ("vocab_size", 8),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "cpu", "reference"])
def test_every_option_of_the_head_changes_something(name, value, backend):
    p = Problem(H, W, None, T)
    assert not torch.equal(p.run(backend, **{name: value}).logprobs, p.run(backend).logprobs)
    assert not torch.equal(p.run(backend, **{name: value}).entropy, p.run(backend).entropy)
    one, other = policy(backend=backend, loss="ppo"), policy(backend=backend, loss="ppo", **{name: value})
    assert one.metrics["entropy"] != other.metrics["entropy"]
