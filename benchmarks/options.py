"""What other losses and options of ours cost, beside our own plain DAPO step."""

from dataclasses import dataclass, field

import torch
from batch import Batch, Pattern, Size
from contestants import Contestant, ours

import bapo_kernels as bk

BASE = "dapo"
TOPK = 128
STALE = 0.2


@dataclass(frozen=True)
class Option:
    loss: str = "dapo"
    stale: float = 0.0
    topk: bool = False
    dtype: torch.dtype = torch.float32
    arguments: dict = field(default_factory=dict)

    def batch(self, size: Size, pattern: Pattern) -> Batch:
        return Batch(size, pattern, stale=self.stale, dtype=self.dtype)

    def contestant(self, batch: Batch) -> Contestant:
        """Records belong to a batch, so they are made here, outside of what is timed."""
        arguments = {**self.arguments, "loss": self.loss}
        if self.topk:
            arguments |= recorded_topk(batch)
        return lambda b: ours(b, **arguments)


OPTIONS = {
    BASE: Option(),
    "dapo, stale": Option(stale=STALE),
    "bapo, stale": Option("bapo", stale=STALE),
    "entropy bonus": Option(arguments={"entropy_coef": 0.01}),
    f"score centering, {TOPK} ids": Option("score-centering", topk=True),
    "bf16 hidden and weight": Option(dtype=torch.bfloat16),
}


def recorded_topk(batch: Batch) -> dict:
    """Distinct ids spread over the vocabulary, with their log-probs, as a sampler would have recorded its most likely ones."""
    n, v = batch.size.tokens, batch.size.vocab
    k = min(TOPK, v)
    start = torch.randint(0, v, (n, 1), generator=torch.Generator().manual_seed(1))
    ids = (start + torch.arange(k) * (v // k)) % v
    with torch.no_grad():
        logprobs = bk.linear_logprobs(batch.hidden, batch.weight, batch.targets, topk_ids=ids).topk_logprobs
    return {"rollout_topk_ids": ids, "rollout_topk_logprobs": logprobs, "rollout_logprobs": batch.old}
