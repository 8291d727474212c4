"""Hugging Face transformers: a causal model whose forward answers `labels` with per-token log-probs instead of logits.

    from bapo_kernels.integrations.transformers import patch

    patch(model)
    out = model(input_ids, attention_mask=attention_mask, labels=labels)
    out.logprobs                                   # (B, T - 1), differentiable

One patch for all architectures: it lies on the instance, runs the model's own backbone, whatever its layers are (Liger's, a checkpointed
or a compiled one), and hands the last hidden states with the head's weight to `linear_logprobs`. What stands between the hidden states and
the logits is read from the config and compared, once, with logits that the model itself computes.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bapo_kernels.head.api import linear_logprobs
from bapo_kernels.integrations import heads
from bapo_kernels.integrations.packages import Package

TRANSFORMERS = Package("transformers", "5.5", "5.24", extra="transformers")
PEFT = Package("peft", "0.21", "0.21")

CALL_OPTIONS = ("temperature", "return_entropy", "topk_ids")
# Outputs of the backbone that the answer has no place for.
NOT_RETURNED = ("output_hidden_states", "output_attentions", "output_router_logits")


class TokenOutput(NamedTuple):
    """What the patched forward returns. L is T - 1 with `labels`, T with `shift_labels`."""

    loss: Tensor  # 0-d: mean negative log-prob of the labelled tokens, or their sum / num_items_in_batch
    logprobs: Tensor  # (B, L), 0 where the label is -100
    entropy: Tensor | None  # (B, L)
    topk_logprobs: Tensor | None  # (B, L, K)


class Adapter(NamedTuple):
    """LoRA on the head: logits + scaling * b(a(dropout(hidden)))."""

    a: Any  # nn.Linear, D -> r
    b: Any  # nn.Linear, r -> V
    dropout: nn.Module
    scaling: float


@dataclass
class _Patch:
    """What lies on a patched model, beside its forward."""

    temperature: float | Tensor
    return_entropy: bool
    head: dict[str, Any]  # options of linear_logprobs that belong to the model
    forward: Callable  # ours
    original: Callable | None  # the forward that the instance had of its own

    def original_forward(self, model: nn.Module) -> Callable:
        return self.original or MethodType(type(model).forward, model)


def patch(
    model: Any,  # PreTrainedModel or PeftModel
    *,
    temperature: float | Tensor = 1.0,
    return_entropy: bool = False,
    logit_scale: float | None = None,
    softcap: float | None = None,
    vocab_size: int | None = None,
    probe: bool = True,
    backend: str = "auto",
    memory_budget: int | None = None,
) -> None:
    """Let `model(..., labels=labels)` return per-token log-probs, and the loss, without ever making the logits.

        out = model(input_ids, attention_mask=mask, labels=labels)             # TokenOutput(loss, logprobs, entropy, topk_logprobs)
        out = model(input_ids, labels=labels, temperature=t, return_entropy=True, topk_ids=ids)

    `labels` (B, T) are aligned with `input_ids`, as everywhere in transformers: `logprobs[:, t]` (B, T - 1) is the log-prob of
    `labels[:, t + 1]`, from the hidden state at t, and 0 where that label is -100. `shift_labels` (B, T) are shifted already:
    `logprobs[:, t]` (B, T) is that of `shift_labels[:, t]`. In batches packed into one row, the first label of every sequence has to be
    -100. Without labels the forward is the model's own, so that generation does not change.

    A call may have a `temperature` (a number, or a tensor in the shape of `logprobs`, (B,) or (B, 1)) and a `return_entropy` other than
    those given here, and `topk_ids` in the shape of `logprobs` with one more axis.

    Patch the model before it is wrapped (DDP, FSDP, accelerate, torch.compile). Under `fully_shard` the head has to lie in the group of the
    whole model, which is gathered while the forward runs. A PEFT model is patched in the model that it wraps; LoRA on the head is
    computed as LoRA: the frozen weight is not copied, and gets no gradient. Under autocast hidden states and weight are rounded to its
    dtype, as an `nn.Linear` would have it; the logits never are. Hooks on the head module do not run, as its forward does not.

    Args:
        model: a causal language model of transformers, or a PeftModel around one.
        temperature: divides the logits.
        return_entropy: also the entropy of each token.
        logit_scale, softcap: None: what the model's config says.
        vocab_size: rows of the head from here on are padding, as `resize_token_embeddings(pad_to_multiple_of=...)` makes; None: no row is.
        probe: compare with the model's own logits, on four tokens. Switch it off only for a model that cannot run yet.
        backend, memory_budget: as in `linear_logprobs`.

    Raises:
        ValueError: naming what this patch cannot represent: a head that is no plain nn.Linear (quantised, sharded), encoder-decoders,
            prompt learning, logits that are made in another way than the config says.
        ImportError: where transformers is missing.
    """
    TRANSFORMERS.check_version()
    model = _causal_lm(model)
    if isinstance(model.__dict__.get("_bapo_kernels"), _Patch):
        raise ValueError(f"model is patched already: unpatch({type(model).__name__}) first")
    config = model.config.get_text_config()
    state = _Patch(
        temperature,
        return_entropy,
        {
            "logit_scale": heads.logit_scale(config) if logit_scale is None else logit_scale,
            "softcap": heads.softcap(config) if softcap is None else softcap,
            "vocab_size": vocab_size,
            "backend": backend,
            "memory_budget": memory_budget,
        },
        _forward_of(type(model)),
        model.__dict__.get("forward"),
    )
    _head_of(model)
    model._bapo_kernels = state
    model.forward = MethodType(state.forward, model)
    try:
        if probe:
            _probe(model, state)
    except BaseException:
        unpatch(model)
        raise


def unpatch(model: Any) -> None:
    """Give the model back the forward it had. ValueError if it is not patched; RuntimeError if its forward was replaced since."""
    model = _causal_lm(model)
    state = model.__dict__.get("_bapo_kernels")
    if not isinstance(state, _Patch):
        raise ValueError(f"model is not patched: {type(model).__name__}")
    if getattr(model.forward, "__func__", None) is not state.forward:
        raise RuntimeError("the forward of the model was replaced after patch(); undo that first, then unpatch()")
    del model._bapo_kernels
    if state.original is None:
        del model.forward
    else:
        model.forward = state.original


def _causal_lm(model: Any) -> Any:
    """The transformers model itself, refused where the patch cannot stand for its forward."""
    if "peft" in sys.modules and isinstance(model, PEFT.hook("peft", "PeftModel")):
        config = model.active_peft_config
        if config.is_prompt_learning:
            kind = type(config).__name__
            raise ValueError(
                f"model learns prompts ({kind}), which lengthens its sequences: they have no labels to answer for"
            )
        model = model.get_base_model()
    if not isinstance(model, TRANSFORMERS.hook("transformers", "PreTrainedModel")):
        raise ValueError(
            f"model must be a transformers PreTrainedModel (patch it before it is wrapped), got {type(model).__name__}"
        )
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"model is an encoder-decoder ({type(model).__name__}): the patch is for causal language models"
        )
    if model.base_model is model:
        raise ValueError(
            f"{type(model).__name__} has no backbone beside its head (base_model_prefix={model.base_model_prefix!r})"
        )
    return model


# Not functools.wraps: `__wrapped__` would lead those who unwrap a model past the patch. But the signature has to be the model's, since
# `generate` and the Trainer read it.
def _forward_of(cls: type) -> Callable:
    signature = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    names = list(signature.parameters)[1:]

    def forward(self, *args, **kwargs):
        state: _Patch = self._bapo_kernels
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("labels") is None and given.get("shift_labels") is None:
            if unused := [name for name in CALL_OPTIONS if name in kwargs]:
                raise ValueError(f"{unused[0]} needs labels: without them the forward is the model's own")
            return state.original_forward(self)(*args, **kwargs)
        return _score(self, state, {name: value for name, value in given.items() if value is not None})

    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


def _score(model: Any, state: _Patch, given: dict[str, Any]) -> TokenOutput | tuple:
    labels, shifted = given.pop("labels", None), given.pop("shift_labels", None)
    temperature = given.pop("temperature", state.temperature)
    return_entropy = given.pop("return_entropy", state.return_entropy)
    topk_ids, count = given.pop("topk_ids", None), given.pop("num_items_in_batch", None)
    as_tuple = not given.pop("return_dict", True)
    keep = given.pop("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep != 0:
        raise ValueError("logits_to_keep has no meaning with labels: rows whose label is -100 are not computed")
    given.setdefault("output_router_logits", getattr(model.config.get_text_config(), "output_router_logits", False))
    if not given["output_router_logits"]:
        del given["output_router_logits"]
    for name in NOT_RETURNED:
        if given.get(name):
            raise ValueError(
                f"{name} cannot be returned together with log-probs: set it to False, or call without labels"
            )
    if not {"cache", "past_key_values"} & set(given):
        given["use_cache"] = False

    hidden = model.base_model(**given, return_dict=True).last_hidden_state
    if shifted is None:
        hidden, shifted = hidden[:, :-1], labels[:, 1:]
    hidden, parts, bias = _operands(model, hidden)
    hidden, *parts = heads.under_autocast(hidden, *parts)  # the bias is added to logits, which stay fp32
    targets = shifted.to(hidden.device)
    out = linear_logprobs(
        hidden,
        tuple(parts),
        targets,
        bias=bias,
        temperature=temperature,
        topk_ids=topk_ids,
        return_entropy=return_entropy,
        **state.head,
    )
    count = (targets != -100).sum().clamp(min=1) if count is None else count
    # Copies, as FSDP hangs hooks on what a forward returns, and warns of views.
    answer = TokenOutput(-out.logprobs.sum() / count, *(None if t is None else t.clone() for t in out))  # type: ignore[arg-type]
    return tuple(t for t in answer if t is not None) if as_tuple else answer


def _operands(model: Any, hidden: Tensor) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Hidden states, the parts of the weight, and the bias: with LoRA on the head, one more part for each adapter at work."""
    head, adapters = _head_of(model)
    hidden, bias = hidden.to(head.weight.device), head.bias
    states: list[Tensor] = [hidden]
    parts: list[Tensor] = [head.weight]
    for lora in adapters:
        low_rank = lora.a(lora.dropout(hidden.to(lora.a.weight.dtype)))
        states.append((lora.scaling * low_rank).to(hidden.dtype))
        parts.append(lora.b.weight)
        if lora.b.bias is not None:
            bias = lora.scaling * lora.b.bias + (0.0 if bias is None else bias)
    return torch.cat(states, -1) if adapters else hidden, parts, bias


