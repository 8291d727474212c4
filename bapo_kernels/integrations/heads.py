"""What the heads of transformers models have in common: what configs say of them, what autocast makes of them, a look without dropout."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# What configs call the factor on the logits. Where two are listed, models have one of them.
MULTIPLIES = ("logit_scale", "output_multiplier", "lm_head_multiplier")
DIVIDES = "logits_scaling"
MULTIPLIES_ALL_THE_SAME = ("hyperclovax",)  # with logits_scaling
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")


def logit_scale(config: Any) -> float:
    for name in MULTIPLIES:
        if isinstance(value := getattr(config, name, None), int | float):
            return float(value)
    if isinstance(value := getattr(config, DIVIDES, None), int | float):
        return float(value) if config.model_type in MULTIPLIES_ALL_THE_SAME else 1.0 / value
    return 1.0


def softcap(config: Any) -> float | None:
    return next((cap for name in SOFTCAPS if (cap := getattr(config, name, None)) is not None), None)


def under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The factors of a product in the dtype that autocast gives them, where it is on; fp64 stays."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode; afterwards each module is in the mode that it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
