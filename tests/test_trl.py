"""TRL's trainer with our losses: the real TRL, on tiny random models on a CPU."""

import math
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import bapo_kernels as bk
from bapo_kernels.controller import BapoBounds
from bapo_kernels.integrations import trl as integration

try:
    import trl_trainers as h
    from trl import GRPOTrainer
    from trl.trainer import utils
except ImportError as error:
    pytest.skip(f"TRL cannot be imported: {error}", allow_module_level=True)

from bapo_kernels.integrations import trl_trainer

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
# Loss, loss_type, fields of the configuration.
BOTH_HAVE = [
    *(pytest.param("grpo", kind, {}, id=f"clip-{kind}") for kind in CLIPPED),
    *(pytest.param("grpo", kind, {"importance_sampling_level": "sequence"}, id=f"sequence-{kind}") for kind in ("grpo", "dapo", "luspo")),
    pytest.param("dapo", "dapo", {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.5}, id="bounds-and-delta"),
    pytest.param("cispo", "cispo", {"epsilon_high": 1.2}, id="cispo"),
    pytest.param("sapo", "sapo", {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0}, id="sapo"),
    pytest.param("vespo", "vespo", {"vespo_k_pos": 1.5, "vespo_lambda_neg": 1.0}, id="vespo"),
]  # fmt: skip
# What a batch has, fields of the configuration, whether vLLM's correction is on.
BATCHES = [
    pytest.param({"old": False, "tool": False}, {}, False, id="on-policy"),
    pytest.param({"ref": True}, {"beta": 0.3}, False, id="old-tools-ref"),
    pytest.param({"sampling": True, "ratio": "sequence"}, {}, True, id="vllm-sequence"),
    pytest.param({}, {"entropy_coef": 0.1}, False, id="entropy-bonus"),
    pytest.param({"sampling": True}, {"off_policy_mask_threshold": 0.05}, False, id="off-policy-mask"),
]
# In the form that gives each token its sequence's ratio, weights within a sequence stay with their tokens.
TOKEN_BATCHES = [
    pytest.param({"sampling": True, "ratio": "token"}, {}, True, id="vllm-token"),
    pytest.param(
        {"ref": True}, {"top_entropy_quantile": 0.5, "entropy_coef": 0.1, "beta": 0.1}, False, id="top-entropy"
    ),
]


@pytest.fixture(autouse=True)
def no_strangers(recwarn):
    """Warnings of TRL's own are not ours to fail on; those of this package are."""
    yield
    assert not [str(w.message) for w in recwarn if "bapo_kernels" in str(w.message)]


def of_vllm(trained, corrected):
    """As if vLLM had sampled: only this makes TRL look at the ratio in the batch."""
    trained.use_vllm = corrected
    return trained


