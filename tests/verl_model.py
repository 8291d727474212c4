"""A model as verl patches it."""

import pytest
import torch


def tiny_model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}

    class Model(transformers.Qwen3ForCausalLM):
        """A class of its own: verl replaces `forward` on it."""

    return Model(transformers.Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1))
