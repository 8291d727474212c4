"""Log-probs that the sampler recorded at its most likely ids, beside the policy's at the same ids."""

import torch
from torch import Tensor

from bapo_kernels.checks import check_floating, check_shape, is_integer, shape_of, values_are_checked
from bapo_kernels.compiling import require
from bapo_kernels.layout import Layout
from bapo_kernels.losses.base import Topk


def check_topk(ids: Tensor, rollout_logprobs: Tensor, active: Tensor, layout: Layout) -> None:
    """Shapes and dtypes; on CPU also that no id comes twice in a row that counts."""
    device = active.device
    check_shape("rollout_topk_ids", ids, (*layout.shape, "K"), f"the batch {tuple(layout.shape)}", device)
    if not is_integer(ids):
        raise ValueError(f"rollout_topk_ids must hold integer vocabulary ids, got {ids.dtype}")
    check_shape(
        "rollout_topk_logprobs", rollout_logprobs, tuple(ids.shape), f"rollout_topk_ids {shape_of(ids)}", device
    )
    check_floating("rollout_topk_logprobs", rollout_logprobs)
    if values_are_checked(device):
        ignored = (~active)[..., None]
        require((ids >= -1) | ignored, ids, "rollout_topk_ids must hold vocabulary ids, or -1 for padding, got {}")
        once = ~_repeated(ids) | (ids == -1) | ignored
        require(once, ids, "rollout_topk_ids must hold each id once per token (-1 is padding), got {} twice")


def make_topk(logprobs: Tensor, ids: Tensor, rollout_logprobs: Tensor, active: Tensor) -> Topk:
    """Clean values for a rule: what does not count (masked, padding, a repetition) has weight 0, whatever it holds."""
    valid = active[..., None] & (ids != -1) & ~_repeated(ids)
    return Topk(
        logprobs=torch.where(valid, logprobs, 0.0),
        rollout_logprobs=torch.where(valid, rollout_logprobs.detach().to(logprobs.dtype), -torch.inf),
        valid=valid,
    )


def _repeated(ids: Tensor) -> Tensor:
    """True where the same id stands earlier in the row."""
    values, order = ids.sort(dim=-1, stable=True)
    again = torch.zeros_like(values, dtype=torch.bool)
    again[..., 1:] = values[..., 1:] == values[..., :-1]
    return torch.zeros_like(again).scatter(-1, order, again)
