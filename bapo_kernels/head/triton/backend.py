"""The Triton backend: which of its two designs a head takes.

    gemm   the vendor's product into an fp32 tile, then one kernel over the tile: products may be kept, so every engine can be had
    tile   product and epilogue in one kernel: the forward writes no logit; engine "recompute" only

Scoring and training of a head have to see the same bits, so the choice hangs on device and dtype alone, not on what is asked for.
"""

import os
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch

from bapo_kernels.head.chunked import Backend
from bapo_kernels.head.eager import GemmBackend
from bapo_kernels.head.products import are_narrow, multiplies_narrow
from bapo_kernels.head.triton.epilogues import TritonEpilogues
from bapo_kernels.head.triton.tiles import TileBackend
from bapo_kernels.launching import INTERPRETED

DESIGNS = ("auto", "gemm", "tile")


def reason_against(device: torch.device) -> str | None:
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return f"Triton compiles for GPUs, not for {device.type} tensors (TRITON_INTERPRET=1, set before start, interprets instead)."
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return (
            f"The Triton kernels need compute capability 8.0 or later; {torch.cuda.get_device_name(device)} has less."
        )
    return None


class Design(NamedTuple):
    name: str
    reason: str


def choose_design(narrow_products: bool, hidden: torch.dtype, weight: Iterable[torch.dtype]) -> Design:
    """For hidden states and weight of these dtypes. `narrow_products`: the vendor has products of 16 bits with an fp32 result."""
    forced = os.environ.get("BAPO_KERNELS_DESIGN") or "auto"
    if forced not in DESIGNS:
        raise ValueError(f"BAPO_KERNELS_DESIGN must be one of {', '.join(DESIGNS)}, got {forced!r}")
    if forced != "auto":
        return Design(forced, "BAPO_KERNELS_DESIGN asks for it")
    if not are_narrow(hidden, weight):
        return Design("gemm", "plain fp32 is the vendor's field")
    if not narrow_products:
        return Design("tile", "the vendor's 16-bit product would round the logits")
    return Design("gemm", "kept products save a pass of four, more than a fused tile could")


def backend_for(device: torch.device, hidden: torch.dtype, weight: Iterable[torch.dtype]) -> Backend:
    narrow = INTERPRETED or multiplies_narrow(device)
    return _build(choose_design(narrow, hidden, weight), narrow)


@cache
def _build(design: Design, narrow: bool) -> Backend:
    text = f"design {design.name}: {design.reason}"
    return TileBackend(text) if design.name == "tile" else GemmBackend(TritonEpilogues(), narrow, True, text)
