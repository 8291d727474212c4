"""The patch of transformers models, on tiny random ones: what the patched forward gives is what the model's own logits give."""

import copy
import importlib
import importlib.util
import inspect
import warnings

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MptConfig,
    PhiConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import bapo_kernels as bk  # noqa: E402
from bapo_kernels.integrations import packages  # noqa: E402
from bapo_kernels.integrations import transformers as integration  # noqa: E402
from bapo_kernels.integrations.transformers import patch, unpatch  # noqa: E402

V, B, T = 61, 3, 8
SIZES = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    # Large, so that logits are of size 1 and a wrong scale shows; with the ids within the vocabulary.
    "initializer_range": 0.4,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "qwen3": lambda **o: Qwen3Config(**{**SIZES, "num_key_value_heads": 1, "head_dim": 8, **o}),
    "llama": lambda **o: LlamaConfig(**SIZES, num_key_value_heads=1, **o),
    "gemma2-softcap": lambda **o: Gemma2Config(
        **SIZES, num_key_value_heads=1, head_dim=8, final_logit_softcapping=1.5, **o
    ),
    "cohere-multiplies": lambda **o: CohereConfig(**SIZES, num_key_value_heads=1, logit_scale=0.25, **o),
    "granite-divides": lambda **o: GraniteConfig(**SIZES, num_key_value_heads=1, logits_scaling=4.0, **o),
    "phi-bias": lambda **o: PhiConfig(**SIZES, **o),
    "gpt2-tied": lambda **o: GPT2Config(
        vocab_size=V,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "mpt-ignores-its-scale": lambda **o: MptConfig(
        vocab_size=V, d_model=16, n_layers=2, n_heads=2, max_seq_len=32, **o
    ),
}
PEFT_MISSING = importlib.util.find_spec("peft") is None


def make(name="qwen3", seed=0, **options):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](**options), dtype=torch.float32)
    head = model.get_output_embeddings()
    if head.bias is not None:
        nn.init.normal_(head.bias)
    return model.eval()


def batch():
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, V, (B, T), generator=g)
    labels = torch.where(torch.rand(B, T, generator=g) < 0.3, -100, ids)
    attention = torch.ones_like(ids)
    attention[0, :2] = 0
    labels[0, :3] = -100
    return ids, attention, labels


def weigh(logprobs, entropy):
    """A scalar that gives every token a gradient of its own."""
    g = torch.Generator().manual_seed(2)
    w = torch.randn(2, *logprobs.shape, generator=g).to(logprobs.device)
    return (w[0] * logprobs + w[1] * entropy).sum()


def from_logits(logits, targets, temperature=1.0, vocab_size=None):
    log_p = (logits / temperature)[..., :vocab_size].log_softmax(-1)
    counts = targets != -100
    logprobs = log_p.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return torch.where(counts, logprobs, 0.0), torch.where(counts, entropy, 0.0)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(got, want, tolerance=1e-5):
    assert got.keys() == want.keys()
    assert any(g is not None and g.abs().max() > 1e-2 for g in want.values())
    for name in want:
        assert (got[name] is None) == (want[name] is None), name
        if want[name] is not None:
            scale = want[name].abs().max().clamp(min=1.0)
            assert (got[name] - want[name]).abs().max() <= tolerance * scale, name


def compare(model, tolerance=1e-5, **options):
    """Patched against the model's own logits: log-probs, entropy, loss and every gradient."""
    ids, attention, labels = (t.to(model.device) for t in batch())
    logits = model(input_ids=ids, attention_mask=attention).logits
    want = from_logits(logits[:, :-1], labels[:, 1:], **options)
    want_grads = gradients(model, weigh(*want))
    temperature = options.pop("temperature", 1.0)
    patch(model, temperature=temperature, **options)
    out = model(input_ids=ids, attention_mask=attention, labels=labels, return_entropy=True)
    assert out.logprobs.shape == (B, T - 1) and out.logprobs.dtype == torch.float32
    torch.testing.assert_close(out.logprobs, want[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out.entropy, want[1], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out.loss, -want[0].sum() / (labels[:, 1:] != -100).sum(), rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(model, weigh(out.logprobs, out.entropy)), want_grads, tolerance)


@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "mpt-ignores-its-scale"])
def test_as_the_models_own_logits(name):
    compare(make(name))


