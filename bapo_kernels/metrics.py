"""The metrics of a batch: fixed keys, 0-d fp32 tensors, detached, on the device, without host synchronisation."""

import torch
from torch import Tensor

from bapo_kernels.losses.base import TokenLoss, Tokens, bounded_log_ratio
from bapo_kernels.losses.triton import FusedTerm


def metrics(
    x: Tokens, term: TokenLoss, policy_loss: Tensor, kl: Tensor | None, entropy: Tensor | None
) -> dict[str, Tensor]:
    """`kl` and `entropy` are per token, or None where not computed (then NaN). Means are over active tokens whatever the aggregation;
    over no token they are 0.

    Micro-batches merge by hand: means times `num_tokens` are sums, `ratio_max` is a maximum, and with a `normalizer` `policy_loss` adds up.
    """
    with torch.no_grad():
        nan = x.logprobs.new_full((), torch.nan)
        values = {
            "policy_loss": policy_loss,
            "kl": nan if kl is None else x.mean(kl),
            "entropy": nan if entropy is None else x.mean(entropy),
            **(term.means if isinstance(term, FusedTerm) else _means(x, term.clipped)),
            **term.metrics,
        }
        return {k: v.detach().to(torch.float32) for k, v in values.items()}


def _means(x: Tokens, clipped: Tensor | None) -> dict[str, Tensor]:
    """What depends on ratio, advantage, log-prob and clip flag only."""
    ratio, advantage = x.ratio, x.advantages
    clipped = torch.zeros_like(ratio, dtype=torch.int8) if clipped is None else clipped
    ratio_max = torch.where(x.mask, ratio, -torch.inf).amax() if ratio.numel() else ratio.new_zeros(())
    retained = torch.where(clipped == 0, advantage, 0.0)
    centred = (x.logprobs - x.mean(x.logprobs)) * (retained - x.mean(retained))
    log_ratio = bounded_log_ratio(x.log_ratio)
    return {
        "ratio_mean": x.mean(ratio),
        "ratio_max": torch.where(x.mask.any(), ratio_max, 0.0),
        "approx_kl": x.mean(torch.expm1(log_ratio) - log_ratio),
        "clip_frac_low": x.mean(((clipped < 0) & (advantage != 0)).to(ratio.dtype)),
        "clip_frac_high": x.mean(((clipped > 0) & (advantage != 0)).to(ratio.dtype)),
        "entropy_clip_cov": x.mean(centred),
        "num_tokens": x.mask.sum(),
    }
