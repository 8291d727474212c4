"""The Triton backend of the head: fused tiles, so that the forward never writes a logit."""

from contextlib import nullcontext
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from bapo_kernels.head.chunked import Coefficients, LogitSpec, Rows, Slice, State, Statistics
from bapo_kernels.head.eager import logit_slope
from bapo_kernels.head.triton.configs import Config, find_config
from bapo_kernels.head.triton.dlogits import dlogits_tile
from bapo_kernels.head.triton.fold import fold_tile
from bapo_kernels.head.triton.gather import gather_logits
from bapo_kernels.head.triton.merge import merge_partials
from bapo_kernels.head.triton.scatter import scatter_grad

INTERPRETED = not isinstance(fold_tile, triton.JITFunction)  # TRITON_INTERPRET=1 was set when the kernels were defined

_DOT_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_DTYPE_CLASSES = {torch.float64: "double", torch.float32: "float", torch.bfloat16: "half", torch.float16: "half"}


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


@cache
def chip_family(device: torch.device) -> str:
    if INTERPRETED:
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx9"
    major = torch.cuda.get_device_capability(device)[0]
    return {8: "sm80", 9: "sm90", 10: "sm100"}.get(major, "sm120")


class TritonBackend:
    name = "triton"
    native_dtypes = True
    tiles = (0, 1)

    def __init__(self, configs: dict[str, Config] | None = None):
        """`configs` replaces entries of the table, by the name of the kernel."""
        self.configs = configs or {}

    def fold(self, rows: Rows, part: Slice, spec: LogitSpec, state: State, tile: Tensor | None = None) -> None:
        (n, ids), w = (rows.ids.shape, part.weight.shape[0])
        for name in ("max", "sum", "spread"):
            statistic = getattr(state, name)
            assert statistic is None or statistic.is_contiguous(), f"state.{name} is written as a contiguous vector"
        if n == 0:
            return
        with _on(rows.hidden.device):
            config = self._config("fold_tile", rows, part, spec)
            tiles = triton.cdiv(w, config.blocks["BV"])
            partials = state.max.new_empty(2 if state.spread is None else 3, tiles, n)
            part_max, part_sum, part_spread = partials if state.spread is not None else (*partials, None)
            fold_tile[(triton.cdiv(n, config.blocks["BN"]) * tiles,)](
                rows.hidden,
                part.weight,
                _vector(part.bias),
                _vector(rows.inv_temperature),
                rows.ids,
                state.picked,
                part_max,
                part_sum,
                part_spread,
                *(n, w, rows.hidden.shape[1], part.first),
                *_scalars(spec, state.max.dtype),
                *(*rows.hidden.stride(), *part.weight.stride(), rows.ids.stride(0), state.picked.stride(0)),
                **_tile_options(rows, part, config),
            )
            config = self._config("merge_partials", rows, part, spec)
            merge_partials[(triton.cdiv(n, config.blocks["BN"]),)](
                *(part_max, part_sum, part_spread),
                *(state.max, state.sum, state.spread),
                *(n, tiles),
                **kernel_options(config),
            )
            if ids > 1:
                config = self._config("gather_logits", rows, part, spec)
                gather_logits[(n * triton.cdiv(ids - 1, config.blocks["BK"]),)](
                    rows.hidden,
                    part.weight,
                    _vector(part.bias),
                    _vector(rows.inv_temperature),
                    rows.ids,
                    state.picked,
                    *(w, rows.hidden.shape[1], ids, part.first),
                    *_scalars(spec, state.max.dtype),
                    *(*rows.hidden.stride(), *part.weight.stride(), *rows.ids.stride(), *state.picked.stride()),
                    **kernel_options(config),
                )

    def dlogits(
        self, rows: Rows, part: Slice, spec: LogitSpec, stats: Statistics, coef: Coefficients, out: Tensor
    ) -> None:
        (n, ids), w = (rows.ids.shape, part.weight.shape[0])
        assert out.stride(1) == 1, "out is written by rows"
        if n == 0:
            return
        with _on(rows.hidden.device):
            config = self._config("dlogits_tile", rows, part, spec)
            dlogits_tile[(triton.cdiv(n, config.blocks["BN"]) * triton.cdiv(w, config.blocks["BV"]),)](
                rows.hidden,
                part.weight,
                _vector(part.bias),
                _vector(rows.inv_temperature),
                rows.ids,
                _vector(stats.max),
                _vector(stats.log_sum),
                None if coef.entropy is None else _vector(stats.entropy),
                _vector(coef.probability),
                _vector(coef.entropy),
                coef.picked,
                out,
                *(n, w, rows.hidden.shape[1], part.first),
                *_scalars(spec, out.dtype),
                *(
                    *rows.hidden.stride(),
                    *part.weight.stride(),
                    rows.ids.stride(0),
                    coef.picked.stride(0),
                    out.stride(0),
                ),
                **_tile_options(rows, part, config),
            )
            if ids > 1:
                config = self._config("scatter_grad", rows, part, spec)
                slope = logit_slope(stats.picked, spec, rows.inv_temperature)
                picked_grad = coef.picked if slope is None else coef.picked * slope
                scatter_grad[(n * triton.cdiv(ids - 1, config.blocks["BK"]),)](
                    rows.ids,
                    picked_grad,
                    out,
                    *(w, ids, part.first),
                    *(*rows.ids.stride(), *picked_grad.stride(), out.stride(0)),
                    **kernel_options(config),
                )

    def _config(self, kernel: str, rows: Rows, part: Slice, spec: LogitSpec) -> Config:
        if kernel in self.configs:
            return self.configs[kernel]
        present = {
            "bias": part.bias,
            "scale": None if spec.scale == 1.0 else spec.scale,
            "softcap": spec.softcap,
            "temperature": rows.inv_temperature,
            "ragged": rows.hidden.shape[1] % 16 or None,
        }
        features = frozenset(name for name, value in present.items() if value is not None)
        return find_config(kernel, chip_family(rows.hidden.device), _DTYPE_CLASSES[_common_dtype(rows, part)], features)


