"""The epilogues of the vendor's products in Triton ("gemm" design): each reads a tile of fp32 products once."""

import triton
from torch import Tensor

from bapo_kernels.head.chunked import Coefficients, LogitSpec, Rows, Slice, State, Statistics
from bapo_kernels.head.eager import logit_slope
from bapo_kernels.head.triton.arguments import config_for, scalars, vector
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
        (n, w), ids = z.shape, rows.ids
        check_state(state)
        if n == 0:
            return
        config = self.configs.get("fold_rows") or config_for("fold_rows", rows, part, spec)
        with on(z.device):
            fold_rows[(triton.cdiv(n, config.blocks["BN"]),)](
                *(z, vector(part.bias), vector(rows.inv_temperature), ids),
                *(state.max, state.sum, state.spread, state.picked),
                *(n, w, ids.shape[1], part.first, *scalars(spec, z.dtype)),
                *(z.stride(0), *ids.stride(), *state.picked.stride()),
                **config.options,
            )

    def dlogits(
        self, z: Tensor, rows: Rows, part: Slice, spec: LogitSpec, stats: Statistics, coef: Coefficients, out: Tensor
    ) -> None:
        (n, w), ids = z.shape, rows.ids
        if n == 0:
            return
        targets = ids if ids.shape[1] else None
        # What recorded ids add is added before the one rounding.
        first_out = z if ids.shape[1] > 1 else out
        config = self.configs.get("dlogits_rows") or config_for("dlogits_rows", rows, part, spec)
        with on(z.device):
            dlogits_rows[(triton.cdiv(n, config.blocks["BN"]) * triton.cdiv(w, config.blocks["BV"]),)](
                *(z, vector(part.bias), vector(rows.inv_temperature), targets),
                *(vector(stats.max), vector(stats.log_sum), None if coef.entropy is None else vector(stats.entropy)),
                *(vector(coef.probability), vector(coef.entropy), None if targets is None else coef.picked),
                *(first_out, n, w, part.first, *scalars(spec, z.dtype)),
                *(z.stride(0), ids.stride(0), coef.picked.stride(0), first_out.stride(0)),
                **config.options,
            )
        if ids.shape[1] > 1:
            add_recorded(first_out, rows, part, spec, stats, coef, self.configs.get("scatter_grad"))
        if first_out is not out:
            out.copy_(first_out)


def check_state(state: State) -> None:
    for name in ("max", "sum", "spread"):
        statistic = getattr(state, name)
        assert statistic is None or statistic.is_contiguous(), f"state.{name} is written as a contiguous vector"


def add_recorded(
    out: Tensor,
    rows: Rows,
    part: Slice,
    spec: LogitSpec,
    stats: Statistics,
    coef: Coefficients,
    config: Config | None = None,
) -> None:
    """Add what the recorded ids, those after the target, give to the gradient `out` of a tile of products."""
    (n, w), ids = out.shape, rows.ids.shape[1]
    config = config or config_for("scatter_grad", rows, part, spec)
    slope = logit_slope(stats.picked, spec, rows.inv_temperature)
    picked_grad = coef.picked if slope is None else coef.picked * slope
    with on(out.device):
        scatter_grad[(n * triton.cdiv(ids - 1, config.blocks["BK"]),)](
            *(rows.ids, picked_grad, out, w, ids, part.first),
            *(*rows.ids.stride(), *picked_grad.stride(), out.stride(0)),
            **config.options,
        )
