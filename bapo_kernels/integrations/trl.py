"""TRL: a GRPO trainer with the losses and the head of this package, and its head alone for TRL's own trainers.

    from bapo_kernels.integrations.trl import BAPOTrainer

    trainer = BAPOTrainer(model, reward_funcs=reward, args=GRPOConfig(...), train_dataset=dataset)

Importing this module needs no TRL; its trainers do.
"""

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bapo_kernels.head.api import linear_logprobs
from bapo_kernels.integrations.heads import under_autocast
from bapo_kernels.integrations.packages import Package

if TYPE_CHECKING:
    from bapo_kernels.integrations.trl_trainer import BAPOTrainer, BPOTrainer, PolicyLossTrainer

__all__ = ["BAPOTrainer", "BPOTrainer", "PolicyLossTrainer", "use_fused_head"]

TRL = Package("trl", "1.13", "1.16", extra="trl")
_HEAD = TRL._replace(first="1.15")  # before, the head was no part of the model's forward
_KERNEL = "_ChunkedLogProbFunction"


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("bapo_kernels.integrations.trl_trainer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class use_fused_head(AbstractContextManager):
    """Let TRL's fused LM head on `model` compute with this package's kernels, in TRL's trainers of every kind (1.15 and later).

        use_fused_head(trainer)                    # for good
        with use_fused_head(model): ...            # or for a while; `undo()` does the same

    The outputs are TRL's own: log-probs and entropy, with their gradients; temperature, softcap, logit scale and bias as TRL has found
    them. Logits are fp32, though, where TRL rounds them to the dtype of the product. A call that asks for more than the two runs TRL's
    kernel.

    Args:
        model: a model that TRL has given its fused head (PEFT-wrapped or not), or a trainer: its model, and its reference model if there
            is one.

    Raises:
        ImportError: TRL is not installed.
        RuntimeError: this TRL has no such head, or has it elsewhere.
        ValueError: the model has not got it, or is sharded by ZeRO-3, which takes the weight away before the backward.
    """

    def __init__(self, model: Any):
        _HEAD.check_version()
        _HEAD.hook("trl.trainer.utils", "add_fused_lm_head")
        _HEAD.hook("trl.trainer.utils", f"{_KERNEL}.apply")
        if _is_zero3():
            raise ValueError(
                "use_fused_head cannot serve a model sharded by ZeRO-3: its head is gathered for TRL's own kernel only"
            )
        models = [model] if isinstance(model, torch.nn.Module) else [model.model, getattr(model, "ref_model", None)]
        self._patched: list[tuple[torch.nn.Module, Callable]] = []
        for each in (unwrapped(m) for m in models if m is not None):
            if "forward" not in vars(each):
                self.undo()
                raise ValueError(
                    f"{type(each).__name__} has no fused head of TRL's: make the trainer first, or call add_fused_lm_head(model)"
                )
            self._patched.append((each, each.forward))
            each.forward = _with_kernel(each.forward)

    def undo(self) -> None:
        for model, forward in self._patched:
            model.forward = forward
        self._patched = []

    def __exit__(self, *_: object) -> None:
        self.undo()


def unwrapped(model: Any) -> torch.nn.Module:
    """The transformers model under DDP and PEFT."""
    model = getattr(model, "module", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _is_zero3() -> bool:
    return _HEAD.hook("transformers.integrations.deepspeed", "is_deepspeed_zero3_enabled")()


def _with_kernel(forward: Callable) -> Callable:
    utils = _HEAD.module("trl.trainer.utils")

    @functools.wraps(forward)  # transformers reads the signature
    def with_kernel(*args: Any, **kwargs: Any) -> Any:
        theirs = getattr(utils, _KERNEL)
        setattr(utils, _KERNEL, _Kernel(theirs))
        try:
            return forward(*args, **kwargs)
        finally:
            setattr(utils, _KERNEL, theirs)

    return with_kernel


class _Kernel:
    """In the place of TRL's autograd function, with its arguments and results."""

    def __init__(self, theirs: Any):
        self.theirs = theirs

    def apply(
        self,
        hidden: Tensor,  # (N, D)
        weight: Tensor,  # (V, D)
        bias: Tensor | None,  # (V,)
        targets: Tensor,  # (N,)
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] | None = None,
    ) -> tuple[Tensor | None, ...]:
        if outputs is None or not set(outputs) <= {"log_probs", "entropy"}:
            given = () if outputs is None else (outputs,)
            return self.theirs.apply(
                hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, *given
            )
        hidden, weight = under_autocast(hidden, weight)
        out = linear_logprobs(
            hidden,
            weight,
            targets,
            bias=bias,
            ignore_index=-1,  # TRL has clamped its own to 0, and drops what comes of it
            temperature=temperature,
            logit_scale=logit_scale,
            softcap=softcap,
            return_entropy="entropy" in outputs,
        )
        return out.logprobs, out.entropy, None, None, None