def _head_of(model: Any) -> tuple[Any, list[Adapter]]:
    """The head as a plain nn.Linear, and the LoRA adapters at work on it. ValueError where it is something else."""
    head, adapters = model.get_output_embeddings(), []
    if head is not None and type(head).__module__.startswith("peft."):
        if isinstance(head, PEFT.hook("peft.utils", "ModulesToSaveWrapper")):
            trained = not head.disable_adapters and head.active_adapters
            head = head.modules_to_save[head.active_adapters[0]] if trained else head.original_module
        elif type(head) is PEFT.hook("peft.tuners.lora", "Linear"):
            adapters, head = _lora(head), head.base_layer
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        kind = f"{type(head).__module__}.{type(head).__qualname__}"
        raise ValueError(
            f"the head of {type(model).__name__} is no plain nn.Linear but {kind} (quantised, or wrapped?)"
        )
    weight = head.weight
    if type(weight).__name__ == "DTensor":
        raise ValueError(
            "the weight of the head is sharded (DTensor): patch the model first, and shard the head with the whole model"
        )
    if weight.is_meta:
        raise ValueError("the weight of the head is on the meta device (offloaded, or not loaded)")
    if weight.dim() != 2:
        raise ValueError(
            f"the weight of the head has shape {tuple(weight.shape)}: it is sharded (ZeRO-3), and has to be gathered"
        )
    if not weight.is_floating_point() or (isinstance(weight, nn.Parameter) and type(weight) is not nn.Parameter):
        raise ValueError(
            f"the weight of the head is quantised ({type(weight).__name__}, {weight.dtype}): leave the head out"
        )
    return head, adapters