def test_tied_weights_get_the_gradients_of_both_ends():
    model = make(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    compare(model)


def test_temperature_and_padding_rows_of_the_vocabulary():
    compare(make("gemma2-softcap"), temperature=0.7)
    model = make()
    with torch.no_grad():
        model.lm_head.weight[V - 1] = 40.0  # of a padding row that would swallow all probability
    patch(model, vocab_size=V - 1)
    ids = torch.randint(3, V - 1, (2, 6))
    logits = model(ids).logits
    want, _ = from_logits(logits[:, :-1], ids[:, 1:], vocab_size=V - 1)
    torch.testing.assert_close(model(ids, labels=ids).logprobs, want, rtol=1e-5, atol=1e-5)


def test_options_of_a_call():
    model = make()
    ids, attention, labels = batch()
    logits = model(ids, attention).logits
    patch(model, temperature=2.0)
    per_sequence, per_token = torch.tensor([0.5, 1.0, 2.0]), torch.rand(B, T - 1) + 0.5
    for t, wide in ((per_sequence, per_sequence[:, None, None]), (per_token, per_token[..., None])):
        want, _ = from_logits(logits[:, :-1], labels[:, 1:], temperature=wide)
        out = model(ids, attention, labels=labels, temperature=t)
        torch.testing.assert_close(out.logprobs, want, rtol=1e-5, atol=1e-5)
        assert out.entropy is None and out.topk_logprobs is None
    topk = torch.randint(0, V, (B, T - 1, 4))
    out = model(ids, attention, labels=labels, topk_ids=topk, num_items_in_batch=7)
    want = (logits[:, :-1] / 2).log_softmax(-1).gather(-1, topk) * (labels[:, 1:] != -100)[..., None]
    torch.testing.assert_close(out.topk_logprobs, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.loss, -out.logprobs.sum() / 7)


def test_labels_that_are_shifted_already():
    model = make()
    ids, attention, labels = batch()
    want, _ = from_logits(model(ids, attention).logits, labels)
    patch(model)
    torch.testing.assert_close(model(ids, attention, shift_labels=labels).logprobs, want, rtol=1e-5, atol=1e-5)


def test_loss_is_that_of_the_model():
    model = make()
    ids, attention, labels = batch()
    own = model(ids, attention, labels=labels).loss
    patch(model)
    torch.testing.assert_close(model(ids, attention, labels=labels).loss, own, rtol=1e-5, atol=1e-5)
    as_tuple = model(ids, attention, labels=labels, return_dict=False)
    assert type(as_tuple) is tuple and len(as_tuple) == 2


def test_without_labels_and_after_unpatch_the_forward_is_the_models_own():
    model = make()
    ids, attention, labels = batch()
    before = model(ids, attention).logits
    signature = inspect.signature(model.forward)
    generated = model.generate(ids[:1], max_new_tokens=3, do_sample=False)
    patch(model)
    assert torch.equal(model(ids, attention).logits, before)
    assert inspect.signature(model.forward) == signature  # generate and the Trainer read it
    assert torch.equal(model.generate(ids[:1], max_new_tokens=3, do_sample=False), generated)
    unpatch(model)
    assert "forward" not in vars(model) and not hasattr(model, "_bapo_kernels")
    assert torch.equal(model(ids, attention, labels=labels).logits, before)


def test_a_forward_of_the_instance_comes_back():
    model = make()
    own, calls = model.forward, []
    model.forward = lambda *args, **kwargs: calls.append(args) or own(*args, **kwargs)
    mine = model.forward
    patch(model)
    seen = len(calls)
    model(batch()[0])
    assert len(calls) == seen + 1
    model(batch()[0], labels=batch()[2])
    assert len(calls) == seen + 1
    unpatch(model)
    assert model.forward is mine
    patch(model)
    model.forward = own
    with pytest.raises(RuntimeError, match=r"replaced after patch"):
        unpatch(model)


def test_a_copy_is_patched_by_itself():
    model = make()
    patch(model)
    ids, attention, labels = batch()
    before = model(ids, attention, labels=labels).logprobs
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(other(ids, attention, labels=labels).logprobs, before)
    assert other(ids, attention).logits.abs().max() > 0


def test_all_labels_masked():
    model = make()
    patch(model)
    ids, attention, _ = batch()
    out = model(ids, attention, labels=torch.full_like(ids, -100), return_entropy=True)
    assert out.loss == 0 and not out.logprobs.any() and not out.entropy.any()
    out.loss.backward()
    assert not model.lm_head.weight.grad.any()


# What it composes with


@pytest.fixture
def liger(monkeypatch):
    """Liger's layers. Their Triton kernels do not run on a CPU: there the arithmetic is PyTorch's, and the rest is theirs."""
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3, rms_norm, swiglu

    if not torch.cuda.is_available():

        def normed(x, weight, eps, *_):
            return weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()

        def gated(gate, up, *_):
            return nn.functional.silu(gate) * up

        monkeypatch.setattr(rms_norm.LigerRMSNormFunction, "apply", normed)
        monkeypatch.setattr(swiglu.LigerSiLUMulFunction, "apply", gated)
    modeling = importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    saved = dict(vars(modeling))
    yield lambda model, **which: apply_liger_kernel_to_qwen3(model=model, rope=torch.cuda.is_available(), **which)
    vars(modeling).update(saved)


def test_liger_layers(liger):
    model = make().to("cuda" if torch.cuda.is_available() else "cpu")
    liger(model, rms_norm=True, swiglu=True, fused_linear_cross_entropy=False)
    assert "liger" in model.model.norm.forward.__module__ and "liger" in model.model.layers[0].mlp.forward.__module__
    compare(model)


def test_a_head_that_liger_patched_before(liger):
    model = make()
    liger(model, rms_norm=False, swiglu=False, fused_linear_cross_entropy=True)
    compare(model)
    unpatch(model)
    assert model.forward.__module__.startswith("liger_kernel")


def test_gradient_checkpointing():
    model = make().train()
    model.gradient_checkpointing_enable()
    compare(model)


def test_autocast_rounds_the_factors_and_not_the_logits():
    model = make()
    ids, attention, labels = batch()
    with torch.autocast("cpu", torch.bfloat16):
        want, _ = from_logits(model(ids, attention).logits.float()[:, :-1], labels[:, 1:])
        hidden = model.model(ids, attention).last_hidden_state[:, :-1]
        patch(model)
        out = model(ids, attention, labels=labels)
    torch.testing.assert_close(out.logprobs, want, rtol=0.03, atol=0.03)
    exact = bk.linear_logprobs(hidden.bfloat16(), model.lm_head.weight.bfloat16(), labels[:, 1:]).logprobs
    assert torch.equal(out.logprobs, exact)
    out.loss.backward()
    assert model.lm_head.weight.grad.dtype == torch.float32 and model.lm_head.weight.grad.any()


def test_bf16_model():
    model = make().bfloat16()
    ids, attention, labels = batch()
    want, _ = from_logits(model(ids, attention).logits.float()[:, :-1], labels[:, 1:])
    patch(model)
    out = model(ids, attention, labels=labels)
    assert out.logprobs.dtype == torch.float32
    torch.testing.assert_close(out.logprobs, want, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("whole", [False, True], ids=["backbone", "model"])
def test_compiled(whole):
    model = make()
    ids, attention, labels = batch()
    patch(model)
    want = model(ids, attention, labels=labels, return_entropy=True)
    want_grads = gradients(model, weigh(want.logprobs, want.entropy))
    (model if whole else model.model).compile(backend="aot_eager")
    out = model(ids, attention, labels=labels, return_entropy=True)
    torch.testing.assert_close(out.logprobs, want.logprobs, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(model, weigh(out.logprobs, out.entropy)), want_grads)


def test_accelerate_keeps_the_patch(request):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.state.AcceleratorState._reset_state(
        reset_partial_state=True
    )  # one for a process, of another test perhaps
    request.addfinalizer(lambda: accelerate.state.AcceleratorState._reset_state(reset_partial_state=True))
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = make()
    patch(model)
    ids, attention, labels = batch()
    prepared = accelerator.prepare_model(model)
    assert prepared(ids, attention, labels=labels).logprobs.shape == (B, T - 1)
    back = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert back(ids, attention, labels=labels).logprobs.shape == (B, T - 1)


def test_fully_shard_gathers_the_head(tmp_path):
    distributed = pytest.importorskip("torch.distributed.fsdp", reason="no FSDP in this torch")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        ids, attention, labels = batch()
        model = make()
        patch(model)
        want = model(ids, attention, labels=labels)
        want_grad = gradients(model, want.loss)["lm_head.weight"]
        for layer in model.model.layers:
            distributed.fully_shard(layer, mesh=mesh)
        distributed.fully_shard(model, mesh=mesh)
        out = model(ids, attention, labels=labels)
        torch.testing.assert_close(out.logprobs, want.logprobs)
        got = gradients(model, out.loss)["lm_head.weight"].full_tensor()
        torch.testing.assert_close(got, want_grad)

        alone = make()
        patch(alone)
        distributed.fully_shard(alone.lm_head, mesh=mesh)
        distributed.fully_shard(alone, mesh=mesh)
        with pytest.raises(ValueError, match=r"head is sharded"):
            alone(ids, attention, labels=labels)
        unpatch(alone)
        with pytest.raises(ValueError, match=r"patch the model first"):
            patch(alone)
    finally:
        torch.distributed.destroy_process_group()


# PEFT


def lora(model, **options):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=12, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


@pytest.mark.skipif(PEFT_MISSING, reason="peft is not installed")
@pytest.mark.parametrize("first", [True, False], ids=["patched first", "wrapped first"])
@pytest.mark.parametrize("bias", ["none", "lora"])
def test_lora_on_the_head(first, bias):
    model = make("phi-bias")
    ids, attention, labels = batch()
    options = {"target_modules": ["q_proj", "lm_head"], "lora_bias": bias == "lora"}
    if first:
        patch(model)
    wrapped = lora(model, **options)
    want = from_logits(wrapped(input_ids=ids, attention_mask=attention).logits[:, :-1], labels[:, 1:])
    want_grads = gradients(wrapped, weigh(*want))
    if not first:
        patch(wrapped)
    out = wrapped(input_ids=ids, attention_mask=attention, labels=labels, return_entropy=True)
    torch.testing.assert_close(out.logprobs, want[0], rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(wrapped, weigh(out.logprobs, out.entropy)), want_grads)
    with wrapped.disable_adapter():
        own = wrapped(input_ids=ids, attention_mask=attention).logits[:, :-1]
        got = wrapped(input_ids=ids, attention_mask=attention, labels=labels).logprobs
    torch.testing.assert_close(got, from_logits(own, labels[:, 1:])[0], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(PEFT_MISSING, reason="peft is not installed")
def test_a_head_that_is_trained_beside_lora():
    wrapped = lora(make(), target_modules=["q_proj"], modules_to_save=["lm_head"])
    with torch.no_grad():
        wrapped.get_base_model().lm_head.modules_to_save["default"].weight.mul_(1.5)
    ids, attention, labels = batch()
    want = from_logits(wrapped(input_ids=ids, attention_mask=attention).logits[:, :-1], labels[:, 1:])
    want_grads = gradients(wrapped, weigh(*want))
    patch(wrapped)
    out = wrapped(input_ids=ids, attention_mask=attention, labels=labels, return_entropy=True)
    torch.testing.assert_close(out.logprobs, want[0], rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(wrapped, weigh(out.logprobs, out.entropy)), want_grads)


@pytest.mark.skipif(PEFT_MISSING, reason="peft is not installed")
def test_adapters_that_are_refused():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    with pytest.raises(ValueError, match=r"more than LoRA .*Dora"):
        patch(lora(make(), target_modules=["lm_head"], use_dora=True))
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match=r"PromptTuningConfig"):
        patch(peft.get_peft_model(make(), prompts))


# Refusals


class _Quantised(nn.Linear):
    def forward(self, x):
        return super().forward(x).round()


def test_heads_that_are_refused():
    model = make()
    model.lm_head = _Quantised(16, V)
    with pytest.raises(ValueError, match=r"no plain nn.Linear but .*_Quantised"):
        patch(model)
    model = make()
    model.lm_head.weight = nn.Parameter(torch.zeros(V, 16, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"quantised \(Parameter, torch.int8\)"):
        patch(model)
    model = make()
    model.lm_head.weight = nn.Parameter(torch.zeros(0))
    with pytest.raises(ValueError, match=r"ZeRO-3"):
        patch(model)
    with pytest.raises(ValueError, match=r"meta device"):
        patch(make().to("meta"))
    assert "forward" not in vars(model) and not hasattr(model, "_bapo_kernels")


def test_models_that_are_refused():
    with pytest.raises(ValueError, match=r"PreTrainedModel .*got Linear"):
        patch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"before it is wrapped.*got DataParallel"):
        patch(nn.DataParallel(make()))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=V, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match=r"encoder-decoder"):
        patch(t5)
    with pytest.raises(ValueError, match=r"no backbone"):
        patch(make().model)
    model = make()
    patch(model)
    with pytest.raises(ValueError, match=r"patched already"):
        patch(model)
    unpatch(model)
    with pytest.raises(ValueError, match=r"not patched"):
        unpatch(model)


@pytest.mark.parametrize(("wrong", "name"), [("logit_scale", "cohere-multiplies"), ("softcap", "gemma2-softcap")])
def test_logits_made_in_another_way_are_refused(wrong, name):
    model = make(name)
    with pytest.raises(ValueError, match=f"not those that its config and head give.*{wrong}=2"):
        patch(model, **{wrong: 2.0})
    assert "forward" not in vars(model) and not model.training
    patch(model, **{wrong: 2.0}, probe=False)


def test_what_the_probe_leaves_behind():
    model = make().train()
    model.model.layers[0].eval()
    state = torch.get_rng_state()
    patch(model)
    assert model.training and not model.model.layers[0].training and model.model.layers[1].training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_scale_that_the_config_has_and_the_model_ignores():
    model = make("mpt-ignores-its-scale")
    model.config.logit_scale = 0.5
    with pytest.raises(ValueError, match=r"logit_scale=0.5"):
        patch(model)
    patch(model, logit_scale=1.0)


def test_calls_that_are_refused():
    model = make()
    patch(model)
    ids, _, labels = batch()
    for option in ({"logits_to_keep": 2}, {"output_hidden_states": True}, {"output_attentions": True}):
        with pytest.raises(ValueError, match=next(iter(option))):
            model(ids, labels=labels, **option)
    for name, value in (("temperature", 0.5), ("return_entropy", True), ("topk_ids", ids)):
        with pytest.raises(ValueError, match=f"{name} needs labels"):
            model(ids, **{name: value})
    with pytest.raises(ValueError, match=r"targets"):
        model(ids, labels=torch.full_like(ids, V))


def test_an_auxiliary_loss_is_not_lost_in_silence():
    CONFIGS["moe"] = lambda **o: Qwen3MoeConfig(
        **SIZES, num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, **o
    )
    compare(make("moe"))
    ids, _, labels = batch()
    model = make("moe", output_router_logits=True)
    patch(model, probe=False)
    with pytest.raises(ValueError, match=r"output_router_logits"):
        model(ids, labels=labels)
    assert model(ids, labels=labels, output_router_logits=False).logprobs.shape == (B, T - 1)


# The package


def test_versions_and_missing_packages(monkeypatch):
    monkeypatch.setattr(packages.Package, "version", "4.40.0")
    packages._warned.clear()
    with pytest.warns(UserWarning, match=r"transformers 4.40.0 .*tested: 5"):
        patch(make())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch(make())
    packages._warned.clear()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"transformers .* has no transformers.PreTrainedLM"):
        integration.TRANSFORMERS.hook("transformers", "PreTrainedLM")
    missing = packages.Package("transformers", "1", "2", extra="transformers")
    with pytest.raises(ImportError, match=r"pip install 'bapo-kernels\[transformers\]'"):
        missing.module("transformers.no_such_module")
    assert integration.TRANSFORMERS.extra == "transformers"
