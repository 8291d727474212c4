"""What is computed in: fp32 at least, and GEMMs that multiply in the dtype they are given, whatever the process has set."""

import threading
from contextlib import contextmanager

import torch
from torch import Tensor

# The newer of PyTorch's two ways to set this: the older one raises where a program has used both.
_SETTINGS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
_EXACT = ("none", "ieee")
_lock = threading.Lock()
_inside = 0
_before: list[str] = []
_fp16_sums = False


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp32, or fp64 if anything is fp64. Logits, statistics and sums of gradients are never held in less."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


@contextmanager
def full_precision(device_type: str):
    """Inside: no tf32, no bf16 behind an fp32 matmul, no fp16 sums of fp16 products, no autocast.

    The settings are the process's, and backward runs on threads of its own: the first in saves them, the last out restores them."""
    global _inside, _before, _fp16_sums
    products = torch.backends.cuda.matmul
    with _lock:
        if _inside == 0:
            _before = [s.fp32_precision for s in _SETTINGS]
            for s, value in zip(_SETTINGS, _before, strict=True):
                if value not in _EXACT:
                    s.fp32_precision = "ieee"
            _fp16_sums, products.allow_fp16_accumulation = products.allow_fp16_accumulation, False
        _inside += 1
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                for s, value in zip(_SETTINGS, _before, strict=True):
                    if value not in _EXACT:
                        # What is read may be inherited from the general setting, and has to stay so.
                        general = torch.backends.fp32_precision  # type: ignore[attr-defined]
                        s.fp32_precision = "none" if value == general else value
                products.allow_fp16_accumulation = _fp16_sums
