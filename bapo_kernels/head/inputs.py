"""Validation of the head's arguments, before any work, and their flat form: one row for each token."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bapo_kernels.checks import (
    check_floating,
    check_ignore_index,
    check_mask,
    check_shape,
    check_tensor,
    fits_fp32,
    is_integer,
    is_number,
    is_whole,
    shape_of,
    values_are_checked,
)
from bapo_kernels.compiling import require
from bapo_kernels.head.chunked import LogitSpec, Weight
from bapo_kernels.head.precision import accumulation_dtype
from bapo_kernels.head.rows import Selection


@dataclass(frozen=True)
class Problem:
    """What is asked of the head, validated. It holds no tensor that may need a gradient: autograd saves and frees those."""

    layout: torch.Size
    selection: Selection  # n of the N rows: those that count
    ids: Tensor  # (n, P) int64: column 0 the target, then the recorded ids, -1 where padded
    topk: bool  # recorded ids were given, be it none
    inv_temperature: Tensor | None  # (n,)
    spec: LogitSpec
    dtype: torch.dtype  # of logits, statistics and outputs

    @cached_property
    def padding(self) -> Tensor | None:
        """(n, P) True at padded ids; None where only targets are wanted. A target of -1 is not padding: it is invalid, and its log-prob
        must not be a number."""
        if not self.topk:
            return None
        padding = self.ids == -1
        padding[:, 0].fill_(False)
        return padding


def head_problem(
    hidden: Tensor,
    weight: Weight,
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
) -> Problem:
    check_head_tensors(hidden, weight, bias)
    layout, device = hidden.shape[:-1], hidden.device
    like = f"hidden {shape_of(hidden)}"
    check_shape("targets", targets, tuple(layout), like, device)
    _check_ids_dtype("targets", targets)
    if mask is not None:
        check_mask(mask, tuple(layout), like, device)
    if topk_ids is not None:
        check_shape("topk_ids", topk_ids, (*layout, "K"), like, device)
        _check_ids_dtype("topk_ids", topk_ids)
    check_ignore_index(ignore_index)
    spec = logit_spec(weight, logit_scale, softcap, vocab_size)

    rows = targets.numel()
    flat_targets = targets.reshape(rows)
    wanted = flat_targets != ignore_index
    if mask is not None:
        wanted = wanted & (mask.reshape(rows) != 0)
    selection = Selection.of(wanted)
    # Copied, since the caller may reuse the buffer before the backward.
    ids = selection.take(flat_targets)[:, None].to(torch.int64, copy=True)
    if topk_ids is not None:
        ids = torch.cat([ids, selection.take(topk_ids.reshape(rows, topk_ids.shape[-1])).to(torch.int64)], dim=1)
    if values_are_checked(device):
        _check_id_range("targets", ids[:, :1], spec.vocab_size)
        if topk_ids is not None:
            _check_id_range("topk_ids", ids[:, 1:].masked_fill(ids[:, 1:] == -1, 0), spec.vocab_size)
    acc = accumulation_dtype(hidden, *weight.parts, bias)
    inv_temperature = inverse_temperature(temperature, layout, selection, acc, device)
    return Problem(layout, selection, ids.contiguous(), topk_ids is not None, inv_temperature, spec, acc)


def check_head_tensors(hidden: Tensor, weight: Weight, bias: Tensor | None, side: str = "") -> None:
    """`side` goes before the names: "rollout_" for the other head of a divergence."""
    h, w, b = f"{side}hidden", f"{side}weight", f"{side}bias"
    check_tensor(h, hidden, None)
    check_floating(h, hidden)
    if hidden.dim() < 1:
        raise ValueError(f"{h} must have shape (..., D), got a scalar")
    if not weight.parts:
        raise ValueError(f"{w} must be a tensor (V, D) or a tuple of tensors (V, D_i), got an empty one")
    for i, part in enumerate(weight.parts):
        name = w if len(weight.parts) == 1 else f"{w}[{i}]"
        check_tensor(name, part, hidden.device)
        check_floating(name, part)
        if part.dim() == 1 or (part.dim() == 2 and part.shape[0] == 0):
            shard = "is it a shard (ZeRO-3, FSDP)? Gather it before the call"
            raise ValueError(f"{name} has shape {shape_of(part)}, not (V, D): {shard}")
        if part.dim() != 2 or part.shape[0] != weight.parts[0].shape[0]:
            vocab = weight.parts[0].shape[0] if i else "V"
            raise ValueError(f"{name} must have shape ({vocab}, D), got {shape_of(part)}")
    vocab, width = weight.shape
    if width != hidden.shape[-1]:
        shapes = " and ".join(shape_of(p) for p in weight.parts)
        raise ValueError(f"{w} must have shape (V, {hidden.shape[-1]}) to go with {h} {shape_of(hidden)}, got {shapes}")
    if bias is not None:
        check_tensor(b, bias, hidden.device)
        check_floating(b, bias)
        if bias.shape != (vocab,):
            raise ValueError(f"{b} must have shape ({vocab},) to go with {w} ({vocab}, {width}), got {shape_of(bias)}")


def logit_spec(weight: Weight, logit_scale: float, softcap: float | None, vocab_size: int | None) -> LogitSpec:
    if not is_number(logit_scale):
        raise ValueError(f"logit_scale must be a finite number, got {logit_scale!r}")
    if softcap is not None and not (is_number(softcap) and softcap > 0):
        raise ValueError(f"softcap must be a number > 0 or None, got {softcap!r}")
    if vocab_size is None:
        vocab_size = weight.shape[0]
    if not is_whole(vocab_size) or not 1 <= vocab_size <= weight.shape[0]:
        raise ValueError(
            f"vocab_size must be an integer in [1, {weight.shape[0]}], the rows of weight {weight.shape}, got {vocab_size!r}"
        )
    return LogitSpec(int(vocab_size), float(logit_scale), None if softcap is None else float(softcap))


def inverse_temperature(
    temperature: float | Tensor, layout: torch.Size, selection: Selection, acc: torch.dtype, device: torch.device
) -> Tensor | None:
    if not isinstance(temperature, Tensor):
        if not is_number(temperature) or temperature <= 0 or not fits_fp32(1 / temperature):
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
    taken = selection.take(temperature.detach().reshape(-1), fill=1).to(acc)
    if values_are_checked(device):
        require(taken > 0, taken, "temperature must be > 0 in every active row, got {}")
    return taken.reciprocal()


def _check_ids_dtype(name: str, t: Tensor) -> None:
    if not is_integer(t):
        raise ValueError(f"{name} must hold integer vocabulary ids, got {t.dtype}")


def _check_id_range(name: str, ids: Tensor, vocab_size: int) -> None:
    valid = (ids >= 0) & (ids < vocab_size)
    require(valid, ids, f"{name} must lie in [0, {vocab_size}) in every active row, got {{}}")
