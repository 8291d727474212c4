"""Binding of the compiled epilogues (csrc/): one pass in C++ over a tile that a GEMM just wrote, rows in parallel."""

from functools import cache
from importlib import import_module

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from bapo_kernels.head.chunked import Coefficients, LogitSpec, State, Statistics


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


def available() -> str | None:
    """None if the backend can be used, otherwise the reason it cannot."""
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

    def fold(
        self,
        z: Tensor,  # (n, w), overwritten
        bias: Tensor | None,  # (w,)
        spec: LogitSpec,
        inv_temperature: Tensor | None,  # (n,)
        ids: Tensor,  # (n, P)
        first_column: int,
        state: State,
    ) -> None:
        self._module.fold(
            *self._tile(z, bias, spec, inv_temperature, ids, first_column),
            _share(state.max),
            _share(state.sum),
            _share(state.spread),
            _share(state.picked),
            torch.get_num_threads(),
        )

    def dlogits(
        self,
        z: Tensor,
        bias: Tensor | None,
        spec: LogitSpec,
        inv_temperature: Tensor | None,
        ids: Tensor,
        first_column: int,
        statistics: Statistics,
        coefficients: Coefficients,
    ) -> None:
        wants_entropy = coefficients.entropy is not None
        self._module.dlogits(
            *self._tile(z, bias, spec, inv_temperature, ids, first_column),
            _share(statistics.max),
            _share(statistics.log_sum),
            _share(coefficients.probability),
            _share(coefficients.entropy),
            _share(statistics.entropy) if wants_entropy else None,
            _share(coefficients.picked_grad),
            torch.get_num_threads(),
        )

    @staticmethod
    def _tile(z, bias, spec, inv_temperature, ids, first_column):
        softcap = 0.0 if spec.softcap is None else float(spec.softcap)
        return _share(z), _share(bias), float(spec.scale), softcap, _share(inv_temperature), _share(ids), first_column
