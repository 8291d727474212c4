"""Which losses the kernel serves, with which parameters, and its launch."""

import math
import struct
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from bapo_kernels import controller
from bapo_kernels.head.autograd import refuse_second_derivatives
from bapo_kernels.launching import INTERPRETED, find_config, on
from bapo_kernels.losses.bapo import BAPO
from bapo_kernels.losses.base import Loss, Tokens
from bapo_kernels.losses.clip import DCPO, GRPO
from bapo_kernels.losses.sequence import TOPR
from bapo_kernels.losses.triton import FusedTerm
from bapo_kernels.losses.triton.bounds import bapo_pick, bapo_sums
from bapo_kernels.losses.triton.rules import fold_means, token_losses
from bapo_kernels.losses.weighted import BPO, CISPO, DPPO, DRO, SAPO, Reinforce

# As `fold_means` writes them.
MEANS = ("ratio_mean", "ratio_max", "approx_kl", "clip_frac_low", "clip_frac_high", "entropy_clip_cov", "num_tokens")
PARTIALS = 9
GRID = 64  # points of a grid of BAPO at most: a block of tokens times the grid is in registers
# Of `bapo_sums`: blocks of a program, more where there were more programs than that.
STEPS, PROGRAMS = (2 if INTERPRETED else 16), 512


def _dual(loss: Any) -> float:
    return math.inf if loss.dual_clip is None else loss.dual_clip


# By the rule itself, so that a subclass with another one is not taken for its parent: branch of the kernel, and its parameters. None
# where an option needs more than the token.
SERVED: dict[Callable, Callable[[Any], tuple | None]] = {
    GRPO.rule: lambda x: ("clip", 1.0 - x.clip_low, 1.0 + x.clip_high, _dual(x)),
    DCPO.rule: lambda x: ("dcpo", 4.0 * x.eps_low, 4.0 * x.eps_high, x.ratio_cap, _dual(x)),
    CISPO.rule: lambda x: ("cispo", 0.0 if x.ratio_low is None else x.ratio_low, x.ratio_high),
    DPPO.rule: lambda x: None if x.needs else (f"dppo-{x.divergence}", x.delta_low, x.delta_high, x.ratio_cap),
    BPO.rule: lambda x: ("bpo", x.smoothing, x.cap, 1.0 - x.clip_low, 1.0 + x.clip_high),
    SAPO.rule: lambda x: ("sapo", x.tau_pos, x.tau_neg),
    DRO.rule: lambda x: ("dro", x.beta / 2),
    Reinforce.rule: lambda x: ("reinforce",),
    TOPR.rule: lambda x: ("topr", x.floor, x.cap) if x.ratio == "token" else None,
}


def evaluate(loss: Loss, x: Tokens) -> FusedTerm | None:
    """The rule of `loss` on fp32 tokens; None where it is not served."""
    rule, metrics = type(loss).rule, {}
    chosen: tuple | None = SERVED[rule](loss) if rule in SERVED else None
    if rule is BAPO.rule:
        assert isinstance(loss, BAPO)
        bounds = find_bounds(loss, x) or controller.find_bounds(loss, x)
        metrics = {k: v.to(torch.float32) for k, v in bounds._asdict().items()}
        chosen = ("bapo", metrics["c_low"], metrics["c_high"], _dual(loss), metrics["contribution"])
    if chosen is None:
        return None
    family, *parameters = chosen
    parameters = [p if isinstance(p, Tensor) else float(p) for p in parameters]
    parameters += [None] * (4 - len(parameters))

    inputs, n, device = _inputs(x), x.logprobs.numel(), x.logprobs.device
    term, coef, ratio = (torch.empty_like(inputs[0]) for _ in range(3))
    clipped = torch.empty_like(inputs[0], dtype=torch.int8)
    config = find_config("token_losses", device)
    programs = triton.cdiv(n, config.blocks["BLOCK"])
    partials = torch.empty(PARTIALS, programs, dtype=torch.float64, device=device)
    means = torch.empty(len(MEANS), device=device)
    with on(device):
        token_losses[(programs,)](
            *(*inputs, *parameters, term, coef, ratio, clipped, partials, n), LOSS=family, **config.options
        )
        fold_means[(1,)](partials, means, programs, **find_config("fold_means", device).options)
    attached = _Attach.apply(x.logprobs, term, coef)
    return FusedTerm(attached, clipped, metrics, ratio=ratio, means=dict(zip(MEANS, means.unbind(), strict=True)))


def find_bounds(loss: BAPO, x: Tokens) -> controller.BapoBounds | None:
    """`controller.find_bounds` for fp32 tokens; None for grids of very many points."""
    n, device = x.logprobs.numel(), x.logprobs.device
    n_high = controller.grid_size(loss.c_high, loss.step_high)
    n_low = controller.grid_size(loss.c_low, loss.step_low)
    if max(n_high, n_low) > GRID:
        return None
    grids = [_bits(v, device) for v in (*loss.c_high, loss.step_high, *loss.c_low, loss.step_low)]
    sizes = {"HIGH": max(16, triton.next_power_of_2(n_high)), "LOW": max(16, triton.next_power_of_2(n_low))}
    config = find_config("bapo_sums", device)
    blocks = triton.cdiv(n, config.blocks["BLOCK"])
    steps = max(STEPS, triton.cdiv(blocks, PROGRAMS))
    programs = triton.cdiv(blocks, steps)
    partials = torch.empty(sum(sizes.values()), programs, dtype=torch.float64, device=device)
    bounds = torch.empty(5, dtype=torch.float64, device=device)
    with on(device):
        bapo_sums[(programs,)](
            *(*_inputs(x), *grids, partials, n, steps),
            **(config.options | sizes),
            GRADIENT=loss.measure == "gradient",
            WEIGHTED=loss.weighting == "rollout",
        )
        if x.dp_group is not None:
            # In the shape of `controller.find_bounds`: a rank without tokens sums with it.
            grids_only = torch.cat([partials[:n_high], partials[sizes["HIGH"] :][:n_low]]).sum(1)
            torch.distributed.all_reduce(grids_only, group=x.dp_group)
            partials = partials.new_zeros(partials.shape[0], 1)
            partials[:n_high, 0], partials[sizes["HIGH"] :][:n_low, 0] = grids_only.split([n_high, n_low])
        bapo_pick[(1,)](
            *(partials, partials.shape[1], *grids, n_high, n_low, _bits(loss.target, device), bounds),
            **(find_config("bapo_pick", device).options | sizes),
            KIND=loss.contribution,
            HIGH_FIRST=loss.order == "high-first",
        )
    return controller.BapoBounds(*bounds.unbind())


def _inputs(x: Tokens) -> list[Tensor]:
    return [t.detach().contiguous() for t in (x.logprobs, x.old_logprobs, x.rollout_logprobs, x.advantages, x.mask)]


def _bits(value: float | Tensor, device: torch.device) -> int | Tensor:
    """A number as `number64` in the kernels reads it."""
    return value.to(device) if isinstance(value, Tensor) else struct.unpack("<q", struct.pack("<d", value))[0]


class _Attach(torch.autograd.Function):
    """A loss that is there already, with its derivative."""

    @staticmethod
    def forward(ctx, logprobs: Tensor, loss: Tensor, coef: Tensor) -> Tensor:
        ctx.save_for_backward(coef)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, upstream: Tensor):
        refuse_second_derivatives()
        (coef,) = ctx.saved_tensors
        return upstream * coef, None, None
