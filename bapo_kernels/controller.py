"""BAPO's bounds (arXiv 2510.18927, Eq. 8 and Algorithm 1), without a loop over tokens or over candidates on the host.

    S+(c_high) = sum_{A > 0} w |A| min(r, c_high)        S-(c_low) = sum_{A < 0} w |A| max(r, c_low)

The search walks one path: c_high over its grid with c_low at its start, then c_low over its grid with c_high at its end (or the other
way round), and stops at the first point whose contribution reaches the target. So it is enough to know S+ on the grid of c_high and
S- on the grid of c_low: one pass over the tokens, one all-reduce, and one pick on the device.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from bapo_kernels.compiling import group_named, is_traced

if TYPE_CHECKING:
    from bapo_kernels.losses.bapo import BAPO
    from bapo_kernels.losses.base import Tokens

CONTRIBUTIONS = ("share", "signed", "ratio")
MEASURES = ("surrogate", "gradient")
WEIGHTINGS = ("rollout", "none")
ORDERS = ("high-first", "low-first")
MAX_STEPS = 1000  # of one bound: the sums hold a value for each token and step


class BapoBounds(NamedTuple):
    """0-d fp64 tensors on the batch's device."""

    c_low: Tensor
    c_high: Tensor
    contribution: Tensor  # at these bounds
    positive: Tensor  # S+ at these bounds
    negative: Tensor  # S-


def find_bounds(loss: "BAPO", x: "Tokens") -> BapoBounds:
    """The bounds of the batch `x`; of the global batch when x.dp_group is given. Sums in fp64, so that chunking cannot show."""
    with torch.no_grad():
        ratio, advantage = x.ratio.double().flatten(), x.advantages.double().flatten()
        weight = advantage.abs()
        if loss.weighting == "rollout":
            weight = weight * x.rollout_logprobs.double().flatten().exp()
        high = _grid(loss.c_high, loss.step_high, ratio.device)
        low = _grid(loss.c_low, loss.step_low, ratio.device)
        r = ratio[:, None]
        if loss.measure == "surrogate":
            positive, negative = torch.minimum(r, high), torch.maximum(r, low)
        else:
            positive, negative = torch.where(r <= high, r, 0.0), torch.where(r >= low, r, 0.0)
        # Not <= 0, rather than > 0: an advantage of NaN is in both sums, and shows.
        active = x.mask.flatten()
        s_plus = torch.where(active & ~(advantage <= 0), weight, 0.0) @ positive
        s_minus = torch.where(active & ~(advantage >= 0), weight, 0.0) @ negative
        if x.dp_group is not None:
            sums = _over_ranks(torch.cat([s_plus, s_minus]), x.dp_group)
            s_plus, s_minus = sums.split([high.numel(), low.numel()])

        uppers, lowers = torch.stack([high, s_plus]), torch.stack([low, s_minus])
        if loss.order == "high-first":
            uppers, lowers = _path(uppers, lowers)
        else:
            lowers, uppers = _path(lowers, uppers)
        contribution = _contribution(loss.contribution, uppers[1], lowers[1])
        # Points before the first that reaches the target; the last, if none does.
        missed = (contribution[:-1] < loss.target).to(torch.int64).cumprod(0).sum()
        both = (uppers[1, 0] != 0) & (lowers[1, 0] != 0)
        # An index of one element, not of none: indexing by a 0-d tensor would read it on the host.
        at = (missed * both).reshape(1)
        c_high, positive, c_low, negative, contribution = (
            torch.cat([uppers, lowers, contribution[None]])[:, at].squeeze(1).unbind()
        )
        return BapoBounds(c_low, c_high, contribution, positive, negative)


def _over_ranks(sums: Tensor, group) -> Tensor:
    if is_traced(sums):
        return torch.ops.bapo_kernels.sum_over_ranks(sums, group.group_name)
    torch.distributed.all_reduce(sums, group=group)
    return sums


@torch.library.custom_op("bapo_kernels::sum_over_ranks", mutates_args=())
def _sum_over_ranks(sums: Tensor, group: str) -> Tensor:
    return _over_ranks(sums.clone(), group_named(group))


_sum_over_ranks.register_fake(lambda sums, group: torch.empty_like(sums))


def _path(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Values (..., n) on two grids, along the path that walks the first with the second at its start, then the second."""
    m, n = first.shape[-1], second.shape[-1]
    rest, start = first[..., -1:].expand(-1, n - 1), second[..., :1].expand(-1, m - 1)
    return torch.cat([first, rest], -1), torch.cat([start, second], -1)


def _grid(bounds: tuple[float | Tensor, float | Tensor], step: float, device: torch.device) -> Tensor:
    """start, start + step, ... up to and including end. Points are start + i * step: adding up would drift past the end."""
    start, end = bounds
    if start is end and isinstance(start, Tensor):
        return start.to(device=device, dtype=torch.float64).reshape(1)
    assert not isinstance(start, Tensor) and not isinstance(end, Tensor)
    points = start + step * torch.arange(grid_size(bounds, step), dtype=torch.float64, device=device)
    return torch.where(points > end - 1e-9, float(end), points)  # 0.6 + 15 * 0.02 is a hair less than 0.9


def grid_size(bounds: tuple[float | Tensor, float | Tensor], step: float) -> int:
    start, end = bounds
    return 1 if start is end else int((end - start) / step + 1e-9) + 1


def _contribution(kind: str, positive: Tensor, negative: Tensor) -> Tensor:
    total = positive + negative
    divisor = {"share": total, "signed": (positive - negative).abs(), "ratio": negative}[kind]
    return torch.where(total == 0, 0.0, positive / divisor)
