"""The head on GPUs, in Triton. `backend.py` launches the kernels, one to a file, with the block sizes of `configs.py`.

Importing this package needs no Triton: ask `available` first, then import `backend`."""

import torch


def available(device: torch.device) -> str | None:
    """None if the Triton backend can run for tensors on `device`; otherwise the reason, in a sentence."""
    try:
        from bapo_kernels.head.triton.backend import reason_against
    except ImportError as error:
        return f"Triton cannot be imported ({error})."
    return reason_against(device)
