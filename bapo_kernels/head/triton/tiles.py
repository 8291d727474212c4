"""The fused tile kernels ("tile" design): products and epilogue in one, so that the forward never writes a logit."""

from collections.abc import Callable, Iterable

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bapo_kernels.head.chunked import Coefficients, LogitSpec, Rows, Slice, State, Statistics, dz_dtype
from bapo_kernels.head.products import operand_dtype
from bapo_kernels.head.triton.arguments import config_for, scalars
from bapo_kernels.head.triton.dlogits_tile import dlogits_tile
from bapo_kernels.head.triton.epilogues import add_recorded
from bapo_kernels.head.triton.fold_tile import fold_tile
from bapo_kernels.head.triton.gather_logits import gather_logits
from bapo_kernels.head.triton.merge_partials import merge_partials
from bapo_kernels.head.triton.tuning import tuned
from bapo_kernels.launching import Config, chip_family, on


class TileBackend:
    name = "triton"
    tiles = (0, 1)
    gpu = True
    keeps = False

    def __init__(self, design: str = "", *, configs: dict[str, Config] | None = None, descriptors: bool | None = None):
        """`configs` replaces entries of the table, by the name of the kernel. `descriptors`: whether blocks of hidden and weight are copied
        by tensor descriptors (TMA); None: on chips where that pays."""
        self.design, self.configs, self.descriptors = design, configs or {}, descriptors

    def operand(self, acc: torch.dtype, hidden: torch.dtype, weight: Iterable[torch.dtype]) -> torch.dtype:
        return operand_dtype(True, acc, hidden, weight)

    def fold(self, rows: Rows, part: Slice, spec: LogitSpec, state: State, tile: Tensor | None = None) -> None:
        (n, ids), (w, d) = rows.ids.shape, part.weight.shape
        if n == 0:
            return
        logit = part.bias, rows.inv_temperature, rows.ids, state.picked

        def launch(config: Config) -> Tensor:
            tiles = triton.cdiv(w, config.blocks["BV"])
            partials = state.max.new_empty(2 if state.spread is None else 3, tiles, n)
            fold_tile[(triton.cdiv(n, config.blocks["BN"]) * tiles,)](
                *(*self._operands(rows, part, config), *logit, *_three(partials)),
                *(n, w, d, ids, part.first, *scalars(spec, state.max.dtype)),
                *(*rows.hidden.stride(), *part.weight.stride()),
                **self._options(rows, part, config),
            )
            return partials

        with on(rows.hidden.device):
            partials = launch(self._config("fold_tile", rows, part, spec, launch))
            config = self._config("merge_partials", rows, part, spec)
            merge_partials[(triton.cdiv(n, config.blocks["BN"]),)](
                *(*_three(partials), state.max, state.sum, state.spread, n, partials.shape[1]), **config.options
            )
            if ids > 1:
                config = self._config("gather_logits", rows, part, spec)
                gather_logits[(n * triton.cdiv(ids - 1, config.blocks["BK"]),)](
                    *(rows.hidden, part.weight, *logit, w, d, ids, part.first, *scalars(spec, state.max.dtype)),
                    *(*rows.hidden.stride(), *part.weight.stride()),
                    **config.options,
                )

    def dlogits(
        self, rows: Rows, part: Slice, spec: LogitSpec, stats: Statistics, coef: Coefficients, tile: Tensor
    ) -> Tensor:
        (n, ids), (w, d) = rows.ids.shape, part.weight.shape
        dtype = dz_dtype(rows, part, tile.dtype)
        out = tile if dtype == tile.dtype else tile.view(-1).view(dtype)[: n * w].view(n, w)
        if n == 0:
            return out

        def launch(config: Config) -> None:
            dlogits_tile[(triton.cdiv(n, config.blocks["BN"]) * triton.cdiv(w, config.blocks["BV"]),)](
                *(*self._operands(rows, part, config), part.bias, rows.inv_temperature, rows.ids),
                *(stats.max, stats.log_sum, None if coef.entropy is None else stats.entropy),
                *(coef.probability, coef.entropy, coef.picked, out),
                *(n, w, d, ids, part.first, *scalars(spec, stats.max.dtype)),
                *(*rows.hidden.stride(), *part.weight.stride(), out.stride(0)),
                **self._options(rows, part, config),
            )

        with on(rows.hidden.device):
            launch(self._config("dlogits_tile", rows, part, spec, launch))
        if ids > 1:
            add_recorded(out, rows, part, spec, stats, coef, self.configs)
        return out

    def _config(
        self, kernel: str, rows: Rows, part: Slice, spec: LogitSpec, launch: Callable[[Config], object] | None = None
    ) -> Config:
        if kernel in self.configs:
            return self.configs[kernel]
        config = config_for(kernel, rows, part, spec, self._by_descriptors(rows, part))
        return config if launch is None else tuned(kernel, config, rows, part, spec, launch)

    def _by_descriptors(self, rows: Rows, part: Slice) -> bool:
        wanted = self.descriptors
        if wanted is None:
            wanted = chip_family(rows.hidden.device) in ("sm90", "sm100") and rows.hidden.itemsize == 2
        return wanted and all(map(_fits_descriptor, (rows.hidden, part.weight)))

    def _operands(self, rows: Rows, part: Slice, config: Config):
        if not self._by_descriptors(rows, part):
            return rows.hidden, part.weight
        blocks = config.blocks
        return (
            TensorDescriptor.from_tensor(rows.hidden, [blocks["BN"], blocks["BD"]]),
            TensorDescriptor.from_tensor(part.weight, [blocks["BV"], blocks["BD"]]),
        )

    def _options(self, rows: Rows, part: Slice, config: Config) -> dict:
        return config.options | {
            "TMA": self._by_descriptors(rows, part),
            "EVEN_D": rows.hidden.shape[1] % config.blocks["BD"] == 0,
            "EVEN_W": part.weight.shape[0] % config.blocks["BV"] == 0,
        }


def _three(partials: Tensor) -> tuple[Tensor | None, ...]:
    """Maxima, sums and spreads; None for spreads that are not there."""
    return (*partials, *(None,) * (3 - partials.shape[0]))


def _fits_descriptor(t: Tensor) -> bool:
    """The hardware wants rows of adjacent numbers that begin at multiples of 16 bytes."""
    return t.stride(1) == 1 and t.stride(0) * t.itemsize % 16 == 0 and t.data_ptr() % 16 == 0
