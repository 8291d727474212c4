"""Which rows take part. Rows that do not count are dropped before any work, so that nothing they hold can reach a result."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bapo_kernels.compiling import is_traced


def is_captured(t: Tensor) -> bool:
    """Whether work on `t` is captured into a CUDA graph, and its values cannot be looked at."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class Selection:
    """A choice of rows of (N, ...) tensors: by number (compacted), or, where the host cannot learn how many there are, by mask."""

    total: int
    index: Tensor | None = None  # (n,) int64, rising
    mask: Tensor | None = None  # (N,) bool

    @classmethod
    def of(cls, wanted: Tensor) -> "Selection":
        """The rows where `wanted` (N,) bool. Compaction needs their number on the host, which neither a CUDA graph under capture nor a
        graph being compiled can give."""
        total = wanted.shape[0]
        if is_traced(wanted) or is_captured(wanted):
            return cls(total, mask=wanted)
        index = wanted.nonzero().squeeze(1)
        return cls(total, index=None if index.shape[0] == total else index)

    @property
    def rows(self) -> int:
        return self.total if self.index is None else self.index.shape[0]

    def place(self, number: Tensor) -> Tensor:
        """Where rows stand among all, by their number among the selected."""
        return number if self.index is None else self.index[number]

    def take(self, t: Tensor, fill: float = 0) -> Tensor:
        """(N, ...) to (n, ...); rows that are only masked hold `fill`."""
        if self.index is not None:
            return t[self.index]
        if self.mask is not None:
            return torch.where(self.mask.view(-1, *(1,) * (t.dim() - 1)), t, t.new_full((), fill))
        return t

    def put(self, t: Tensor) -> Tensor:
        """The inverse: (n, ...) to (N, ...), exactly 0 in rows that are not selected."""
        if self.index is not None:
            return t.new_zeros(self.total, *t.shape[1:]).index_copy_(0, self.index, t)
        return self.take(t)

    def then(self, inner: "Selection") -> "Selection":
        """Select by `inner`, compacted, among the rows selected here."""
        if self.index is None and self.mask is None:
            return inner
        if inner.index is None and inner.mask is None:
            return self
        assert self.index is not None and inner.index is not None
        return Selection(self.total, index=self.index[inner.index])
