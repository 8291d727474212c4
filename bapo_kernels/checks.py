"""Validation of arguments: what the checks of every function have in common."""

import math
import os
from numbers import Integral, Real
from typing import TypeGuard

import torch
from torch import Tensor

from bapo_kernels.compiling import require


def is_number(value: object) -> TypeGuard[float]:
    """A finite real number, in fp32 too, that is no bool; NumPy's scalars are, and what stands for a number of a compiled graph's runs."""
    if isinstance(value, torch.SymFloat | torch.SymInt):
        return True
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and fits_fp32(value)


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral | torch.SymInt) and not isinstance(value, bool)


def fits_fp32(value: Real | float) -> bool:
    """Neither inf nor, unless it is 0, 0 in the dtype that kernels compute in."""
    info = torch.finfo(torch.float32)
    return value == 0 or info.tiny <= abs(float(value)) <= info.max


def is_integer(t: Tensor) -> bool:
    return not t.dtype.is_floating_point and not t.dtype.is_complex and t.dtype != torch.bool


def shape_of(t: Tensor) -> str:
    return str(tuple(t.shape))


def check_tensor(name: str, t: object, device: torch.device | None) -> None:
    """A plain real tensor, on `device`."""
    if not isinstance(t, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(t).__name__}")
    if type(t).__name__ == "DTensor":
        raise ValueError(f"{name} is a DTensor: pass its full_tensor(), or to_local() if it is replicated")
    if t.is_complex():
        raise ValueError(f"{name} must be real, got {t.dtype}")
    if device is not None and t.device != device:
        raise ValueError(f"{name} is on {t.device}, but the other tensors are on {device}")


def check_shape(name: str, t: object, shape: tuple, like: str, device: torch.device) -> None:
    """`shape` may name a free size with a letter; `like` says what it has to go with."""
    check_tensor(name, t, device)
    assert isinstance(t, Tensor)
    fits = len(t.shape) == len(shape) and all(
        isinstance(want, str) or want == got for want, got in zip(shape, t.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{name} must have shape ({wanted}) to go with {like}, got {shape_of(t)}")


def check_mask(mask: object, shape: tuple, like: str, device: torch.device) -> None:
    """Of the batch's layout, and 0 or 1: a mask of weights would silently count as 1."""
    check_shape("mask", mask, shape, like, device)
    assert isinstance(mask, Tensor)
    if mask.dtype != torch.bool and values_are_checked(device):
        valid = (mask == 0) | (mask == 1)
        require(valid, mask, "mask must hold 0 or 1 only, got {}; weights belong into the advantages")


def check_ignore_index(value: object) -> None:
    if not is_whole(value):
        raise ValueError(f"ignore_index must be an integer, got {value!r}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_group(name: str, group: object) -> None:
    if group is None:
        return
    if not torch.distributed.is_available() or not isinstance(group, torch.distributed.ProcessGroup):
        raise ValueError(f"{name} must be a torch.distributed group or None, got {type(group).__name__}: {group!r}")


def check_floating(name: str, t: Tensor) -> None:
    if not t.dtype.is_floating_point:
        raise ValueError(f"{name} must be floating point, got {t.dtype}")


def values_are_checked(device: torch.device) -> bool:
    """Values of tensors are validated where that is free: on CPU. On an accelerator it would stall the stream, so only when asked."""
    return device.type == "cpu" or is_set("BAPO_KERNELS_CHECK")


def is_set(variable: str) -> bool:
    """Whether a variable of the environment asks for something."""
    return os.environ.get(variable, "0") not in ("", "0")


class Validated:
    """Frozen dataclasses whose fields are checked when they are made."""

    def _require(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise ValueError(f"{type(self).__name__}({name}=...) must be {allowed}, got {getattr(self, name)!r}")

    def _require_numbers(self, *names: str, low: float = 0.0, strict: bool = False, optional: bool = False) -> None:
        for name in names:
            value = getattr(self, name)
            if optional and value is None:
                continue
            ok = is_number(value) and (value > low if strict else value >= low)
            self._require(
                name, ok, f"a finite number {'>' if strict else '>='} {low:g}{' or None' if optional else ''}"
            )
