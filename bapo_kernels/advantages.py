"""What goes into the loss: advantages from the rewards of a group, and the coefficient of an entropy bonus from a target."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bapo_kernels.checks import check_tensor, is_integer, is_number, is_whole, shape_of
from bapo_kernels.head.precision import accumulation_dtype

MODES = ("grpo", "dr_grpo", "rloo")


def group_advantages(
    rewards: Tensor,  # (B,)
    *,
    group_size: int | None = None,
    group_ids: Tensor | None = None,  # (B,)
    mode: str = "grpo",
) -> Tensor:
    """Advantages (B,) of rewards within groups, the answers to one prompt.

        grpo     (r - mean) / (std + 1e-6), std with ddof = 1     Shao et al. 2024, arXiv 2402.03300
        dr_grpo  r - mean                                         Liu et al. 2025, arXiv 2503.20783
        rloo     r - mean of the others                           Ahmadian et al. 2024, arXiv 2402.14740

    A group of one, and a group whose rewards are all equal, gets exactly 0 (a rounded mean would leave tokens with a gradient that
    have none). Groups are `group_size` consecutive rewards, or those of equal `group_ids`. fp32, or fp64 for fp64 rewards.
    """
    check_tensor("rewards", rewards, None)
    if rewards.dim() != 1:
        raise ValueError(f"rewards must have shape (B,), got {shape_of(rewards)}")
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if (group_size is None) == (group_ids is None):
        raise ValueError("give group_size or group_ids, one of them")
    count = rewards.shape[0]
    if group_size is not None:
        if not is_whole(group_size) or group_size < 1 or count % group_size:
            raise ValueError(f"group_size must be a whole number that divides the {count} rewards, got {group_size!r}")
        order = torch.arange(count, device=rewards.device)
        place, sizes = order // group_size, order.new_full((count // group_size,), group_size)
    else:
        assert group_ids is not None
        check_tensor("group_ids", group_ids, rewards.device)
        if group_ids.shape != rewards.shape or not is_integer(group_ids):
            got = f"{group_ids.dtype} {shape_of(group_ids)}"
            raise ValueError(f"group_ids must hold integers of shape {shape_of(rewards)}, as rewards, got {got}")
        order = group_ids.argsort(stable=True)
        _, place, sizes = torch.unique_consecutive(group_ids[order], return_inverse=True, return_counts=True)
    acc = accumulation_dtype(rewards)
    if count == 0:
        return rewards.detach().to(acc)

    r = rewards.detach().double()[order]

    def over_group(t: Tensor, reduce: str) -> Tensor:
        return torch.segment_reduce(t, reduce, lengths=sizes, unsafe=True)[place]

    n = sizes[place].double()
    deviation = r - over_group(r, "mean")
    if mode == "grpo":
        variance = over_group(deviation.square(), "sum") / (n - 1).clamp(min=1)
        deviation = deviation / (variance.sqrt() + 1e-6)
    elif mode == "rloo":
        deviation = deviation * n / (n - 1).clamp(min=1)
    highest = over_group(r, "max")
    same = (highest == over_group(r, "min")) & highest.isfinite()
    advantages = torch.empty_like(r)
    advantages[order] = torch.where(same, 0.0, deviation)
    return advantages.to(acc)


@dataclass
class TargetEntropy:
    """Coefficient of an entropy bonus that is on only while the entropy is below a target (Skywork-OR1, arXiv 2505.22312).

    Call `update` once for each training step with the mean entropy of the policy, and use what it returns as `entropy_coef`: the
    current coefficient c where entropy <= target, else 0. Then c rises by `step` if entropy < target, falls by it otherwise, and stays
    within [0, max_coef]. c starts at 0. `coef` is c, to be saved in a checkpoint.
    """

    target: float = 0.2
    step: float = 1e-4
    max_coef: float = 5e-3
    coef: float = 0.0

    def __post_init__(self):
        for name in ("target", "step", "max_coef", "coef"):
            value = getattr(self, name)
            if not is_number(value) or value < 0:
                raise ValueError(f"TargetEntropy({name}=...) must be a finite number >= 0, got {value!r}")
        if self.coef > self.max_coef:
            raise ValueError(f"TargetEntropy(coef=...) must be at most max_coef={self.max_coef}, got {self.coef!r}")

    def update(self, entropy: float | Tensor) -> float:
        """The coefficient for this step, as a number; a tensor is read on the host."""
        value = float(entropy)
        if value != value:
            raise ValueError("entropy must be a number, got NaN")
        now = self.coef if value <= self.target else 0.0
        moved = self.coef + (self.step if value < self.target else -self.step)
        self.coef = min(max(moved, 0.0), self.max_coef)
        return now
