"""Binding of the compiled epilogues (csrc/): one pass in C++ over a tile that a GEMM just wrote, rows in parallel."""

from functools import cache
from importlib import import_module

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from bapo_kernels.head.chunked import Coefficients, LogitSpec, Rows, Slice, State, Statistics


@cache
def _load():
    """(module, None) or (None, the reason). torch is imported above, so that both share its OpenMP runtime."""
    try:
        return import_module("bapo_kernels._epilogues"), None
    except (ImportError, ValueError) as e:  # ValueError: BAPO_KERNELS_ISA names what this machine does not have
        return (
            None,
            f"the compiled epilogues cannot be loaded ({e}); they come with an installation that has a C++ compiler",
        )


def unavailable() -> str | None:
    """Why the backend cannot be used, or None if it can."""
    return _load()[1]


def _share(t: Tensor | None):
    # Capsules made here cost 0.2 us each; letting the extension call `Tensor.__dlpack__`, ten times as much.
    return None if t is None else to_dlpack(t)


class CpuEpilogues:
    name = "cpu"
    tiles = (1, 1)  # tiles alive at once, forward and backward: both epilogues work in place

    def __init__(self):
        self._module, reason = _load()
        if reason:
            raise RuntimeError(reason)

    def fold(self, z: Tensor, rows: Rows, part: Slice, spec: LogitSpec, state: State) -> None:
        statistics = map(_share, (state.max, state.sum, state.spread, state.picked))
        self._module.fold(*_tile(z, rows, part, spec), *statistics, torch.get_num_threads())

    def dlogits(
        self, z: Tensor, rows: Rows, part: Slice, spec: LogitSpec, stats: Statistics, coef: Coefficients, out: Tensor
    ) -> None:
        assert out is z, "CPUs multiply in the accumulation dtype"
        entropy = None if coef.entropy is None else stats.entropy
        vectors = map(_share, (stats.max, stats.log_sum, coef.probability, coef.entropy, entropy, coef.picked))
        self._module.dlogits(*_tile(z, rows, part, spec), *vectors, torch.get_num_threads())


def _tile(z: Tensor, rows: Rows, part: Slice, spec: LogitSpec) -> tuple:
    vectors = _share(rows.inv_temperature), _share(rows.ids), part.first
    return _share(z), _share(part.bias), spec.scale, spec.softcap or 0.0, *vectors
