"""Token-local losses on GPUs, in one Triton kernel: loss, coefficient, clip flag, ratio, and the sums behind the metrics.

`launch.py` launches the kernels of `rules.py`, and those of `bounds.py`, which find BAPO's bounds. The rules of `losses/*.py` remain
the definition, and serve whatever is not served here. Importing this package needs no Triton.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bapo_kernels.compiling import is_traced
from bapo_kernels.head import triton as head
from bapo_kernels.losses.base import Loss, TokenLoss, Tokens

if TYPE_CHECKING:
    from bapo_kernels.controller import BapoBounds
    from bapo_kernels.losses.bapo import BAPO

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
    if not _serves(x):
        return None
    from bapo_kernels.losses.triton import launch

    return launch.evaluate(loss, x)


def find_bounds(loss: "BAPO", x: Tokens) -> "BapoBounds | None":
    """`controller.find_bounds` by kernels; None where they cannot serve."""
    if not _serves(x):
        return None
    from bapo_kernels.losses.triton import launch

    return launch.find_bounds(loss, x)


def _serves(x: Tokens) -> bool:
    backend, device = _backend.get(), x.logprobs.device
    wanted = backend == "triton" or (backend == "auto" and device.type == "cuda")
    if is_traced(x.logprobs):  # the compiler fuses the rule as it is
        return False
    return wanted and x.logprobs.dtype == torch.float32 and x.logprobs.numel() > 0 and _available(device)


@cache
def _available(device: torch.device) -> bool:
    return head.unavailable(device) is None
