"""The two layouts of a batch, padded (B, T) and packed (N,) with `cu_seqlens`, behind one set of operations on its sequences."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from bapo_kernels.checks import check_floating, check_mask, check_tensor, is_integer, shape_of, values_are_checked
from bapo_kernels.compiling import is_traced, require


@dataclass(frozen=True)
class Layout:
    shape: torch.Size  # (B, T) or (N,)
    cu_seqlens: Tensor | None  # (S + 1,) int64, packed only
    sequences: int  # B or S

    @classmethod
    def of(cls, name: str, shape: torch.Size, cu_seqlens: Tensor | None, device: torch.device) -> "Layout":
        """The layout of a batch of `shape`; `name` is the argument the shape came from. A 1-D batch without cu_seqlens is one sequence."""
        if cu_seqlens is None:
            if len(shape) in (1, 2):
                return cls(shape, None, shape[0] if len(shape) == 2 else 1)
            raise ValueError(f"{name} must have the layout (B, T) or (N,), got a layout of {tuple(shape)}")
        if len(shape) != 1:
            raise ValueError(f"cu_seqlens describes a packed layout (N,), but {name} has the layout {tuple(shape)}")
        check_tensor("cu_seqlens", cu_seqlens, None)
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or not is_integer(cu_seqlens):
            got = f"{cu_seqlens.dtype} {shape_of(cu_seqlens)}"
            raise ValueError(f"cu_seqlens must be an integer tensor of shape (S + 1,), got {got}")
        if is_traced(cu_seqlens):
            if values_are_checked(device):
                _check_edges(name, cu_seqlens, shape[0])
        elif cu_seqlens.device.type == "cpu" or values_are_checked(device):
            edges = cu_seqlens.tolist()
            if edges[0] != 0 or edges[-1] != shape[0] or any(a > b for a, b in pairwise(edges)):
                shown = ", ".join(map(str, edges[:8])) + (", ..." if len(edges) > 8 else "")
                raise ValueError(
                    f"cu_seqlens must rise from 0 to {shape[0]}, the tokens of {name} {tuple(shape)}, got [{shown}]"
                )
        # An ordinary tensor, which autograd may keep, whatever mode made the caller's.
        with torch.inference_mode(False):
            edges_on_device = cu_seqlens.to(device=device, dtype=torch.int64, copy=True)
        return cls(shape, edges_on_device, cu_seqlens.numel() - 1)

    def sequence_sum(self, t: Tensor) -> Tensor:
        """(layout) -> (sequences,), differentiable; the order of summation is fixed."""
        if self.cu_seqlens is None:
            return t.reshape(self.sequences, self.shape[-1]).sum(1)
        if t.numel() == 0:
            return t.new_zeros(self.sequences)
        return torch.segment_reduce(t, "sum", offsets=self.cu_seqlens, unsafe=True, initial=0)

    def to_tokens(self, per_sequence: Tensor) -> Tensor:
        """(sequences,) -> (layout): each token gets its sequence's value."""
        if self.cu_seqlens is None:
            return per_sequence[:, None].expand(self.sequences, self.shape[-1]).reshape(self.shape)
        position = torch.arange(self.shape[0], device=per_sequence.device)
        return per_sequence[torch.searchsorted(self.cu_seqlens[1:], position, right=True)]

    def expand(self, name: str, t: Tensor) -> Tensor:
        """An input given per token (layout), or per sequence ((B,), (B, 1) padded; (S,) packed, unless S == N), as (layout)."""
        if t.shape == self.shape:
            return t
        per_sequence = [(self.sequences,), (self.sequences, 1)][: len(self.shape)]
        if tuple(t.shape) in per_sequence:
            return self.to_tokens(t.reshape(self.sequences))
        allowed = " or ".join(str(s) for s in [tuple(self.shape), *per_sequence])
        raise ValueError(f"{name} must have shape {allowed}, got {shape_of(t)}")


def _check_edges(name: str, cu_seqlens: Tensor, tokens: int) -> None:
    """In a compiled graph, where they are no list."""
    rise = torch.cat([cu_seqlens[:1] == 0, cu_seqlens[1:] >= cu_seqlens[:-1]])
    message = f"cu_seqlens must rise from 0 to the tokens of {name}, got {{}}"
    require(rise, cu_seqlens, message)
    require(cu_seqlens[-1:] == tokens, cu_seqlens[-1:], message)


def layout_and_mask(logprobs: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Layout, Tensor]:
    """The layout of a batch of log-probs, and which tokens count (bool), validated."""
    check_tensor("logprobs", logprobs, None)
    check_floating("logprobs", logprobs)
    layout = Layout.of("logprobs", logprobs.shape, cu_seqlens, logprobs.device)
    if mask is None:
        return layout, torch.ones(layout.shape, dtype=torch.bool, device=logprobs.device)
    check_mask(mask, tuple(layout.shape), "logprobs", logprobs.device)
    return layout, mask != 0
