"""The losses in verl's own loss path on a CPU, and its heads replaced: real verl, without an engine of its own (they need a GPU)."""

import functools
import importlib
import importlib.util
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers import close, integers, normal
from verl_model import tiny_model

import bapo_kernels as bk
from bapo_kernels.integrations import batches, packages
from bapo_kernels.integrations import verl as integration

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed (it has no version for this Python)", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    engine_base = pytest.importorskip(
        "verl.workers.engine.base", reason="packages that verl imports are missing", exc_type=ImportError
    )
    from omegaconf import OmegaConf
    from tensordict import TensorDict
    from verl.trainer.ppo import core_algos
    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.metric import Metric
    from verl.workers.utils.losses import ppo_loss

OURS = "bapo_kernels.integrations.verl.PolicyLossConfig"
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOCAL = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}
GLOBAL = {"dp_size": 2, "batch_num_tokens": 37, "global_batch_size": 9}
FIXED = {"c_low": [0.8, 0.8], "c_high": [1.2, 1.2]}
AUTHORS = {"ratio_lower_start": 0.6, "ratio_lower_max": 0.8, "ratio_upper_start": 1.2, "ratio_upper_max": 2.0}
PROMPT, LENGTHS = 3, (5, 1, 4, 7, 2, 6)


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    """verl's classes and registry are put back after each test."""
    monkeypatch.setattr(engine_base.BaseEngine, "train_batch", _original(engine_base.BaseEngine.train_batch))
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", dict(core_algos.POLICY_LOSS_REGISTRY))
    integration.register()
    yield
    integration.use_fused_head(False)


def _original(function):
    return getattr(function, "bapo_kernels_original", function)


def actor(
    loss_mode="vanilla", target=OURS, loss_agg_mode="token-mean", loss_scale_factor=None, clip=None, **policy_loss
):
    """verl's configuration of an actor, made as its workers make it."""
    config = {
        "_target_": "verl.workers.config.FSDPActorConfig",
        "strategy": "fsdp",
        "rollout_n": 4,
        "ppo_micro_batch_size_per_gpu": 2,
        "loss_agg_mode": loss_agg_mode,
        "loss_scale_factor": loss_scale_factor,
        "policy_loss": {"_target_": target, "loss_mode": loss_mode, **policy_loss},
        **(clip or {}),
    }
    return omega_conf_to_dataclass(OmegaConf.create(config))


def verls_own(loss_mode="vanilla", **options):
    return actor(loss_mode, target="verl.workers.config.PolicyLossConfig", **options)


def jagged(rows: list) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


class Batch:
    """A mini-batch as verl's engines get it. `theta` are the log-probs of all positions, (B, prompt + longest response)."""

    def __init__(self, seed=0, weights=False, rollout=True, per_sequence=False, spread=0.6):
        n, width = len(LENGTHS), max(LENGTHS)
        old = -normal(n, width, seed=seed, dtype=torch.float32).abs() - 0.05
        response = old + spread * normal(n, width, seed=seed + 1, dtype=torch.float32)
        self.theta = torch.cat([normal(n, PROMPT, seed=9, dtype=torch.float32), response], 1).requires_grad_()
        self.advantages = normal(n, 1 if per_sequence else width, seed=seed + 2, dtype=torch.float32).expand(n, width)
        mask = integers(4, n, width, seed=seed + 3) > 0
        mask[:, 0] = True
        mask[1] = False  # a sequence that counts nowhere
        fields = {"old_log_probs": old, "advantages": self.advantages.contiguous(), "response_mask": mask}
        if rollout:
            fields["rollout_log_probs"] = old + 0.2 * normal(n, width, seed=seed + 4, dtype=torch.float32)
        if weights:
            fields["rollout_is_weights"] = normal(n, width, seed=seed + 5, dtype=torch.float32).abs()
        beyond = torch.arange(width) >= torch.tensor(LENGTHS)[:, None]
        self.fields = {k: t.masked_fill(beyond, 0) for k, t in fields.items()}  # as verl pads them
        tensors = {k: jagged([t[:m] for t, m in zip(v, LENGTHS, strict=True)]) for k, v in fields.items()}
        tensors["responses"] = jagged([torch.zeros(m, dtype=torch.long) for m in LENGTHS])
        tensors["prompts"] = jagged([torch.zeros(PROMPT, dtype=torch.long)] * n)
        tensors["row"] = torch.arange(n)
        self.data = TensorDict(tensors, batch_size=[n])

    def log_probs(self, data) -> torch.Tensor:
        """Of the rows of a micro-batch. Position i holds the log-prob of token i + 1."""
        rows = [self.theta[i, 1 : PROMPT + LENGTHS[i]] for i in data["row"].tolist()]
        return jagged([torch.cat([row, row.new_zeros(1)]) for row in rows])

    def response(self) -> torch.Tensor:
        return self.theta.detach()[:, PROMPT:]

    def ppo_loss(self, config, **info):
        """verl's loss and what it does to theta."""
        self.theta.grad = None
        data = self.data.clone()
        tu.assign_non_tensor(data, **(LOCAL | info))
        loss, metrics = ppo_loss(config, {"log_probs": self.log_probs(data)}, data)
        loss.backward()
        return loss.detach(), self.theta.grad, {k: v.aggregate() for k, v in metrics.items() if isinstance(v, Metric)}