def _lora(layer: Any) -> list[Adapter]:
    if layer.disable_adapters or layer.merged:
        return []
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if variants := [type(layer.lora_variant[n]).__name__ for n in names if n in layer.lora_variant]:
        raise ValueError(f"the head has an adapter that is more than LoRA ({variants[0]}): leave the head out of it")
    return [Adapter(layer.lora_A[n], layer.lora_B[n], layer.lora_dropout[n], layer.scaling[n]) for n in names]


def _probe(model: Any, state: _Patch) -> None:
    """Compare with the model's own logits, on a few tokens. ValueError where they are made in another way."""
    device = model.get_input_embeddings().weight.device
    ids = torch.arange(4, device=device)[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad(), heads.evaluating(model):
        logits = state.original_forward(model)(**given).logits[..., : state.head["vocab_size"]]
        likely = logits.argmax(-1)  # a wrong scale shows most there
        own = model(**given, shift_labels=likely.to(device), temperature=1.0, return_entropy=False, return_dict=True)
    want = logits.double().log_softmax(-1).gather(-1, likely[..., None]).squeeze(-1)
    error = (own.logprobs.to(want.device) - want).abs().max()
    # The model rounds its logits to its dtype; an autocast that is on counts as well, as both are under it.
    allowed = 1e-3 + 2 * torch.finfo(logits.dtype).eps * logits.abs().max()
    if not error <= allowed:
        raise ValueError(
            f"the logits of {type(model).__name__} are not those that its config and head give: log-probs differ by {error:.3g}. "
            f"Used were logit_scale={state.head['logit_scale']:g}, softcap={state.head['softcap']}; give others, if that is what it does"
        )
