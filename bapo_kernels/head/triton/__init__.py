"""The head on GPUs, in Triton. `backend.py` chooses a design; `epilogues.py` and `tiles.py` launch its kernels, one to a file of that name.

Importing this package needs no Triton: ask `unavailable` first, then import `backend`."""

import torch


def unavailable(device: torch.device) -> str | None:
    """Why the Triton backend cannot run for tensors on `device`, in a sentence, or None if it can."""
    try:
        from bapo_kernels.head.triton.backend import reason_against
    except ImportError as error:
        return f"Triton cannot be imported ({error})."
    return reason_against(device)
