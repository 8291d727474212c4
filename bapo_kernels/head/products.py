"""The vendor's matrix products: 16-bit operands where the hardware sums their products in fp32, and sums that are never held in less.

bf16 hidden states and weight are multiplied as they are, into fp32 logits. The gradient dz of the logits is then rounded to bf16 once, as
an operand of the two products of the backward; their sums are fp32. fp16 has not the range for dz: there the backward multiplies in fp32.
"""

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

NARROW = (torch.bfloat16, torch.float16)


def multiplies_narrow(device: torch.device) -> bool:
    """Whether this device's library has products of 16-bit operands with an fp32 result."""
    return device.type == "cuda" and torch.version.hip is None


def are_narrow(hidden: torch.dtype, weight: Iterable[torch.dtype]) -> bool:
    """Alike, and of 16 bits."""
    return hidden in NARROW and all(w == hidden for w in weight)


def operand_dtype(narrow: bool, acc: torch.dtype, hidden: torch.dtype, weight: Iterable[torch.dtype]) -> torch.dtype:
    """What hidden states and weight are multiplied in: as they are, if `narrow` products are to be had; their results are fp32."""
    return hidden if narrow and acc == torch.float32 and are_narrow(hidden, weight) else acc


def gradient_dtype(operand: torch.dtype, acc: torch.dtype) -> torch.dtype:
    """What dz and its factors are multiplied in, where hidden states and weight are in `operand`."""
    return operand if operand == torch.bfloat16 else acc


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, with products and sums in the dtype of `out`."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif multiplies_narrow(a.device):
        torch.mm(a, b, out.dtype, out=out)
    else:  # the same numbers: products of 16 bits are exact in fp32
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def multiply_add(out: Tensor, a: Tensor, b: Tensor, beta: float = 1.0) -> None:
    """out = beta out + a @ b, with products and sums in the dtype of `out`. With beta 0, what `out` held does not matter."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=beta, out=out)
    elif beta == 0.0:
        multiply(a, b, out)
    elif multiplies_narrow(a.device) and _adds_to_fp32(a.device, a.dtype):
        torch.addmm(out, a, b, out.dtype, beta=beta, out=out)
    else:
        product = torch.empty_like(out)
        multiply(a, b, product)
        out.mul_(beta).add_(product)


@cache
def _adds_to_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Some releases of PyTorch want the summand of a narrow product to be narrow too, and say so before any work."""
    a = torch.zeros(16, 16, dtype=dtype, device=device)
    out = torch.zeros(16, 16, device=device)
    try:
        torch.addmm(out, a, a, torch.float32, out=out)
    except RuntimeError as refusal:
        if "dtype" not in str(refusal):
            raise
        return False
    return True
