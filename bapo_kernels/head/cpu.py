"""Binding of the compiled epilogues (csrc/): one pass in C++ over a tile that a GEMM just wrote, rows in parallel."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from bapo_kernels.head.chunked import Coefficients, LogitSpec, State, Statistics


@lru_cache(maxsize=1)
def _load():
    """The extension module, or the reason why there is none. torch is imported first, so both share its OpenMP runtime."""
    try:
        from bapo_kernels import _epilogues
    except (ImportError, ValueError) as error:  # ValueError: BAPO_KERNELS_ISA names what this machine does not have
        return None, f"the compiled CPU epilogues cannot be loaded ({error}); reinstall bapo-kernels with a C++17 compiler at hand"
    return _epilogues, None


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
        return (_share(z), _share(bias), spec.scale, spec.softcap or 0.0, _share(inv_temperature), _share(ids), first_column)
