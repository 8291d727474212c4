"""The epilogues of the vendor's products in Triton ("gemm" design): each reads a tile of products once."""

import triton
from torch import Tensor

from bapo_kernels.head.chunked import Coefficients, LogitSpec, Rows, Slice, State, Statistics
from bapo_kernels.head.eager import logit_slope
from bapo_kernels.head.triton.arguments import config_for, scalars
from bapo_kernels.head.triton.dlogits_rows import dlogits_rows
from bapo_kernels.head.triton.fold_rows import fold_rows
from bapo_kernels.head.triton.scatter_grad import scatter_grad
from bapo_kernels.launching import Config, on


class TritonEpilogues:
    name = "triton"
    tiles = (1, 2)

    def __init__(self, configs: dict[str, Config] | None = None):
        """`configs` replaces entries of the table, by the name of the kernel."""
        self.configs = configs or {}

    def fold(self, z: Tensor, rows: Rows, part: Slice, spec: LogitSpec, state: State) -> None:
        n, w = z.shape
        if n == 0:
            return
        config = self.configs.get("fold_rows") or config_for("fold_rows", rows, part, spec)
        with on(z.device):
            fold_rows[(triton.cdiv(n, config.blocks["BN"]),)](
                *(z, part.bias, rows.inv_temperature, rows.ids, state.max, state.sum, state.spread, state.picked),
                *(n, w, rows.ids.shape[1], part.first, *scalars(spec, z.dtype), z.stride(0)),
                **config.options,
            )

    def dlogits(
        self, z: Tensor, rows: Rows, part: Slice, spec: LogitSpec, stats: Statistics, coef: Coefficients, out: Tensor
    ) -> None:
        (n, w), ids = z.shape, rows.ids.shape[1]
        if n == 0:
            return
        config = self.configs.get("dlogits_rows") or config_for("dlogits_rows", rows, part, spec)
        with on(z.device):
            dlogits_rows[(triton.cdiv(n, config.blocks["BN"]) * triton.cdiv(w, config.blocks["BV"]),)](
                *(z, part.bias, rows.inv_temperature, rows.ids if ids else None),
                *(stats.max, stats.log_sum, None if coef.entropy is None else stats.entropy),
                *(coef.probability, coef.entropy, coef.picked if ids else None, out),
                *(n, w, ids, part.first, *scalars(spec, z.dtype), z.stride(0), out.stride(0)),
                **config.options,
            )
        if ids > 1:
            add_recorded(out, rows, part, spec, stats, coef, self.configs)


def add_recorded(
    out: Tensor,
    rows: Rows,
    part: Slice,
    spec: LogitSpec,
    stats: Statistics,
    coef: Coefficients,
    configs: dict[str, Config],
) -> None:
    """Add what the recorded ids, those after the target, give to the gradient `out` of a tile of products."""
    (n, w), ids = out.shape, rows.ids.shape[1]
    config = configs.get("scatter_grad") or config_for("scatter_grad", rows, part, spec)
    slope = logit_slope(stats.picked, spec, rows.inv_temperature)
    picked_grad = coef.picked if slope is None else coef.picked * slope
    with on(out.device):
        scatter_grad[(n * triton.cdiv(ids - 1, config.blocks["BK"]),)](
            *(rows.ids, picked_grad, out, w, ids, part.first, out.stride(0)), **config.options
        )