class Engine(engine_base.BaseEngine):
    """What verl's engines do with a mini-batch, without a model."""

    def __init__(self, batch: Batch, micro_batches: int, **info):
        self.batch, self.micro_batches, self.info, self.passes = batch, micro_batches, info, []

    def optimizer_zero_grad(self):
        self.batch.theta.grad = None

    def optimizer_step(self):
        return 0.0

    def is_mp_src_rank_with_outputs(self):
        return False

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        self.passes.append(forward_only)
        outputs = []
        tu.assign_non_tensor(data, **(LOCAL | self.info))
        for part in tu.chunk_tensordict(data, self.micro_batches):
            loss, metrics = loss_function(
                model_output={"log_probs": self.batch.log_probs(part)}, data=part, dp_group=None
            )
            if not forward_only:
                loss.backward()
            outputs.append((loss.detach(), metrics))
        return outputs

    def step(self, config):
        outputs = self.train_batch(self.batch.data.clone(), functools.partial(ppo_loss, config=config))
        logged = {k: [m[k].aggregate() for _, m in outputs] for k in outputs[0][1]}
        return sum(loss for loss, _ in outputs), self.batch.theta.grad, logged


@pytest.mark.parametrize("weights", [False, True], ids=["", "rollout_is_weights"])
@pytest.mark.parametrize("info", [LOCAL, GLOBAL], ids=["local", "global"])
@pytest.mark.parametrize("mode", MODES)
def test_with_bounds_that_stay_bapo_is_vanilla(mode, info, weights):
    batch = Batch(weights=weights)
    options = {"loss_agg_mode": mode, "loss_scale_factor": 11 if info is GLOBAL else None}
    options["clip"] = {"clip_ratio_c": 1.5}
    want = batch.ppo_loss(verls_own(**options), **info)
    assert want[2]["actor/pg_clipfrac_lower"] > 0  # the dual clip takes part
    for name, kwargs in (("bapo", FIXED), ("ppo", {}), ("bk-grpo", {})):
        got = batch.ppo_loss(actor(name, loss_kwargs=kwargs, **options), **info)
        close(got[0], want[0], rtol=1e-6)
        close(got[1], want[1], rtol=1e-6, atol=1e-7)
        for key, value in want[2].items():
            assert got[2][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize("info", [LOCAL, GLOBAL], ids=["local", "global"])
@pytest.mark.parametrize("mode", MODES)
def test_aggregation_is_verls_to_the_bit(mode, info, monkeypatch):
    """The sum is verl's own, of the values that `policy_loss` reports for each token."""
    batch = Batch()
    config = actor("bpo", loss_agg_mode=mode, old_is_rollout=True)
    loss, *_ = batch.ppo_loss(config, **info)
    fields = batch.fields
    tokens = bk.policy_loss(
        batch.response(),
        batch.advantages,
        loss=bk.BPO(),
        mask=fields["response_mask"],
        old_logprobs=fields["old_log_probs"],
        return_tokens=True,
    ).tokens
    assert torch.equal(loss, core_algos.agg_loss(tokens.loss, fields["response_mask"], mode, **info))


SAME = {
    # ours: (verl's, settings of verl's actor, fields of its policy_loss, aggregation)
    "bk-gspo": ("gspo", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.06}, {}, "seq-mean-token-mean"),
    "bk-sapo": ("sapo", {"tau_pos": 1.5, "tau_neg": 2.0}, {}, "seq-mean-token-mean"),
    "bk-cispo": ("cispo", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}, {}, "token-mean"),
    "bk-dro": ("dro", {}, {"dro_beta": 0.3}, "token-mean"),
    "bk-dppo-tv": ("dppo_tv", {"clip_ratio_low": 0.1, "clip_ratio_c": 1.1}, {"old_is_rollout": True}, "token-mean"),
    "bk-dppo-kl": ("dppo_kl", {"clip_ratio_low": 0.05, "clip_ratio_c": 1.1}, {"old_is_rollout": True}, "token-mean"),
    "bk-kl-cov": ("kl_cov", {}, {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}, "token-mean"),
    "bk-clip-cov": ("clip_cov", {}, {"clip_cov_ratio": 0.2, "clip_cov_lb": 90.0, "clip_cov_ub": 99.0}, "token-mean"),
    "gmpo": ("geo_mean", {"clip_ratio_low": 0.3, "clip_ratio_high": 0.4}, {}, "seq-mean-token-mean"),
    "reinforce": ("gpg", {}, {}, "token-sum"),
}