def assert_equal_to_theirs(trained, batch, *, metrics=True):
    before = {name: len(values) for name, values in trained._metrics["train"].items()}
    loss, gradients = h.theirs(trained, batch)
    mine, my_gradients = h.ours(trained, batch)
    assert loss.abs() > 1e-4 and all(g.isfinite().all() for g in gradients.values())
    torch.testing.assert_close(mine, loss, rtol=1e-5, atol=1e-5)
    assert my_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            my_gradients[name], gradient, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )
    if metrics:
        mode = "train" if trained.model.training else "eval"
        logged = {name: values[before.get(name, 0) :] for name, values in trained._metrics[mode].items()}
        for name in set(logged) - {n for n in logged if n.startswith(("policy", "bapo"))} - {"vespo/phi_seq_mean"}:
            values = logged[name]
            if len(values) == 2:  # both have it
                assert values[0] == pytest.approx(values[1], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(("policy_loss", "loss_type", "fields"), BOTH_HAVE)
@pytest.mark.parametrize(("has", "more", "vllm"), [*BATCHES, *TOKEN_BATCHES])
def test_loss_and_gradients_are_those_of_trl(tmp_path, policy_loss, loss_type, fields, has, more, vllm):
    sequence = "importance_sampling_level" in fields
    if sequence and (has.get("ratio") == "token" or "top_entropy_quantile" in more):
        pytest.skip("the token form gives a token's weight to the token, TRL spreads it over the sequence")
    if policy_loss == "vespo" and has.get("ratio") == "sequence":
        pytest.skip("TRL refuses it")
    config = {"loss_type": loss_type, "gradient_accumulation_steps": 3, "steps_per_generation": 2, **fields, **more}
    beta = config.pop("beta", 0.0)  # with it TRL would load a reference model, and the batch has its log-probs
    trained = of_vllm(h.trainer(tmp_path, policy_loss=policy_loss, config=config), vllm)
    assert trained.fused
    trained.beta, trained.current_gradient_accumulation_steps = beta, 3
    batch = h.on_policy(trained, h.inputs(**has))
    # TRL counts a sequence once whatever its length where the ratio is the sequence's; here a token is a token.
    assert_equal_to_theirs(trained, batch, metrics=not sequence)


@pytest.mark.parametrize("loss_type", [*CLIPPED, "cispo", "sapo", "vespo"])
def test_evaluation_is_that_of_trl(tmp_path, loss_type):
    config = {"loss_type": loss_type, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    loss = loss_type if loss_type in ("cispo", "sapo", "vespo") else "grpo"
    config |= {"epsilon_high": 1.2} if loss == "cispo" else {}
    trained = h.trainer(tmp_path, policy_loss=loss, config=config)
    trained.model.eval()
    batch = h.on_policy(trained, h.inputs())
    assert_equal_to_theirs(trained, batch)


# --- The head


def test_fused_and_wrapped_heads_agree(tmp_path):
    for loss in (
        "bapo",
        "bpo",
        "reinforce",
        "topr",
        "gmpo",
        bk.KLCov(fraction=0.3),
        bk.BAPO(dual_clip=2.0, target=0.7),
    ):
        batch, results = h.inputs(sampling=True), []
        for head in ("fused", "wrapped"):
            trained = h.trainer(tmp_path, policy_loss=loss, head=head, correction=bk.TruncatedIS(1.5))
            trained.current_gradient_accumulation_steps = 1
            assert trained.fused == (head == "fused")
            results.append(
                (
                    *h.ours(trained, h.on_policy(trained, batch)),
                    {k: v[0] for k, v in trained._metrics["train"].items() if v},
                )
            )
        (loss_a, gradients_a, metrics_a), (loss_b, gradients_b, metrics_b) = results
        torch.testing.assert_close(loss_a, loss_b, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradients_a, gradients_b, rtol=1e-5, atol=1e-5)
        assert metrics_a == pytest.approx(metrics_b, rel=1e-4, abs=1e-6)


MODELS = {
    "softcap": ("Gemma2", {"final_logit_softcapping": 2.0}),
    "scale-and-tied": ("Cohere", {"logit_scale": 0.3}),
    "divided-and-bias": ("Granite", {"logits_scaling": 3.0, "bias": True}),
}


@pytest.mark.parametrize("name", MODELS)
def test_heads_of_other_models_are_those_of_trl(tmp_path, name):
    trained = h.trainer(tmp_path, policy_loss="grpo", on=other_model(*MODELS[name]), config={"temperature": 0.7})
    trained.current_gradient_accumulation_steps = 1
    assert trained.fused, trained.head_reason
    assert_equal_to_theirs(trained, h.on_policy(trained, h.inputs()))


def other_model(family, fields):
    import transformers

    torch.manual_seed(0)
    bias = fields.pop("bias", False) if (fields := dict(fields)) else False
    config = getattr(transformers, f"{family}Config")(
        vocab_size=h.VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=64, pad_token_id=h.PAD, eos_token_id=h.EOS, bos_token_id=2, initializer_range=0.3, **fields,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    if bias:
        model.lm_head.bias = torch.nn.Parameter(torch.randn(h.VOCAB))
    return model


def test_head_in_fp32_under_bf16_weights(tmp_path):
    config = {"cast_lm_head_to_fp32": True}
    trained = h.trainer(
        tmp_path, policy_loss="grpo", on=h.model(tie_word_embeddings=True).to(torch.bfloat16), config=config
    )
    trained.current_gradient_accumulation_steps = 1
    assert trained.fused, trained.head_reason
    batch = h.on_policy(trained, h.inputs())
    (loss, gradients), (mine, my_gradients) = h.theirs(trained, batch), h.ours(trained, batch)
    torch.testing.assert_close(mine, loss, rtol=1e-5, atol=1e-5)
    name = "model.embed_tokens.weight"  # fp32, as it is the head
    torch.testing.assert_close(my_gradients[name], gradients[name], rtol=2e-2, atol=1e-3)


def test_a_head_that_cannot_be_read_is_left_to_the_model(tmp_path, caplog):
    odd = h.model()
    odd.config.final_logit_softcapping = 2.0  # which its forward knows nothing of
    trained = h.trainer(tmp_path, on=odd)
    assert not trained.fused and "not its head's product" in trained.head_reason
    assert "Qwen3ForCausalLM" in caplog.text
    with pytest.raises(ValueError, match=r"head='fused' cannot serve Qwen3ForCausalLM: .*product"):
        h.trainer(tmp_path, on=odd, head="fused")
    with pytest.raises(ValueError, match=r"score-centering.*only the fused head"):
        h.trainer(tmp_path, on=odd, policy_loss="score-centering")


def test_forwards_that_have_to_run_are_wrapped(tmp_path, monkeypatch):
    for attribute, name in (("is_fsdp_enabled", "FSDP"), ("is_deepspeed_enabled", "DeepSpeed")):
        trained = h.trainer(tmp_path)
        setattr(trained, attribute, True)
        assert name in trained._why_wrapped()
    assert "torch_compile" in h.trainer(tmp_path, config={"torch_compile": True}).head_reason


needs_fused_head = pytest.mark.skipif(
    not hasattr(utils, "add_fused_lm_head"), reason="before 1.15, TRL has no head on the model's forward"
)


@pytest.fixture
def calls(monkeypatch):
    """Counts what goes through our kernels in TRL's head."""
    found = []

    def counted(*args, **kwargs):
        found.append(kwargs)
        return bk.linear_logprobs(*args, **kwargs)

    monkeypatch.setattr(integration, "linear_logprobs", counted)
    return found


@needs_fused_head
def test_trl_with_our_head(tmp_path, calls):
    kernel = utils._ChunkedLogProbFunction
    trained = h.trainer(tmp_path, cls=GRPOTrainer, config={"entropy_coef": 0.1, "temperature": 0.7})
    trained.current_gradient_accumulation_steps = 1
    batch = h.on_policy(trained, h.inputs())
    loss, gradients = h.theirs(trained, batch)
    with integration.use_fused_head(trained):
        assert not calls
        with_ours, with_our_gradients = h.theirs(trained, batch)
        assert len(calls) == 1 and utils._ChunkedLogProbFunction is kernel  # for this model only
        trained.train()  # and generation sees a forward with its own signature
    torch.testing.assert_close(with_ours, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(with_our_gradients, gradients, rtol=1e-5, atol=1e-5)
    before = len(calls)
    h.theirs(trained, batch)
    assert len(calls) == before
    undo = integration.use_fused_head(trained.model).undo
    h.theirs(trained, batch)
    undo()
    h.theirs(trained, batch)
    assert len(calls) == before + 1


@needs_fused_head
@pytest.mark.parametrize("config", [{"bf16": True}, {}], ids=["autocast", "bf16 weights"])
def test_an_unmoved_policy_in_16_bits_has_a_ratio_of_1(tmp_path, config):
    """TRL scores the old log-probs, with logits rounded to bf16 if its own head does it."""
    model = h.model() if config else h.model().to(torch.bfloat16)
    config = {"num_iterations": 2, "max_steps": 1, "importance_sampling_level": "sequence", **config}
    trained = h.trainer(tmp_path, on=model, config={"loss_type": "grpo", **config}, policy_loss="gspo")
    assert trained.fused
    trained.train()
    (log,) = (entry for entry in trained.state.log_history if "policy/ratio_max" in entry)
    assert log["policy/ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert log["clip_ratio/region_mean"] == 0.0


@needs_fused_head
def test_what_our_head_does_not_give_comes_from_trl(calls):
    ours = integration._Kernel(utils._ChunkedLogProbFunction)
    hidden, weight, targets = torch.randn(5, 8), torch.randn(11, 8), torch.arange(5)
    for outputs in (("log_probs", "entropy", "is_top1", "mean_logits"), ("log_probs", "entropy"), ("log_probs",)):
        got = ours.apply(hidden, weight, None, targets, 0.7, 32, 3.0, 0.5, outputs)
        want = utils._ChunkedLogProbFunction.apply(hidden, weight, None, targets, 0.7, 32, 3.0, 0.5, outputs)
        torch.testing.assert_close(got, want)
    assert len(calls) == 2


@needs_fused_head
def test_our_head_needs_trls():
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no fused head"):
        integration.use_fused_head(h.model())


# --- Training


def logged(trained, name):
    return [entry[name] for entry in trained.state.log_history if name in entry]


def test_bapo_trains_and_logs_its_bounds(tmp_path):
    config = {
        "num_iterations": 2,
        "max_steps": 4,
        "beta": 0.1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "per_device_eval_batch_size": 4,
    }
    h.model().save_pretrained(tmp_path / "model")
    policy = h.Qwen3ForCausalLM.from_pretrained(
        tmp_path / "model"
    )  # a reference model is loaded from where the policy was
    before = policy.lm_head.weight.detach().clone()
    trained = h.trainer(tmp_path, integration.BAPOTrainer, on=policy, config=config, eval_dataset=h.prompts())
    trained.train()
    assert (policy.lm_head.weight - before).abs().max() > 1e-3
    for name in ("bapo/c_low", "bapo/c_high", "bapo/contribution", "policy_loss", "kl", "entropy", "clip_ratio/low_mean",
                 "clip_ratio/high_max", "policy/ratio_max"):  # fmt: skip
        values = logged(trained, name)
        assert len(values) == 4 and all(map(math.isfinite, values)), name
        assert len(logged(trained, f"eval_{name}")) == 1, name
    assert all(0.6 <= v <= 0.9 for v in logged(trained, "bapo/c_low"))
    assert max(logged(trained, "bapo/c_high")) > 1.2
    assert max(logged(trained, "policy/ratio_max")) > 1.01


@pytest.mark.parametrize(("bounds", "scored"), [("optimizer-step", 2), ("generation-batch", 4), ("micro-batch", 0)])
def test_bounds_are_those_of_the_batch_that_was_asked_for(tmp_path, bounds, scored):
    class Watched(integration.PolicyLossTrainer):
        found, seen = [], []

        def _bounds_of(self, model, batches):
            ours = super()._bounds_of(model, batches)
            with torch.no_grad():
                logprobs = [
                    self._get_per_token_logps_and_entropies(
                        model, *trl_trainer._prompt_and_completion(b), b["completion_ids"].shape[1]
                    )[0]
                    for b in batches
                ]
            whole = {
                k: torch.cat([b[k] for b in batches]) for k in ("advantages", "completion_mask", "old_per_token_logps")
            }
            want = bk.bapo_bounds(
                torch.cat(logprobs), whole["advantages"], mask=whole["completion_mask"], old_logprobs=whole["old_per_token_logps"],
                loss=self.policy_loss,
            )  # fmt: skip
            torch.testing.assert_close(tuple(ours), tuple(want), rtol=1e-4, atol=1e-4)
            self.found.append((self.state.global_step, len(batches), float(ours.c_high), float(ours.contribution)))
            return ours

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            shown = [self._metrics["train"][f"bapo/{name}"][-1] for name in ("c_high", "contribution")]
            self.seen.append((self.state.global_step, *shown))
            return loss

    Watched.found, Watched.seen = [], []
    config = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4}
    trained = h.trainer(tmp_path, Watched, policy_loss=bk.BAPO(target=0.5), bounds=bounds, config=config)
    trained.train()
    assert len(Watched.seen) == 8
    if not scored:
        assert not Watched.found and len({s[1:] for s in Watched.seen}) > 4
        return
    # Once before each update; all of its micro-batches train with, and log, what was found.
    assert [(step, n) for step, n, *_ in Watched.found] == [(step, scored) for step in range(4)]
    of_step = {step: values for step, _, *values in Watched.found}
    for step, *values in Watched.seen:
        assert values == pytest.approx(of_step[step])


def test_bounds_that_were_found_are_those_of_the_loss(tmp_path, monkeypatch):
    def outcome(policy_loss, bounds="optimizer-step"):
        trained = h.trainer(tmp_path, policy_loss=policy_loss, bounds=bounds)
        trained.current_gradient_accumulation_steps = 1
        batch = h.on_policy(trained, h.inputs())
        trained._buffered_inputs = [batch]
        return h.ours(trained, batch)

    found = BapoBounds(*torch.tensor([0.95, 1.05, 0.5, 1.0, 1.0], dtype=torch.float64))
    monkeypatch.setattr(integration.PolicyLossTrainer, "_bounds_of", lambda *_: found)
    loss, gradients = outcome(bk.BAPO())
    want, want_gradients = outcome(bk.BAPO.fixed(0.95, 1.05))
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(gradients, want_gradients)
    assert abs(loss - outcome(bk.BAPO(), "micro-batch")[0]) > 1e-3  # which finds others


def test_an_unmoved_policy_is_not_scored(tmp_path, monkeypatch):
    monkeypatch.setattr(integration.PolicyLossTrainer, "_bounds_of", lambda *_: pytest.fail("scored"))
    trained = h.trainer(tmp_path, config={"gradient_accumulation_steps": 2, "max_steps": 1})
    trained.train()
    assert logged(trained, "clip_ratio/region_mean") == [0.0]


def test_score_centering_trains_from_recorded_topk(tmp_path):
    seen = []

    class Watched(integration.PolicyLossTrainer):
        def _compute_loss(self, model, inputs):
            seen.append(inputs)
            return super()._compute_loss(model, inputs)

    trained = h.trainer(
        tmp_path,
        Watched,
        policy_loss="score-centering",
        rollout_func=h.rollout,
        config={"num_iterations": 2, "max_steps": 3},
    )
    before = trained.model.lm_head.weight.detach().clone()
    trained.train()
    assert (trained.model.lm_head.weight - before).abs().max() > 1e-3
    for (
        batch
    ) in seen:  # still in the order of the completions: the sampler's own record of a token is among those of its place
        ids, top = batch["completion_ids"], batch["sampling_topk_ids"]
        assert top.shape == (*ids.shape, h.TOPK)
        record = batch["sampling_topk_logps"].masked_fill(top != ids[..., None], -torch.inf).amax(-1)
        held = record.isfinite()
        assert held.any()
        torch.testing.assert_close(record[held], batch["sampling_per_token_logps"][held], rtol=0, atol=1e-6)


def test_score_centering_is_the_reference(tmp_path):
    trained = h.trainer(tmp_path, policy_loss=bk.ScoreCentering("tis"))
    trained.current_gradient_accumulation_steps = 1
    batch = h.on_policy(trained, h.inputs(sampling=True, topk=True))
    loss, gradients = h.ours(trained, batch)

    def reference(model, b):
        ids, attention = trl_trainer._prompt_and_completion(b)
        hidden = model.model(input_ids=ids, attention_mask=attention).last_hidden_state[:, -h.COMPLETION - 1 : -1]
        return bk.reference.linear_policy_loss(
            hidden, model.lm_head.weight, b["completion_ids"], b["advantages"], loss=bk.ScoreCentering("tis"),
            mask=b["completion_mask"] * b["tool_mask"], old_logprobs=b["old_per_token_logps"],
            rollout_logprobs=b["sampling_per_token_logps"], rollout_topk_ids=b["sampling_topk_ids"],
            rollout_topk_logprobs=b["sampling_topk_logps"], normalizer=37.0 / trained.args.steps_per_generation,
        ).loss  # fmt: skip

    want, want_gradients = h.loss_and_gradients(trained, reference, batch)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients, want_gradients, rtol=1e-4, atol=1e-6)


def test_gaps_in_the_samplers_record_agree_with_the_policy(tmp_path):
    """TRL marks what vLLM could not score by NaN."""
    for old in (True, False):
        trained = h.trainer(tmp_path, policy_loss="bpo")
        trained.current_gradient_accumulation_steps = 1
        batch = h.on_policy(trained, h.inputs(sampling=True, old=old))
        policy = h.on_policy(trained, {**h.inputs(), "old_per_token_logps": torch.zeros(h.BATCH, h.COMPLETION)})
        filler = batch["old_per_token_logps"] if old else policy["old_per_token_logps"]
        gaps = torch.zeros(h.BATCH, h.COMPLETION, dtype=torch.bool)
        gaps[:, 1] = True
        sampling = batch["sampling_per_token_logps"]
        want = h.ours(trained, {**batch, "sampling_per_token_logps": torch.where(gaps, filler, sampling)})
        got = h.ours(trained, {**batch, "sampling_per_token_logps": sampling.masked_fill(gaps, torch.nan)})
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


# --- Bad input


REFUSED = [
    ({"epsilon": 0.3}, {}, "epsilon=0.3 is no parameter of bapo"),
    ({"delta": 2.0}, {"policy_loss": "bpo"}, "delta=2.0 is no parameter"),
    ({"delta": 1.1}, {"policy_loss": "grpo"}, "delta=1.1 must be above"),
    ({"epsilon_high": 0.3}, {"policy_loss": bk.GRPO(clip_high=0.28)}, "do not agree on clip_high=0.3"),
    ({"epsilon": 0.3}, {"policy_loss": bk.GRPO(clip_low=0.3)}, "do not agree on clip_high=0.3"),
    ({"sapo_temperature_pos": 2.0}, {"policy_loss": "grpo"}, "sapo_temperature_pos"),
    ({"loss_type": "sapo"}, {}, "loss_type='sapo' is another loss"),
    ({"loss_type": "mean"}, {}, "loss_type must be one of grpo"),
    ({"importance_sampling_level": "sequence"}, {}, "importance_sampling_level='sequence' cannot"),
    ({"importance_sampling_level": "sequence", "delta": 2.0}, {"policy_loss": "grpo"}, "without delta"),
    ({"use_adaptive_entropy": True}, {}, "use_adaptive_entropy=True"),
    ({}, {"policy_loss": "bappo"}, "loss must be one of"),
    ({}, {"bounds": "batch"}, "bounds must be one of optimizer-step"),
    ({}, {"head": "ours"}, "head must be one of"),
    ({}, {"policy_loss": "ppo", "bounds": "micro-batch"}, "bounds='micro-batch' has no meaning"),
    ({}, {"policy_loss": bk.BAPO.fixed(0.8, 1.2), "bounds": "generation-batch"}, "has no meaning"),
    ({}, {"memory_budget": -1}, "memory_budget"),
    ({}, {"memory_budget": 100, "head": "wrapped"}, "memory_budget=100 has no effect"),
    (
        {"gradient_accumulation_steps": 2, "steps_per_generation": 3},
        {},
        "bounds='optimizer-step' cannot serve gradient_accumulation_steps=2",
    ),
    ({}, {"kl_estimator": "k4"}, "kl_estimator"),
    ({}, {"correction": "tis"}, "correction"),
]


@pytest.mark.parametrize(("config", "options", "message"), REFUSED)
def test_what_cannot_be_honoured_is_refused(tmp_path, config, options, message):
    with pytest.raises(ValueError, match=message):
        h.trainer(tmp_path, config=config, **options)


def test_fields_go_into_losses_that_have_them(tmp_path):
    def made(policy_loss, **config):
        return h.trainer(tmp_path, policy_loss=policy_loss, config=config).policy_loss

    assert made("dapo") == bk.DAPO()
    assert made("grpo", epsilon=0.1) == bk.GRPO(clip_low=0.1, clip_high=0.1)
    assert made("grpo", epsilon=0.1, epsilon_high=0.3, delta=4.0) == bk.GRPO(clip_low=0.1, clip_high=0.3, dual_clip=4.0)
    assert made(bk.GRPO(clip_high=0.3), epsilon_high=0.3) == bk.GRPO(clip_high=0.3)
    assert made("ppo", importance_sampling_level="sequence") == bk.GSPO(clip_low=0.2, clip_high=0.2)
    assert made("cispo", epsilon_high=4.0) == bk.CISPO(ratio_high=4.0)
    assert h.trainer(tmp_path, integration.BPOTrainer).policy_loss == bk.BPO()
    assert h.trainer(tmp_path, integration.BAPOTrainer).policy_loss == bk.BAPO()


def test_one_correction_at_a_time(tmp_path, monkeypatch):
    init = GRPOTrainer.__init__

    def with_vllm(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.use_vllm = True

    monkeypatch.setattr(GRPOTrainer, "__init__", with_vllm)
    with pytest.raises(ValueError, match="vllm_importance_sampling_correction=True correct for the same thing"):
        h.trainer(tmp_path, correction=bk.TruncatedIS())


def test_a_loss_that_would_not_be_used_is_refused(tmp_path, monkeypatch):
    """TRL 1.13 had another loss where Liger's kernels are on."""
    monkeypatch.setattr(GRPOTrainer, "compute_liger_loss", None, raising=False)
    monkeypatch.setattr(
        h.GRPOConfig, "use_liger_kernel", property(lambda self: True, lambda self, value: None), raising=False
    )
    with pytest.raises(ValueError, match="use_liger_kernel=True puts TRL's own loss"):
        h.trainer(tmp_path)


def test_missing_records_are_named(tmp_path):
    trained = h.trainer(tmp_path, policy_loss="score-centering")
    trained.current_gradient_accumulation_steps = 1
    with pytest.raises(ValueError, match="needs sampling_topk_ids and sampling_topk_logps in the batch"):
        trained._compute_loss(trained.model, h.inputs())
    with pytest.raises(ValueError, match=r"sampling_topk_ids must be \(T, K\)"):
        trl_trainer._padded([[1, 2]], torch.zeros(1, 4), -1, "sampling_topk_ids")


def test_another_version_warns_once(tmp_path, monkeypatch):
    import importlib.metadata

    from bapo_kernels.integrations import packages

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.17.2")
    packages._warned.clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        h.trainer(tmp_path)
        h.trainer(tmp_path)
    messages = [str(w.message) for w in found if "bapo_kernels" in str(w.message)]
    assert len(messages) == 1 and "trl 1.17.2" in messages[0] and "1.13 to 1.16" in messages[0]


def test_a_hook_that_is_gone_is_an_error(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(GRPOTrainer, "get_off_policy_mask")
        with pytest.raises(RuntimeError, match=r"GRPOTrainer.get_off_policy_mask.*1.13 to 1.16"):
            h.trainer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(GRPOTrainer, "compute_loss", lambda self, model, inputs, **_: 0)
        with pytest.raises(RuntimeError, match="does not call _compute_loss"):
            h.trainer(tmp_path)
    with monkeypatch.context() as patch:
        patch.delattr(utils, "_ChunkedLogProbFunction")
        with pytest.raises(RuntimeError, match=r"_ChunkedLogProbFunction.*1.15 to 1.16"):
            integration.use_fused_head(h.model())


def test_importable_without_trl():
    code = """
import sys
sys.modules["trl"] = None
from bapo_kernels.integrations import trl
try:
    trl.BAPOTrainer
except ImportError as error:
    assert "bapo-kernels[trl]" in str(error), error
else:
    raise AssertionError
try:
    trl.use_fused_head(None)
except ImportError as error:
    assert "bapo-kernels[trl]" in str(error), error
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- Processes


def test_two_processes_are_one_batch(tmp_path):
    """Plain DDP: gradients as TRL's own through the wrapper, and bounds of all ranks."""
    script = Path(__file__).with_name("trl_ddp.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        str(script),
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
