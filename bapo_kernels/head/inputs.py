"""Validation of the head's arguments, before any work, and their flat form: one row for each token."""

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from bapo_kernels.head.chunked import LogitSpec, accumulation_dtype
from bapo_kernels.head.rows import Selection
from bapo_kernels.layout import check_tensor, is_integer, shape_of, values_are_checked


@dataclass(frozen=True)
class HeadInputs:
    """Flat and validated. `ids` and `inv_temperature` hold only the selected rows."""

    layout: torch.Size
    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    selection: Selection  # n of the N rows: those that count
    ids: Tensor  # (n, 1 + K) int64, column 0 the target
    inv_temperature: Tensor | None  # (n,)
    spec: LogitSpec

    @property
    def dtype(self) -> torch.dtype:
        return accumulation_dtype(self.hidden, self.weight, self.bias)


def head_inputs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    mask: Tensor | None,
    ignore_index: int,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    vocab_size: int | None,
    topk_ids: Tensor | None,
) -> HeadInputs:
    check_head_tensors(hidden, weight, bias)
    layout, device = hidden.shape[:-1], hidden.device
    _check_layout("targets", targets, tuple(layout), hidden)
    _check_ids_dtype("targets", targets)
    if mask is not None:
        _check_layout("mask", mask, tuple(layout), hidden)
    if topk_ids is not None:
        check_tensor("topk_ids", topk_ids, device)
        _check_layout("topk_ids", topk_ids, (*layout, topk_ids.shape[-1] if topk_ids.dim() else "K"), hidden)
        _check_ids_dtype("topk_ids", topk_ids)
    spec = logit_spec(weight, logit_scale, softcap, vocab_size)

    rows = layout.numel()
    flat_targets = targets.reshape(rows)
    wanted = flat_targets != ignore_index
    if mask is not None:
        wanted = wanted & (mask.reshape(rows) != 0)
    selection = Selection.of(wanted)
    ids = selection.take(flat_targets)[:, None].to(torch.int64)
    if topk_ids is not None:
        ids = torch.cat([ids, selection.take(topk_ids.reshape(rows, topk_ids.shape[-1])).to(torch.int64)], dim=1)
    if values_are_checked(device):
        _check_id_range("targets", ids[:, :1], spec.vocab_size)
        _check_id_range("topk_ids", ids[:, 1:].masked_fill(ids[:, 1:] == -1, 0), spec.vocab_size)
    ids = ids.contiguous()
    acc = accumulation_dtype(hidden, weight, bias)
    inv_temperature = _inverse_temperature(temperature, layout, selection, acc, device)
    return HeadInputs(
        layout, hidden.reshape(rows, hidden.shape[-1]), weight, bias, selection, ids, inv_temperature, spec
    )


def check_head_tensors(hidden: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "") -> None:
    """`prefix` names the side: "" or "rollout_"."""
    h, w, b = f"{prefix}hidden", f"{prefix}weight", f"{prefix}bias"
    check_tensor(h, hidden, None)
    for name, t in ((h, hidden), (w, weight), (b, bias)):
        if t is None and name == b:
            continue
        check_tensor(name, t, hidden.device)
        assert t is not None
        if not t.dtype.is_floating_point:
            raise ValueError(f"{name} must be floating point, got {t.dtype}")
    if hidden.dim() < 1:
        raise ValueError(f"{h} must have shape (..., D), got a scalar")
    if weight.dim() == 1 or (weight.dim() == 2 and weight.shape[0] == 0):
        raise ValueError(
            f"{w} has shape {shape_of(weight)}, not (V, D): is it a shard (ZeRO-3, FSDP)? Gather it before the call"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{w} must have shape (V, {hidden.shape[-1]}) to go with {h} {shape_of(hidden)}, got {shape_of(weight)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{b} must have shape ({weight.shape[0]},) to go with {w} {shape_of(weight)}, got {shape_of(bias)}"
        )


def logit_spec(weight: Tensor, logit_scale: float, softcap: float | None, vocab_size: int | None) -> LogitSpec:
    if not isinstance(logit_scale, Real) or not math.isfinite(logit_scale):
        raise ValueError(f"logit_scale must be a finite number, got {logit_scale!r}")
    if softcap is not None and not (isinstance(softcap, Real) and 0 < softcap < math.inf):
        raise ValueError(f"softcap must be a number > 0 or None, got {softcap!r}")
    if vocab_size is None:
        vocab_size = weight.shape[0]
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or not 1 <= vocab_size <= weight.shape[0]:
        raise ValueError(
            f"vocab_size must be an integer in [1, {weight.shape[0]}], the rows of weight {shape_of(weight)}, got {vocab_size!r}"
        )
    return LogitSpec(vocab_size, float(logit_scale), None if softcap is None else float(softcap))


def _inverse_temperature(
    temperature: float | Tensor, layout: torch.Size, selection: Selection, acc: torch.dtype, device: torch.device
) -> Tensor | None:
    if not isinstance(temperature, Tensor):
        if isinstance(temperature, bool) or not isinstance(temperature, Real) or not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be a number > 0 or a tensor of them, got {temperature!r}")
        return (
            None
            if temperature == 1
            else torch.full((selection.rows,), 1.0 / float(temperature), dtype=acc, device=device)
        )
    check_tensor("temperature", temperature, device)
    per_sequence = [layout[:1], torch.Size((*layout[:1], 1))] if len(layout) == 2 else []
    if temperature.shape != layout:
        if temperature.shape not in per_sequence:
            allowed = " or ".join(str(tuple(s)) for s in [layout, *per_sequence])
            raise ValueError(f"temperature must be a number or have shape {allowed}, got {shape_of(temperature)}")
        temperature = temperature.reshape(-1, 1).expand(layout)
    taken = selection.take(temperature.detach().reshape(layout.numel()), fill=1).to(acc)
    if values_are_checked(device) and not bool((taken > 0).all()):
        raise ValueError(f"temperature must be > 0 in every active row, got {float(taken.min())}")
    return taken.reciprocal()


def _check_layout(name: str, t: Tensor, shape: tuple, hidden: Tensor) -> None:
    check_tensor(name, t, hidden.device)
    if tuple(t.shape) != shape:
        want = "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
        raise ValueError(f"{name} must have shape {want} to go with hidden {shape_of(hidden)}, got {shape_of(t)}")


def _check_ids_dtype(name: str, t: Tensor) -> None:
    if not is_integer(t):
        raise ValueError(f"{name} must hold integer vocabulary ids, got {t.dtype}")


def _check_id_range(name: str, ids: Tensor, vocab_size: int) -> None:
    if ids.numel() == 0:
        return
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ValueError(f"{name} must lie in [0, {vocab_size}) in every active row, got {bad}")