@pytest.mark.parametrize("ours", SAME)
def test_same_as_verls_own(ours):
    theirs, clip, fields, mode = SAME[ours]
    batch = Batch(per_sequence=theirs == "geo_mean", weights=theirs != "geo_mean")
    if theirs == "geo_mean":  # it counts sequences without an active token, too
        batch.data["response_mask"].values()[:] = True
    known = {k: v for k, v in fields.items() if k != "old_is_rollout"}
    want = batch.ppo_loss(verls_own(theirs, clip=clip, loss_agg_mode=mode, **known))
    got = batch.ppo_loss(actor(ours, clip=clip, loss_agg_mode=mode, **fields))
    close(got[0], want[0], rtol=1e-5, atol=1e-6)
    close(got[1], want[1], rtol=1e-5, atol=1e-6)
    assert want[1].abs().max() > 0
    if "actor/ppo_kl" in want[2] and theirs != "kl_cov":  # whose is of absolute values
        assert got[2]["actor/ppo_kl"] == pytest.approx(want[2]["actor/ppo_kl"], abs=1e-5)


def test_every_loss_is_registered():
    taken = {"clip-cov", "kl-cov", "dppo-tv", "dppo-kl", "gspo", "sapo", "cispo", "dro"}
    for name in bk.losses.available():
        assert integration.registered("bk-" + name) == name
        assert integration.registered(name) == (None if name in taken else name)
    batch = Batch()
    for mode in integration.register():
        if integration.registered(mode) == "score-centering":
            continue
        loss, gradient, metrics = batch.ppo_loss(actor(mode, old_is_rollout=True))
        assert loss.isfinite() and gradient.isfinite().all() and gradient.abs().max() > 0, mode
        assert {"actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "actor/pg_loss"} <= set(metrics)
    with pytest.raises(ValueError, match="rollout_topk_ids"):
        batch.ppo_loss(verls_own("score-centering"))
    with pytest.raises(Exception, match="rollout_topk_ids"):
        actor("score-centering")


def test_a_name_that_another_plugin_has_taken_is_left_to_it():
    other = core_algos.POLICY_LOSS_REGISTRY["vanilla"]
    core_algos.POLICY_LOSS_REGISTRY["bapo"] = other
    integration.register()
    assert core_algos.POLICY_LOSS_REGISTRY["bapo"] is other
    assert integration.registered("bk-bapo") == "bapo"


def test_a_loss_of_your_own(monkeypatch):
    monkeypatch.setattr("bapo_kernels.losses._LOSSES", dict(bk.losses._LOSSES))
    bk.losses.register("scaled", lambda x, scale: -scale * x.advantages * x.ratio, scale=1.0)
    assert "scaled" in integration.register()
    batch = Batch()
    once, *_ = batch.ppo_loss(actor("scaled"))
    twice, *_ = batch.ppo_loss(actor("scaled", loss_kwargs={"scale": 2.0}))
    close(twice, 2 * once)


def test_parameters():
    clip = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 5.0}
    loss = integration.loss_of
    assert loss("dapo", actor("dapo", clip=clip)) == bk.DAPO(clip_low=0.1, clip_high=0.3, dual_clip=5.0)
    without = actor("dapo", clip=clip, loss_kwargs={"dual_clip": None, "clip_high": 0.28})
    assert loss("dapo", without) == bk.DAPO(clip_low=0.1, clip_high=0.28)
    assert loss("luspo", actor("luspo", clip=clip)) == bk.LUSPO(clip_low=0.1, clip_high=0.3)
    assert loss("bpo", actor("bpo", clip={"clip_ratio": 0.4, "clip_ratio_low": None})).clip_low == 0.4
    assert loss("bapo", actor("bapo")) == bk.BAPO(dual_clip=3.0)
    assert loss("bapo", actor("bapo", loss_kwargs={"c_low": [0.7, 0.9]})) == bk.BAPO(c_low=(0.7, 0.9), dual_clip=3.0)
    assert loss("dro", actor("bk-dro")) == bk.DRO()
    recipe = loss("bapo", actor("bk-bapo", clip=clip, adv_ratio_target=0.5, loss_kwargs={"order": "high-first"}))
    authors = bk.BAPO.authors_recipe(0.5, clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=5.0)
    assert recipe == bk.BAPO(**{**vars(authors), "order": "high-first"})
    assert loss("ppo", verls_own("ppo", clip=clip)) == bk.PPO(clip_low=0.1, clip_high=0.3, dual_clip=5.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss_mode": "vanilla", "loss_kwargs": {"target": 1.0}},
            "loss_kwargs is only read by a loss of bapo_kernels",
        ),
        ({"loss_mode": "gspo", "old_is_rollout": True}, "bk-<name>"),
        ({"loss_mode": "ppo", "bapo_batch": "mini-batch"}, "bapo_batch is only read by BAPO"),
        ({"loss_mode": "ppo", "adv_ratio_target": 1.0}, "adv_ratio_target is only read by BAPO"),
        ({"loss_mode": "bapo", "bapo_batch": "global"}, "micro-batch, mini-batch"),
        ({"loss_mode": "bapo", "loss_kwargs": {"targets": 1.0}}, "targets"),
        ({"loss_mode": "bapo", "loss_kwargs": {"target": -1.0}}, "target"),
    ],
)
def test_parameters_that_nobody_would_read(options, message):
    with pytest.raises(Exception, match=message):  # hydra wraps what the configuration raises
        actor(**options)


