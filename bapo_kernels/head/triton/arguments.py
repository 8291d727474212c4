"""What every launch of a head kernel needs to know of its tensors. Those with a row for each token are contiguous (`chunked._PerRow`)."""

import torch
import triton.language as tl

from bapo_kernels.head.chunked import LogitSpec, Rows, Slice
from bapo_kernels.launching import Config, find_config


def config_for(kernel: str, rows: Rows, part: Slice, spec: LogitSpec, descriptors: bool = False) -> Config:
    """From the table, for these tensors; `descriptors` copy whole blocks of them."""
    hidden, weight = rows.hidden, part.weight
    whole = descriptors or (hidden.shape[1] % 16 == 0 and hidden.stride(1) == weight.stride(1) == 1)
    present = {"ragged": not whole, "softcap": spec.softcap is not None}
    features = frozenset(name for name, is_there in present.items() if is_there)
    return find_config(kernel, hidden.device, hidden.dtype, features)


def scalars(spec: LogitSpec, acc: torch.dtype):
    """Scale and softcap: fp32 at run time. In fp64 a compile-time constant, since a Python float reaches a kernel as fp32."""
    given = (None if spec.scale == 1.0 else float(spec.scale), None if spec.softcap is None else float(spec.softcap))
    if acc == torch.float64:
        return tuple(None if s is None else tl.constexpr(s) for s in given)
    return given
