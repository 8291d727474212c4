"""Token-local losses on GPUs, in one Triton kernel: loss, coefficient, clip flag, ratio, and the sums behind the metrics.

`launch.py` launches the kernels of `rules.py`. The rules of `losses/*.py` remain the definition, and serve whatever is not served here.
Importing this package needs no Triton.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from bapo_kernels.head import triton as head
from bapo_kernels.losses.base import Loss, TokenLoss, Tokens

_backend = ContextVar("backend", default="auto")


@dataclass(frozen=True, kw_only=True)
class FusedTerm(TokenLoss):
    """What the kernel returns: `loss` is differentiable in the log-probs, through coefficients made in the same pass."""

    ratio: Tensor  # per token; 0 where masked
    means: dict[str, Tensor]  # those metrics that are over active tokens of ratio, advantage, log-prob and flag


@contextmanager
def using(backend: str) -> Iterator[None]:
    """Which backend the losses are evaluated on: "auto" has the kernels on GPUs, "triton" also in the interpreter, others PyTorch."""
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)


def evaluate(loss: Loss, x: Tokens) -> FusedTerm | None:
    """The rule of `loss` on `x`, by the kernel; None where that cannot serve the loss, the tensors or the machine."""
    backend, device = _backend.get(), x.logprobs.device
    if backend not in ("auto", "triton") or (backend == "auto" and device.type != "cuda") or not _available(device):
        return None
    if x.logprobs.dtype != torch.float32 or x.logprobs.numel() == 0:
        return None
    from bapo_kernels.losses.triton import launch

    return launch.evaluate(loss, x)


@cache
def _available(device: torch.device) -> bool:
    return head.unavailable(device) is None