def test_what_verl_does_not_hand_over_is_asked_for():
    batch = Batch(rollout=False)
    for name in ("bapo", "bpo", "topr", "bk-dppo-tv", "bk-dppo-kl"):
        for config in (actor(name), verls_own(name)):
            with pytest.raises(ValueError, match="calculate_log_probs=True"):
                batch.ppo_loss(config)
        with pytest.raises(ValueError, match="needs rollout_log_probs"):
            Engine(batch, 2).step(actor(name))
    with pytest.raises(ValueError, match="weighting=none"):
        batch.ppo_loss(actor("bapo"))
    with pytest.raises(ValueError, match="outside of"):
        batch.ppo_loss(actor("bapo", loss_kwargs={"weighting": "none"}, bapo_batch="mini-batch"))
    with pytest.raises(ValueError, match="ActorConfig"):
        core_algos.get_policy_loss_fn("ppo")(None, None, None, None)


def expected(batch, rule, **options):
    return bk.bapo_bounds(
        batch.response(),
        batch.advantages,
        loss=rule,
        mask=batch.fields["response_mask"],
        old_logprobs=batch.fields["old_log_probs"],
        **options,
    )


@pytest.mark.parametrize("name", ["bpo", "topr", "bk-dppo-kl"])
def test_engines_hand_over_the_samplers_logprobs(name):
    batch = Batch()
    loss, gradient, _ = Engine(batch, 3, **GLOBAL).step(actor(name))
    leaf = batch.response().requires_grad_()
    fields = batch.fields
    want = bk.policy_loss(
        leaf,
        batch.advantages,
        loss=integration.loss_of(name.removeprefix("bk-"), actor(name)),
        mask=fields["response_mask"],
        old_logprobs=fields["old_log_probs"],
        rollout_logprobs=fields["rollout_log_probs"],
        aggregation="token-mean",
        normalizer=GLOBAL["batch_num_tokens"] / GLOBAL["dp_size"],
    ).loss
    want.backward()
    close(loss, want.detach(), rtol=1e-5)
    close(gradient[:, PROMPT:], leaf.grad, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_bounds_of_the_mini_batch(seed):
    """However it is cut, and in the log; the gradient is that of the batch in one piece."""
    batch = Batch(seed=10 * seed, spread=0.8)
    config = actor("bapo", bapo_batch="mini-batch", loss_kwargs={"target": 0.5})
    rule = integration.loss_of("bapo", config)
    bounds = expected(batch, rule, rollout_logprobs=batch.fields["rollout_log_probs"])
    results = []
    for micro_batches in (1, 2, 3, 6):
        engine = Engine(batch, micro_batches, **GLOBAL)
        loss, gradient, logged = engine.step(config)
        assert engine.passes == [True, False]
        for key in ("c_low", "c_high"):
            shown = logged[f"actor/bapo_clip_{key[2:]}"]
            assert shown == [pytest.approx(getattr(bounds, key).item())] * micro_batches
        assert logged["actor/bapo_contribution"][0] == pytest.approx(bounds.contribution.item())
        assert logged["actor/bapo_pos_neg_ratio"][0] == pytest.approx((bounds.positive / bounds.negative).item())
        results.append((loss, gradient))
    fixed = {key: [getattr(bounds, key).item()] * 2 for key in ("c_low", "c_high")}
    want, want_gradient, _ = Engine(batch, 1, **GLOBAL).step(actor("bapo", loss_kwargs=fixed))
    for loss, gradient in results:
        close(loss, want, rtol=1e-5)
        close(gradient, want_gradient, rtol=1e-5, atol=1e-7)


def test_bounds_of_the_micro_batch():
    """Without the pass before: each micro-batch has its own, as in the authors' recipe."""
    batch = Batch(seed=10, spread=0.8)
    config = actor("bapo", loss_kwargs={"target": 0.5})
    engine = Engine(batch, 3, **GLOBAL)
    *_, logged = engine.step(config)
    assert engine.passes == [False]
    assert len(set(logged["actor/bapo_clip_high"])) > 1
    engine.step(actor("bapo", bapo_batch="mini-batch", loss_kwargs=FIXED))  # nothing to find
    assert engine.passes == [False, False]
    # With another configuration nothing is asked of the engine, nor of the batch.
    engine.step(verls_own("ppo"))
    assert engine.passes == [False, False, False]


def test_the_group_of_the_ranks_is_handed_over(monkeypatch):
    seen = []
    monkeypatch.setattr(
        integration, "policy_loss", lambda *a, dp_group, **k: seen.append(dp_group) or bk.policy_loss(*a, **k)
    )
    monkeypatch.setattr(
        batches, "bapo_bounds", lambda *a, dp_group, **k: seen.append(dp_group) or bk.bapo_bounds(*a, **k)
    )
    batch, group = Batch(), object()
    loss_function = integration._handing_over(functools.partial(ppo_loss, config=actor("bapo")))
    data = batch.data.clone()
    tu.assign_non_tensor(data, **LOCAL)
    loss_function(model_output={"log_probs": batch.log_probs(data)}, data=data, dp_group=group)
    record = integration.Record()
    recording = integration._handing_over(functools.partial(ppo_loss, config=actor("bapo")), record=record)
    recording(model_output={"log_probs": batch.log_probs(data)}, data=data, dp_group=group)
    assert integration._bounds(record, bk.BAPO()).c_low >= 0.6
    assert seen == [group, group]
    assert integration._bounds(integration.Record(), bk.BAPO()) is None  # a rank without the head
    # Distillation from top-k logits calls the same function in another way.
    other = integration._handing_over(lambda student_logits, data: student_logits)
    assert other(student_logits=3, data=data) == 3


def test_authors_recipe_in_verl():
    """The search of their code, written down plainly; bounds and loss as that code logs and computes them."""
    moved = set()
    for seed, factor in ((s, f) for s in range(3) for f in (0.9, 1.001, 1.05, 2.0)):
        batch = Batch(seed=10 * seed, spread=0.8)
        ratio = (batch.response() - batch.fields["old_log_probs"]).double().exp()
        advantages, mask = batch.advantages.double(), batch.fields["response_mask"]

        def contributions(low, high, ratio=ratio, advantages=advantages, mask=mask):
            effective = torch.where(advantages >= 0, ratio.clamp(max=high), ratio.clamp(min=low)) * advantages
            positive, negative = (effective[mask & (s * effective > 0)].sum().abs() for s in (1, -1))
            return (positive / (negative + 1e-8)).item()

        low, high = 0.6, 1.2
        target = contributions(low, high) * factor
        while contributions(low, high) < target and low < 0.8:
            low = min(low + 0.05, 0.8)
        while contributions(low, high) < target and high < 2.0:
            high = min(high + 0.1, 2.0)
        moved.add((round(low, 3), round(high, 3)))
        config = actor("bapo", adv_ratio_target=target, ratio_upper_step=0.1, **AUTHORS)
        loss, gradient, metrics = batch.ppo_loss(config)
        assert metrics["actor/bapo_clip_low"] == pytest.approx(low)
        assert metrics["actor/bapo_clip_high"] == pytest.approx(high)
        assert metrics["actor/bapo_pos_neg_ratio"] == pytest.approx(contributions(low, high), rel=1e-5)
        vanilla = batch.ppo_loss(verls_own(clip={"clip_ratio_low": 1 - low, "clip_ratio_high": high - 1}))
        close(loss, vanilla[0], rtol=1e-5, atol=1e-6)
        close(gradient, vanilla[1], rtol=1e-5, atol=1e-6)
    assert len(moved) >= 4, moved


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_masked_tokens_are_absent_and_the_host_waits_for_nothing(mode, monkeypatch):
    from test_sync import Watch

    from bapo_kernels import checks, layout

    for module in (checks, layout):
        monkeypatch.setattr(module, "values_are_checked", lambda device: False)
    batch = Batch(weights=True)
    fields, config = batch.fields, actor("bapo", old_is_rollout=True)
    config.global_batch_info.update(GLOBAL)
    leaves = []
    for garbage in (0.0, float("nan")):
        junk = torch.where(fields["response_mask"], 0.0, garbage)
        leaf = (batch.response() + junk).requires_grad_()
        with Watch() as watch:
            loss, metrics = core_algos.get_policy_loss_fn("bapo")(
                old_log_prob=fields["old_log_probs"] + junk,
                log_prob=leaf,
                advantages=fields["advantages"] + junk,
                response_mask=fields["response_mask"],
                loss_agg_mode=mode,
                config=config,
            )
        assert not watch.seen
        assert all(isinstance(m, torch.Tensor) and m.dim() == 0 and not m.requires_grad for m in metrics.values())
        loss.backward()
        leaves.append((loss.detach(), leaf.grad))
    for clean, dirty in zip(*leaves, strict=True):
        assert torch.equal(clean, dirty)


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def fsdp_engine(model, group, monkeypatch):
    """verl's FSDP engine as it goes through a mini-batch, around a model that is on the CPU and not sharded."""
    from verl.workers.engine.fsdp import transformer_impl

    monkeypatch.setattr(transformer_impl, "get_device_id", lambda: "cpu")
    monkeypatch.setattr(transformer_impl, "get_device_name", lambda: "cpu")

    class OnCPU(transformer_impl.FSDPEngineWithLMHead):
        engine_config = SimpleNamespace(
            use_no_sync_for_gradient_accumulation=False,
            entropy_checkpointing=False,
            entropy_from_logits_with_chunking=False,
        )
        ulysses_sequence_parallel_size, use_ulysses_sp, pad_to_length = 1, False, False
        _autocast_dtype = torch.float32

        def __init__(self):
            self.module = model

        def optimizer_zero_grad(self):
            model.zero_grad()

        def optimizer_step(self):
            return 0.0

        def is_mp_src_rank_with_outputs(self):
            return True

        def get_data_parallel_group(self):
            return group

        def get_data_parallel_size(self):
            return 1

    return OnCPU()


def test_verls_fsdp_engine(one_rank, monkeypatch):
    """One optimizer step of a model: the same bounds and gradients however the mini-batch is cut, on verl's head and on ours."""
    from verl.models.transformers.monkey_patch import patch_forward_with_backends

    batch, model = Batch(spread=0.8), tiny_model()
    engine = fsdp_engine(model, one_rank, monkeypatch)
    patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="torch")
    sequences = [integers(40, PROMPT + m, seed=m) for m in LENGTHS]
    data = batch.data.clone()
    data["input_ids"] = jagged(sequences)
    data["position_ids"] = jagged([torch.arange(len(s)) for s in sequences])
    data["prompts"] = jagged([s[:PROMPT] for s in sequences])
    data["responses"] = jagged([s[PROMPT:] for s in sequences])
    data["loss_mask"] = torch.zeros(len(LENGTHS), max(LENGTHS)).masked_fill(batch.fields["response_mask"], 1.0)
    tu.assign_non_tensor(data, use_remove_padding=False, use_fused_kernels=True, use_dynamic_bsz=False)
    tu.assign_non_tensor(data, temperature=0.9, calculate_entropy=True, global_batch_size=5)
    config = actor("bapo", bapo_batch="mini-batch", loss_kwargs={"target": 0.5})
    results = []
    for micro_batch_size, ours in ((6, False), (2, False), (2, True)):
        integration.use_fused_head(ours)
        part = data.clone()
        tu.assign_non_tensor(part, micro_batch_size_per_gpu=micro_batch_size)
        out = engine.train_batch(part, functools.partial(ppo_loss, config=config))
        gradients = [p.grad.clone() for p in model.parameters()]
        bounds = [out["metrics"][f"actor/bapo_clip_{side}"] for side in ("low", "high")]
        results.append((sum(out["loss"]), [m.aggregate() for m in bounds], gradients))
    (loss, bounds, gradients), *others = results
    assert max(g.abs().max() for g in gradients) > 1e-3
    for other_loss, other_bounds, other_gradients in others:
        assert other_loss == pytest.approx(loss, rel=1e-4)
        assert other_bounds == pytest.approx(bounds)
        for a, b in zip(other_gradients, gradients, strict=True):
            close(a, b, rtol=1e-3, atol=1e-6)


