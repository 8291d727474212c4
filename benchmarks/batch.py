"""What every contestant gets: a head, a batch of tokens, and the answer it has to arrive at, computed in fp64."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
SLICE = 4096  # vocabulary rows at a time wherever this file goes through the head
HEADS = {  # hidden size, vocabulary
    "qwen2.5-0.5b": (896, 151936),
    "llama3.2-1b": (2048, 128256),
    "gemma3-1b": (1152, 262144),
    "qwen3-4b": (2560, 151936),
}


class Size(NamedTuple):
    tokens: int
    hidden: int
    vocab: int

    @classmethod
    def parse(cls, text: str) -> "Size":
        """Of "8192x4096x151936"."""
        size = cls(*map(int, text.split("x")))
        if min(size) < 1:
            raise ValueError(f"no size: {text!r}")
        return size

    def __str__(self) -> str:
        return "x".join(map(str, self))


@dataclass(frozen=True)
class Pattern:
    """Which of the tokens count, which have a gradient (the others have no advantage), and whether the weight is trained."""

    counted: float
    with_gradient: float
    frozen: bool = False

    @property
    def passes(self) -> float:
        """Products of 2NVD that nobody can do without: logits of what counts, then the gradients of what has one."""
        return self.counted + (1 if self.frozen else 2) * self.with_gradient


PATTERNS = {
    "full": Pattern(1.0, 1.0),
    "frozen": Pattern(1.0, 1.0, frozen=True),
    "rl": Pattern(0.7, 0.25),
    "rl-frozen": Pattern(0.7, 0.25, frozen=True),
}
ALL_PATTERNS = {  # on a GPU
    **PATTERNS,
    "busy": Pattern(0.7, 0.49),
    "score": Pattern(1.0, 0.0),  # log-probs and no gradient
}


class Batch:
    """Random tokens before a random head. `stale=0`: on policy, no token is clipped and the pattern is exact; otherwise the standard
    deviation of the noise on the old log-probs, so that ratios spread and some tokens are clipped."""

    def __init__(
        self,
        size: Size,
        pattern: Pattern,
        *,
        stale: float = 0.0,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        logprobs: Tensor | None = None,
    ):
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        n = size.tokens
        self.size, self.pattern, self.stale = size, pattern, stale
        self.hidden = normal(n, size.hidden).to(dtype).requires_grad_()
        self.weight = (
            normal(size.vocab, size.hidden).div_(size.hidden**0.5).to(dtype).requires_grad_(not pattern.frozen)
        )
        self.targets = torch.randint(0, size.vocab, (n,), generator=generator, device=device)
        place = torch.randperm(n, generator=generator, device=device)
        self.mask = place < round(pattern.counted * n)
        self.advantages = torch.where(place < round(pattern.with_gradient * n), normal(n), 0.0)
        self.logprobs = self.streamed(torch.float32)[0] if logprobs is None else logprobs
        self.old = self.logprobs.float() + stale * normal(n)

    @torch.no_grad()
    def streamed(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets and logsumexp, by nobody's kernel and without the [N, V] logits."""
        rows = self.hidden.to(dtype)
        lse = rows.new_full((len(rows),), float("-inf"))
        for w in self.weight.split(SLICE):
            lse = torch.logaddexp(lse, torch.logsumexp(rows @ w.to(dtype).t(), 1))
        return (rows * self.weight[self.targets].to(dtype)).sum(1) - lse, lse

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None


def dapo(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The loss of all contestants: clipped surrogate, mean over the tokens that count."""
    ratio = (logprobs - old).exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages)
    return -(surrogate * mask).sum() / mask.sum()


@dataclass(frozen=True)
class Answer:
    """Loss and gradients in fp64, from the exact formula of a softmax's gradient."""

    loss: Tensor
    scale: Tensor  # of the loss: the mean of |advantage|; the loss itself can be near 0
    hidden: Tensor
    weight: Tensor

    @classmethod
    def of(cls, batch: Batch) -> "Answer":
        logprobs, lse = batch.streamed(torch.float64)
        logprobs.requires_grad_()
        loss = dapo(logprobs, batch.old.double(), batch.advantages.double(), batch.mask)
        (coefficient,) = torch.autograd.grad(loss, logprobs)
        rows = coefficient.nonzero().squeeze(1)
        coefficient, lse, targets = coefficient[rows, None], lse[rows, None], batch.targets[rows]
        hidden, weight = batch.hidden.detach()[rows].double(), batch.weight.detach()
        d_rows, d_weight = torch.zeros_like(hidden), hidden.new_empty(weight.shape)
        for start in range(0, len(weight), SLICE):
            w = weight[start : start + SLICE].double()
            dz = (hidden @ w.t() - lse).exp_().mul_(-coefficient)
            here = (targets >= start) & (targets < start + len(w))
            dz[here, targets[here] - start] += coefficient[here, 0]
            d_rows += dz @ w
            torch.mm(dz.t(), hidden, out=d_weight[start : start + len(w)])
        d_hidden = hidden.new_zeros(batch.hidden.shape).index_copy_(0, rows, d_rows)
        scale = (batch.advantages.abs() * batch.mask).double().sum() / batch.mask.sum()
        return cls(loss.detach(), scale, d_hidden, d_weight)

    def error(self, loss: Tensor, batch: Batch) -> float:
        """The largest relative error of the loss and of the gradients that `batch` holds."""
        errors = [
            float((loss.detach().double() - self.loss).abs() / self.scale),
            _distance(batch.hidden.grad, self.hidden),
        ]
        if batch.weight.requires_grad:
            errors.append(_distance(batch.weight.grad, self.weight))
        return max(errors)


@lru_cache(maxsize=1)  # "full" and "frozen" have the same answer
def answer(size: Size, counted: float, with_gradient: float, stale: float) -> tuple[Answer, Tensor]:
    """The answer to an fp32 batch, and the log-probs that the batch was built on."""
    batch = Batch(size, Pattern(counted, with_gradient), stale=stale)
    return Answer.of(batch), batch.logprobs


def batch_with_answer(size: Size, pattern: Pattern, stale: float = 0.0) -> tuple[Batch, Answer]:
    expected, logprobs = answer(size, pattern.counted, pattern.with_gradient, stale)
    return Batch(size, pattern, stale=stale, logprobs=logprobs), expected


def step(loss_of: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
    """One loss with its gradients: what is timed."""
    loss = loss_of(batch)
    loss.backward()
    return loss


def _distance(gradient: Tensor | None, expected: Tensor) -> float:
    """|g - g64| / |g64| in blocks, as an fp64 copy of a whole head is large."""
    if gradient is None:
        return float("inf")
    squares = [
        (g.double() - e).square().sum() for g, e in zip(gradient.split(SLICE), expected.split(SLICE), strict=True)
    ]
    return float((sum(squares) / expected.square().sum()).sqrt())