def _on(device: torch.device):
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _common_dtype(rows: Rows, part: Slice) -> torch.dtype:
    """What a product is multiplied in: the operands' own dtype; fp32 (or fp64) where they differ, which holds both exactly."""
    hidden, weight = rows.hidden.dtype, part.weight.dtype
    if hidden == weight:
        return hidden
    return torch.float64 if torch.float64 in (hidden, weight) else torch.float32


def _vector(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _scalars(spec: LogitSpec, acc: torch.dtype):
    """Scale and softcap: fp32 at run time. In fp64 a compile-time constant, since a Python float reaches a kernel as fp32."""
    scalars = (None if spec.scale == 1.0 else float(spec.scale), None if spec.softcap is None else float(spec.softcap))
    if acc == torch.float64:
        return tuple(None if s is None else tl.constexpr(s) for s in scalars)
    return scalars


def kernel_options(config: Config) -> dict:
    # Without fusion a multiply rounds before the addition after it, so that sum, maximum and picked logit see the same logit and
    # the backward, another program around the same arithmetic, makes the same bits.
    return config.blocks | {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": False}


def _tile_options(rows: Rows, part: Slice, config: Config) -> dict:
    dot = _common_dtype(rows, part)
    if INTERPRETED and dot == torch.bfloat16:  # the interpreter multiplies bf16 bit patterns as if they were numbers
        dot = torch.float32
    return kernel_options(config) | {
        "DOT": _DOT_DTYPES[dot],
        "EVEN_D": rows.hidden.shape[1] % config.blocks["BD"] == 0,
        "EVEN_W": part.weight.shape[0] % config.blocks["BV"] == 0,
    }
