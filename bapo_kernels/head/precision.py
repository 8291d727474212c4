"""GEMMs that multiply in the dtype they are given: no tf32, no bf16 behind an fp32 matmul, no autocast, whatever the process has set."""

import threading
from contextlib import contextmanager

import torch

# The newer of PyTorch's two ways to set this: the older one raises where a program has used both.
_SETTINGS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
_EXACT = ("none", "ieee")
_lock = threading.Lock()
_inside = 0
_before: list[str] = []


@contextmanager
def full_precision(device_type: str):
    """The settings are the process's, and backward runs on threads of its own: the first in saves them, the last out restores them."""
    global _inside, _before
    with _lock:
        if _inside == 0:
            _before = [s.fp32_precision for s in _SETTINGS]
            for s, value in zip(_SETTINGS, _before, strict=True):
                if value not in _EXACT:
                    s.fp32_precision = "ieee"
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
