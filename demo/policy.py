"""The policy: a small Llama with random weights, and how it samples."""

import torch
from task import EOS, PAD, WORDS
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


def new_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)


def answer_states(model: LlamaForCausalLM, prompts: Tensor, answers: Tensor) -> Tensor:
    """The states before the head, (B, T, D): state t is the one that predicts answer token t."""
    ids = torch.cat([prompts, answers[:, :-1]], dim=1)
    return model.model(ids, use_cache=False).last_hidden_state[:, prompts.shape[1] - 1 :]


@torch.no_grad()
def sample(model: LlamaForCausalLM, prompts: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sampled answers (B, T <= length), their mask up to and with <eos>, and the log-probs with which the tokens were drawn."""
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=length,
        do_sample=True,
        top_k=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    answers = out.sequences[:, prompts.shape[1] :]
    is_eos = (answers == EOS).int()
    logprobs = torch.stack(out.logits, dim=1).log_softmax(-1).gather(2, answers.unsqueeze(2)).squeeze(2)
    return answers, is_eos.cumsum(1) - is_eos == 0, logprobs
