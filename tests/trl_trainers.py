"""Tiny random trainers of TRL, and batches as TRL hands them to `_compute_loss`."""

import os
import warnings

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here comes from the hub

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from bapo_kernels.integrations.trl import PolicyLossTrainer, use_fused_head

VOCAB, PAD, EOS = 64, 0, 1
BATCH, PROMPT, COMPLETION, TOPK = 4, 3, 8, 5


def model(seed=0, **config):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=PAD, eos_token_id=EOS, initializer_range=0.3,
        **config,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def tokenizer():
    words = {"<pad>": PAD, "<eos>": EOS, **{f"w{i}": i for i in range(2, VOCAB)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="w2"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="w2", padding_side="left"
    )


def reward(completion_ids, **_):
    """Something that completions of a random model differ in."""
    return [sum(i % 7 for i in ids) / 7 for ids in completion_ids]


def prompts():
    return Dataset.from_dict({"prompt": ["w3 w4 w5", "w6 w7 w8", "w9 w10 w11", "w12 w13 w14"] * 4})


def trainer(tmp_path, cls=PolicyLossTrainer, *, on=None, config=None, trainer_config=None, **options):
    """`config` are fields of GRPOConfig, `options` arguments of the trainer."""
    fields = {
        "use_cpu": True, "bf16": False, "report_to": [], "per_device_train_batch_size": BATCH, "num_generations": BATCH,
        "max_completion_length": COMPLETION, "max_steps": 2, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no",
        "disable_tqdm": True, "disable_dropout": True, "seed": 7, **(config or {}),
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return cls(
            on or model(),
            reward_funcs=options.pop("reward_funcs", reward),
            args=GRPOConfig(output_dir=str(tmp_path), **fields),
            train_dataset=prompts(),
            processing_class=tokenizer(),
            **options,
        )


def inputs(seed=0, *, old=True, ref=False, tool=True, sampling=False, ratio=None, topk=False):
    """A micro-batch; the last completion does not count at all, and records are some way from the policy."""
    g = torch.Generator().manual_seed(seed)
    completion = torch.randint(2, VOCAB, (BATCH, COMPLETION), generator=g)
    lengths = torch.tensor([COMPLETION, 5, 3, 0])
    mask = (torch.arange(COMPLETION) < lengths[:, None]).long()
    batch = {
        "prompt_ids": torch.randint(2, VOCAB, (BATCH, PROMPT), generator=g),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 1]]),
        "completion_ids": completion.masked_fill(mask == 0, PAD),
        "completion_mask": mask,
        "advantages": torch.tensor([1.3, -0.9, 0.4, -0.8]),
        "num_items_in_batch": torch.tensor(37),
    }
    if tool:
        batch["tool_mask"] = torch.where(torch.arange(COMPLETION) == 2, 0, 1).expand(BATCH, -1).contiguous()
    noise = lambda scale: scale * torch.randn(BATCH, COMPLETION, generator=g)  # noqa: E731
    if old:
        batch["old_per_token_logps"] = noise(0.6)
    if ref:
        batch["ref_per_token_logps"] = noise(0.3)
    if sampling:
        batch["sampling_per_token_logps"] = noise(0.4)
    if ratio == "token":  # 1 where a token does not count, as TRL has it
        counts = batch["completion_mask"] * batch.get("tool_mask", 1) == 1
        batch["importance_sampling_ratio"] = torch.where(counts, noise(0.3).exp().clamp(max=1.5), 1.0)
    elif ratio == "sequence":
        batch["importance_sampling_ratio"] = noise(0.3)[:, :1].exp().clamp(max=1.5)
    if topk:
        batch["sampling_topk_ids"] = torch.rand(BATCH, COMPLETION, VOCAB, generator=g).topk(TOPK).indices
        batch["sampling_topk_logps"] = torch.randn(BATCH, COMPLETION, TOPK + 3, generator=g).log_softmax(-1)[..., :TOPK]
    return batch


def on_policy(trained, batch):
    """Records that are near the policy's log-probs, as `inputs` gives their distance from it."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        logprobs, _, _ = trained._get_per_token_logps_and_entropies(trained.model, ids, attention, COMPLETION)
    names = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
    return {**batch, **{name: logprobs + batch[name] for name in names if name in batch}}


def loss_and_gradients(trained, compute, batch):
    trained.model.zero_grad()
    loss = compute(trained.model, batch)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in trained.model.named_parameters() if p.grad is not None}


def theirs(trained, batch):
    """By TRL's own head."""
    head = getattr(trained, "scoring_head", None)
    if head is not None:
        head.undo()
    try:
        return loss_and_gradients(trained, lambda m, b: GRPOTrainer._compute_loss(trained, m, b), batch)
    finally:
        if head is not None:
            trained.scoring_head = use_fused_head(trained)


def ours(trained, batch):
    return loss_and_gradients(trained, trained._compute_loss, batch)


@torch.no_grad()
def rollout(prompts, trained):
    """A `rollout_func` that samples COMPLETION tokens, and records the TOPK most likely ids and their log-probs at each."""
    policy = trained.accelerator.unwrap_model(trained.model)
    prompt_ids = trained.processing_class(prompts)["input_ids"]
    ids, records = torch.tensor(prompt_ids), []
    for _ in range(COMPLETION):
        logprobs = policy(input_ids=ids, use_cache=False).logits[:, -1].log_softmax(-1)
        token = torch.multinomial(logprobs.exp(), 1)
        ids = torch.cat([ids, token], 1)
        records.append((token, logprobs.gather(1, token), *logprobs.topk(TOPK)[::-1]))
    tokens, taken, top, top_logprobs = (torch.stack(each, 1).tolist() for each in zip(*records, strict=True))
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [[t for (t,) in row] for row in tokens],
        "logprobs": [[t for (t,) in row] for row in taken],
        "sampling_topk_ids": top,
        "sampling_topk_logps": top_logprobs,
    }