# Versions


def test_hooks_that_are_gone_are_errors(monkeypatch):
    monkeypatch.delattr(engine_base.BaseEngine, "train_batch")
    with pytest.raises(Exception, match=r"verl\.workers\.engine\.base\.BaseEngine\.train_batch.*0\.9\.1"):
        actor("bapo")
    monkeypatch.delattr(core_algos, "POLICY_LOSS_REGISTRY")
    with pytest.raises(RuntimeError, match="POLICY_LOSS_REGISTRY"):
        integration.register()


def test_versions_that_were_not_tested_are_told_once(monkeypatch):
    packages._warned.clear()
    integration.VERL.check_version()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.10.0")
    with pytest.warns(UserWarning, match="0.9.1 to 0.9.1"):
        integration.register()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.use_fused_head()
    packages._warned.clear()


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_verl_is_enough():
    code = """
import verl
from verl.trainer.ppo.core_algos import get_policy_loss_fn
print(get_policy_loss_fn("bapo").bapo_kernels_loss, get_policy_loss_fn("bk-gspo").bapo_kernels_loss)
"""
    assert python(code) == "bapo gspo"


def test_without_verl_it_says_how_to_get_it():
    code = """
import sys
sys.modules["verl"] = None
from bapo_kernels.integrations import verl
for act in (lambda: verl.PolicyLossConfig, verl.register, verl.use_fused_head, verl.hook_in):
    try:
        act()
    except ImportError as error:
        assert "bapo-kernels[verl]" in str(error), error
    else:
        raise AssertionError(act)
print("fine")
"""
    assert python(code) == "fine"
