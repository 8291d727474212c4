"""The head of a transformers model, read from it and compared with what the model computes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bapo_kernels.integrations.heads import evaluating, logit_scale, softcap


class ModelHead(NamedTuple):
    """What turns the backbone's hidden states into logits: `linear_logprobs` takes these as keyword arguments, but for `weight`."""

    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    logit_scale: float
    softcap: float | None

    def options(self) -> dict[str, Any]:
        return {"bias": self.bias, "logit_scale": self.logit_scale, "softcap": self.softcap}


def head_of(model: nn.Module) -> ModelHead:
    """The head as it is now; ValueError where it is more than a product, a scale and a softcap."""
    module = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(module, nn.Linear):
        raise ValueError(f"its head is a {type(module).__name__}, not a linear layer")
    if type(module.weight).__name__ == "DTensor" or not module.weight.is_floating_point():
        raise ValueError(
            f"the weight of its head is sharded or quantized: {type(module.weight).__name__} of {module.weight.dtype}"
        )
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    return ModelHead(module.weight, module.bias, logit_scale(config), softcap(config))


def backbone_of(model: nn.Module) -> nn.Module:
    backbone = model.base_model
    if backbone is model:
        raise ValueError("it names no backbone (base_model_prefix)")
    return backbone  # type: ignore[return-value]


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Compare the model's logits of a few tokens with those of its head as it was read; ValueError where they are others.

    A forward may do anything between backbone and logits, and configurations have many names for it: this asks the model itself."""
    head, backbone = head_of(model), backbone_of(model)
    ids = torch.arange(8, device=head.weight.device)[None] % head.weight.shape[0]
    with evaluating(model):
        hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state.to(head.weight.device)
        logits = model(input_ids=ids, use_cache=False).logits
    ours = nn.functional.linear(hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float())
    ours = ours * head.logit_scale
    if head.softcap is not None:
        ours = head.softcap * torch.tanh(ours / head.softcap)
    # Theirs are rounded to the model's dtype, before and after the scale; another scale or another input is further off.
    tolerance = 16 * torch.finfo(logits.dtype).eps * ours.abs().amax()
    if logits.shape != ours.shape or not bool(((logits - ours).abs() <= tolerance).all()):
        raise ValueError("its logits are not its head's product, scale and softcap on the backbone's last hidden state")
