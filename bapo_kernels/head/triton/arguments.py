"""What every launch of a head kernel needs to know of its tensors."""

import torch
import triton.language as tl
from torch import Tensor

from bapo_kernels.head.chunked import LogitSpec, Rows, Slice
from bapo_kernels.launching import INTERPRETED, Config, chip_family, find_config

DTYPE_CLASSES = {torch.float64: "double", torch.float32: "float", torch.bfloat16: "half", torch.float16: "half"}
_DOT_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def config_for(kernel: str, rows: Rows, part: Slice, spec: LogitSpec, *extra: str) -> Config:
    """From the table, for these tensors. `extra`: features that are not seen in them."""
    present = {
        "bias": part.bias is not None,
        "scale": spec.scale != 1.0,
        "softcap": spec.softcap is not None,
        "temperature": rows.inv_temperature is not None,
        "ragged": rows.hidden.shape[1] % 16 != 0,
    }
    features = frozenset(name for name, is_there in present.items() if is_there) | set(extra)
    return find_config(kernel, chip_family(rows.hidden.device), DTYPE_CLASSES[rows.hidden.dtype], features)


def dot_dtype(operand: torch.dtype) -> tl.dtype:
    if (
        INTERPRETED and operand == torch.bfloat16
    ):  # the interpreter multiplies bf16 bit patterns as if they were numbers
        operand = torch.float32
    return _DOT_DTYPES[operand]


def scalars(spec: LogitSpec, acc: torch.dtype):
    """Scale and softcap: fp32 at run time. In fp64 a compile-time constant, since a Python float reaches a kernel as fp32."""
    given = (None if spec.scale == 1.0 else float(spec.scale), None if spec.softcap is None else float(spec.softcap))
    if acc == torch.float64:
        return tuple(None if s is None else tl.constexpr(s) for s in given)
    return given


def vector(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()
