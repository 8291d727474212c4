"""Which backend serves a call."""

import os
import warnings
from collections.abc import Sequence
from functools import cache

import torch

from bapo_kernels.checks import is_whole
from bapo_kernels.head import cpu, triton
from bapo_kernels.head.chunked import Backend
from bapo_kernels.head.eager import GemmBackend, TorchEpilogues
from bapo_kernels.head.products import multiplies_narrow

NAMES = ("auto", "triton", "cpu", "torch", "reference")
# On a GPU, tiles of all rows of a large batch: products over many rows at a time are what is fast there.
DEFAULT_BUDGET, DEFAULT_BUDGET_GPU = 256 * 2**20, 2**30


def unavailable(name: str, device: torch.device) -> str | None:
    """Why a backend cannot serve tensors on `device`, or None if it can."""
    if name == "cpu":
        return cpu.unavailable() if device.type == "cpu" else f"it works on CPU tensors, not on {device.type}"
    if name == "triton":
        return triton.unavailable(device)
    return None


def check_name(name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(NAMES)}, got {name!r}")


def resolve(name: str, device: torch.device) -> str:
    """The name of the backend that `name` asks for; never "auto"."""
    check_name(name)
    if name == "auto":
        return _automatic(device.type)
    if reason := unavailable(name, device):
        raise ValueError(f"backend={name!r} cannot be used here: {reason}")
    return name


def choose(name: str, device: torch.device, hidden: torch.dtype, weight: Sequence[torch.dtype]) -> Backend | None:
    """The backend object for hidden states and weight of these dtypes; None stands for the reference."""
    name = resolve(name, device)
    if name == "reference":
        return None
    if name == "triton":
        from bapo_kernels.head.triton.backend import backend_for

        return backend_for(device, hidden, weight)
    return _build(name, multiplies_narrow(device), device.type == "cuda")


@cache
def _automatic(device_type: str) -> str:
    fast = {"cpu": "cpu", "cuda": "triton"}.get(device_type)
    if fast is None:
        return "torch"
    if reason := unavailable(fast, torch.device(device_type)):
        warnings.warn(
            f"bapo_kernels uses its slower PyTorch path: backend {fast!r} cannot be used ({reason})", stacklevel=2
        )
        return "torch"
    return fast


@cache
def _build(name: str, narrow: bool, gpu: bool) -> Backend:
    epilogues = cpu.CpuEpilogues() if name == "cpu" else TorchEpilogues()
    return GemmBackend(epilogues, narrow, gpu)


def resolve_budget(memory_budget: int | None, device: torch.device) -> int:
    """Bytes for temporary tiles: the argument, else BAPO_KERNELS_MEMORY_BUDGET, else 256 MiB, 1 GiB on a GPU."""
    name: str = "memory_budget"
    value: object = memory_budget
    if memory_budget is None:
        name = "BAPO_KERNELS_MEMORY_BUDGET"
        text = os.environ.get(name) or str(DEFAULT_BUDGET_GPU if device.type == "cuda" else DEFAULT_BUDGET)
        value = int(text) if text.isdecimal() else text
    if not is_whole(value) or value <= 0:
        raise ValueError(f"{name} must be a number of bytes > 0, got {value!r}")
    return value
