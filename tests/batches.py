"""Random batches of per-token values in the three layouts, and the same batch as plain lists."""

from dataclasses import dataclass

import naive
import torch
from helpers import integers, normal
from torch import Tensor

import bapo_kernels as bk

LAYOUTS = ("padded", "packed", "flat")


@dataclass
class Batch:
    logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor
    entropy: Tensor
    cu_seqlens: Tensor | None
    sequence: list[int]  # of each token
    sequences: int

    @classmethod
    def random(
        cls,
        layout: str = "padded",
        seed: int = 0,
        masked: bool = True,
        dtype: torch.dtype = torch.float64,
        spread: float = 0.35,
    ):
        """Three sequences of up to 6 tokens (one flat sequence with "flat"); all kinds of clipping occur."""
        lengths = [6, 6, 6] if layout == "padded" else [3, 6, 5]
        shape = (3, 6) if layout == "padded" else (sum(lengths),)
        old = -normal(*shape, seed=seed).abs() - 0.1
        advantages = normal(*shape, seed=seed + 2)
        advantages[integers(8, *shape, seed=seed + 3) == 0] = 0.0
        mask = integers(4, *shape, seed=seed + 4) > 0 if masked else torch.ones(shape, dtype=torch.bool)
        return cls(
            logprobs=(old + spread * normal(*shape, seed=seed + 1)).to(dtype),
            advantages=advantages.to(dtype),
            mask=mask,
            old_logprobs=old.to(dtype),
            rollout_logprobs=(old + 0.1 * normal(*shape, seed=seed + 5)).to(dtype),
            ref_logprobs=(old + 0.3 * normal(*shape, seed=seed + 6)).to(dtype),
            entropy=normal(*shape, seed=seed + 7).abs().to(dtype),
            cu_seqlens=None if layout != "packed" else torch.tensor([0, 3, 9, 14]),
            sequence=[0] * sum(lengths) if layout == "flat" else [i for i, n in enumerate(lengths) for _ in range(n)],
            sequences=1 if layout == "flat" else 3,
        )

    def call(self, function=None, **options):
        """`policy_loss` with leaves that learn: (output, logprobs, entropy)."""
        logprobs, entropy = (t.detach().clone().requires_grad_() for t in (self.logprobs, self.entropy))
        options = {
            "mask": self.mask,
            "cu_seqlens": self.cu_seqlens,
            "old_logprobs": self.old_logprobs,
            "entropy": entropy,
        } | options
        if options.get("kl_coef"):
            options.setdefault("ref_logprobs", self.ref_logprobs)
        return (function or bk.policy_loss)(logprobs, self.advantages, **options), logprobs, entropy

    def expected(self, low: float, high: float, **options) -> naive.Expected:
        flat = {
            k: getattr(self, k).double().flatten().tolist()
            for k in ("logprobs", "old_logprobs", "advantages", "ref_logprobs", "entropy")
        }
        return naive.policy_loss(
            flat["logprobs"],
            flat["old_logprobs"],
            flat["advantages"],
            self.mask.flatten().tolist(),
            self.sequence,
            self.sequences,
            low=low,
            high=high,
            ref=flat["ref_logprobs"],
            entropy=flat["entropy"],
            **options,
        )


def gradcheck(batch: Batch, loss, **options) -> None:
    """The gradients in log-probs and entropy against finite differences, in fp64."""

    def function(logprobs, entropy):
        return bk.policy_loss(
            logprobs,
            batch.advantages,
            loss=loss,
            entropy=entropy,
            old_logprobs=batch.old_logprobs,
            ref_logprobs=batch.ref_logprobs,
            **options,
        ).loss

    leaves = (batch.logprobs.clone().requires_grad_(), batch.entropy.clone().requires_grad_())
    assert torch.autograd.gradcheck(function, leaves)
