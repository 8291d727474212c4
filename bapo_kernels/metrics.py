"""The metrics of a batch: fixed keys, 0-d fp32 tensors, detached, on the device, without host synchronisation."""

import torch
from torch import Tensor

from bapo_kernels.losses.base import TokenLoss, Tokens
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
            "policy_loss": policy_loss.detach(),
            "kl": nan if kl is None else x.mean(kl),
            "entropy": nan if entropy is None else x.mean(entropy),
            **(term.means if isinstance(term, FusedTerm) else _means(x, term.clipped)),
            **term.metrics,
        }
        return {k: v.to(torch.float32) for k, v in values.items()}


def _means(x: Tokens, clipped: Tensor | None) -> dict[str, Tensor]:
    """What depends on ratio, advantage, log-prob and clip flag only."""
    log_ratio = x.bounded_log_ratio
    flag = torch.zeros_like(log_ratio) if clipped is None else clipped.to(log_ratio.dtype)
    retained = torch.where(flag == 0, x.advantages, 0.0)
    ratio, approx_kl, low, high, logprob, kept = x.means(
        x.ratio, torch.expm1(log_ratio) - log_ratio, (-flag).clamp(min=0), flag.clamp(min=0), x.logprobs, retained
    )
    return {
        "ratio_mean": ratio,
        "ratio_max": x.active(x.ratio).amax() if x.mask.numel() else ratio,  # ratios are positive
        "approx_kl": approx_kl,
        "clip_frac_low": low,
        "clip_frac_high": high,
        "entropy_clip_cov": x.mean((x.logprobs - logprob) * (retained - kept)),
        "num_tokens": x.count,
    }
