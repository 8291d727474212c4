"""Calls of every loss on the random batches, and the same calls in plain numbers."""

import dataclasses

import naive_losses
import torch
from batches import Batch
from helpers import normal
from torch import Tensor

import bapo_kernels as bk

NAMES = tuple(naive_losses.DEFAULTS)
CLIPPED = ("bapo", "bpo", "grpo", "ppo", "dapo", "gspo", "luspo", "dppo-tv", "dppo-kl", "dcpo", "gmpo", "clip-cov")
PER_TOKEN = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "entropy", "advantages")


def recorded(shape, seed: int = 0, k: int = 4, vocab: int = 9) -> dict[str, Tensor]:
    """Top-k log-probs of a policy and of its sampler, each of a whole distribution; some ids are padding."""
    policy = normal(*shape, vocab, seed=seed + 40).log_softmax(-1)
    sampler = (policy + 0.5 * normal(*shape, vocab, seed=seed + 41)).log_softmax(-1)
    ids = normal(*shape, vocab, seed=seed + 42).topk(k).indices
    padding = normal(*shape, k, seed=seed + 43) < -1
    return {
        "topk_logprobs": policy.gather(-1, ids),
        "rollout_topk_ids": ids.masked_fill(padding, -1),
        "rollout_topk_logprobs": sampler.gather(-1, ids).masked_fill(padding, -torch.inf),
    }


def batch_of(layout: str = "padded", seed: int = 0, spread: float = 0.8, **options) -> Batch:
    """A stale batch: the sampler is as far from the policy as the proximal policy is, in places much farther."""
    batch = Batch.random(layout, seed=seed, spread=spread, **options)
    batch.logprobs = -batch.logprobs.abs() - 0.01
    batch.rollout_logprobs = -(-batch.old_logprobs * (0.8 * normal(*batch.old_logprobs.shape, seed=seed + 9)).exp())
    return batch


def inputs(batch: Batch, loss, seed: int = 0) -> dict[str, Tensor]:
    """What a call of this loss on this batch has beside the batch's own tensors."""
    given = {"rollout_logprobs": batch.rollout_logprobs}
    if loss.name == "score-centering":
        given |= recorded(batch.logprobs.shape, seed)
    return given


@dataclasses.dataclass
class Call:
    out: bk.PolicyLossOutput
    logprobs: Tensor
    entropy: Tensor
    topk: Tensor | None

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the call has computed, after the backward."""
        self.out.loss.backward()
        found = {f"tokens.{k}": v for k, v in self.out.tokens._asdict().items()} | self.out.metrics
        found |= {"loss": self.out.loss.detach(), "grad": self.logprobs.grad}
        if self.topk is not None:
            found["grad of topk"] = self.topk.grad
        if self.entropy.grad is not None:
            found["grad of entropy"] = self.entropy.grad
        return found


def call(batch: Batch, loss, seed: int = 0, **options) -> Call:
    loss = bk.losses.get(loss) if isinstance(loss, str) else loss
    options = inputs(batch, loss, seed) | options
    topk = options.get("topk_logprobs")
    if topk is not None:
        options["topk_logprobs"] = topk = topk.clone().requires_grad_()
    out, logprobs, entropy = batch.call(loss=loss, return_tokens=True, **options)
    return Call(out, logprobs, entropy, topk)


def plain(batch: Batch, topk: dict[str, Tensor] | None = None) -> naive_losses.Batch:
    flat = {k: getattr(batch, k).double().flatten().tolist() for k in PER_TOKEN}
    head = []
    if topk is not None:
        k = topk["rollout_topk_ids"].shape[-1]
        columns = [t.reshape(-1, k).tolist() for t in topk.values()]
        head = [
            [None if v == -1 else (lp, lq) for lp, v, lq in zip(*row, strict=True)]
            for row in zip(*columns, strict=True)
        ]
    return naive_losses.Batch(
        flat["logprobs"],
        flat["old_logprobs"],
        flat["rollout_logprobs"],
        flat["advantages"],
        batch.mask.flatten().tolist(),
        batch.sequence,
        head,
    )


def expected(batch: Batch, loss, seed: int = 0, got: Call | None = None) -> naive_losses.Result:
    """`got`: for Clip-Cov, whose lottery only the package can draw."""
    x = plain(batch, recorded(batch.logprobs.shape, seed) if loss.name == "score-centering" else None)
    chosen = ()
    if loss.name == "clip-cov":
        tokens = got.out.tokens
        stopped = (tokens.coef == 0) & (tokens.clipped == 0) & (batch.advantages != 0) & batch.mask
        chosen = stopped.flatten().nonzero().flatten().tolist()
    return naive_losses.evaluate(loss.name, x, chosen, **dataclasses.asdict(loss))
