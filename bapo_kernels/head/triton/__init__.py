"""The head on GPUs, in Triton. `backend.py` launches the kernels, one to a file, with the block sizes of `configs.py`.

Importing this package needs no Triton: ask `unavailable` first, then import `backend`."""

import torch


def unavailable(device: torch.device) -> str | None:
    """Why the Triton backend cannot run for tensors on `device`, in a sentence, or None if it can."""
    try:
        from bapo_kernels.head.triton.backend import reason_against
    except ImportError as error:
        return f"Triton cannot be imported ({error})."
    return reason_against(device)
