"""The public functions of the head: validation, choice of the backend, and the shape of the answer."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bapo_kernels.checks import check_flag
from bapo_kernels.compiling import compilable, is_traced, traced_size
from bapo_kernels.head import autograd, reference
from bapo_kernels.head.backends import choose as choose_backend
from bapo_kernels.head.backends import resolve_budget
from bapo_kernels.head.chunked import Backend, Needs, Weight
from bapo_kernels.head.engines import Work, choose
from bapo_kernels.head.inputs import Problem, head_problem
from bapo_kernels.head.ops import Call


class TokenStatistics(NamedTuple):
    logprobs: Tensor  # (...)
    entropy: Tensor | None  # (...)
    topk_logprobs: Tensor | None  # (..., K)


@dataclass(frozen=True)
class Head:
    """A validated call of the head, before any work."""

    problem: Problem
    backend: Backend | None  # None: the reference
    budget: int  # bytes
    hidden: Tensor  # (N, D)
    weight: Weight
    bias: Tensor | None

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor | tuple[Tensor, ...],
        targets: Tensor,
        *,
        backend: str,
        memory_budget: int | None,
        tp_group,
        **given,
    ) -> "Head":
        if tp_group is not None:
            raise ValueError("tp_group: vocabulary shards are not supported in this version; gather the weight")
        parts = Weight.of(weight)
        problem = head_problem(hidden, parts, targets, **given)
        chosen = choose_backend(backend, hidden.device, hidden.dtype, parts.dtypes)
        budget = resolve_budget(memory_budget, hidden.device)
        return cls(problem, chosen, budget, hidden.reshape(targets.numel(), hidden.shape[-1]), parts, given["bias"])

    @property
    def needs(self) -> Needs:
        """Which of hidden, weight and bias want a gradient of this call."""

        def wanted(t: Tensor | None) -> bool:
            return t is not None and t.requires_grad and torch.is_grad_enabled()

        return Needs(wanted(self.hidden), tuple(map(wanted, self.weight.parts)), wanted(self.bias))

    def work(self, backend: Backend, *, late_because: str | None, entropy_grad: bool) -> Work:
        """What the choice of an engine looks at."""
        problem, needs, traced = self.problem, self.needs, is_traced(self.hidden)
        # The engine of a graph that is compiled is the one for the tokens at hand: a guard on it would compile for other numbers anew.
        tokens = traced_size(self.hidden.shape[0])
        unmasked = 1.0 if traced else problem.selection.rows / max(tokens, 1)
        return Work.of(
            backend,
            self.hidden.dtype,
            [(int(p.shape[1]), p.dtype, trained) for p, trained in zip(self.weight.parts, needs.weight, strict=True)],
            problem.dtype,
            tokens=tokens,
            unmasked=unmasked,
            active=unmasked,
            vocab_size=problem.spec.vocab_size,
            hidden_grad=needs.hidden,
            bias_grad=needs.bias,
            late_because=late_because,
            topk=problem.topk,
            entropy_grad=entropy_grad,
            captured=problem.selection.mask is not None and not traced,
            traced=traced,
            budget=self.budget,
        )

    def statistics(self, entropy: bool, frozen: bool = False) -> TokenStatistics:
        if self.backend is None:
            logprobs, h = reference.run(self.problem, entropy, self.hidden, self.weight, self.bias)
        else:
            call = Call(self.problem, self.backend, entropy, frozen, self.budget)
            logprobs, h = autograd.run(call, self.hidden, self.weight, self.bias)
        return self.shaped(logprobs, h)

    def shaped(self, logprobs: Tensor, entropy: Tensor | None) -> TokenStatistics:
        """(N, P) log-probs at the ids and entropy (N,) in the layout of the call."""
        layout, k = self.problem.layout, logprobs.shape[1] - 1
        return TokenStatistics(
            logprobs[:, 0].reshape(layout),
            None if entropy is None else entropy.reshape(layout),
            logprobs[:, 1:].reshape(*layout, k) if self.problem.topk else None,
        )


@compilable
def linear_logprobs(
    hidden: Tensor,  # (..., D)
    weight: Tensor | tuple[Tensor, ...],  # (V, D)
    targets: Tensor,  # (...)
    *,
    bias: Tensor | None = None,  # (V,)
    mask: Tensor | None = None,  # (...)
    ignore_index: int = -100,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    topk_ids: Tensor | None = None,  # (..., K)
    return_entropy: bool = False,
    tp_group=None,
    backend: str = "auto",
    memory_budget: int | None = None,
) -> TokenStatistics:
    """Log-probs of the targets, and on request the entropy and the log-probs of recorded ids, straight from hidden states.

    The logits `softcap(((hidden @ weight.T) + bias) * logit_scale) / temperature` over the first `vocab_size` columns are made a
    slice of the vocabulary at a time and never stored whole, forward or backward. They are fp32 whatever the inputs (fp64 if an
    input is fp64), and so are the outputs; gradients have the dtype of what they belong to. No shift happens inside: `targets[i]` is
    the token that `hidden[i]` predicts.

    Args:
        hidden: states before the head, any floating dtype and any leading shape.
        weight: the head's weight in `nn.Linear` layout; or a tuple of tensors (V, D_i) that stand for torch.cat(weight, 1), which is not
            made, each with a gradient of its own: `(frozen, lora_B)` with hidden states `cat([h, scaling * h @ lora_A.T], -1)`.
        targets: integer ids in [0, vocab_size).
        mask: which tokens count (bool or 0-1). A masked row, or one whose target is `ignore_index`, is as if absent: nothing it
            holds reaches a result; its outputs are 0 and its gradient exactly 0.
        temperature: a number > 0, or one for each token (layout shape) or sequence ((B,) or (B, 1) with a (B, T) layout).
        logit_scale, softcap: multiplies the logits; then `softcap * tanh(logits / softcap)`.
        vocab_size: rows of `weight` from here on are padding: no probability, no gradient.
        topk_ids: ids whose log-probs are wanted too, K per token; -1 is padding (its log-prob is 0).
        return_entropy: also the entropy in nats, over the same distribution. With a weight that is not trained, a gradient of the entropy
            costs two passes over the rows concerned (`linear_policy_loss` knows beforehand, and does better).
        backend: "auto", "triton", "cpu", "torch" or "reference" (plain autograd on materialised logits: the oracle).
        memory_budget: bytes for temporary tiles; None: BAPO_KERNELS_MEMORY_BUDGET, or 256 MiB, 1 GiB on a GPU.

    Returns:
        `TokenStatistics(logprobs, entropy, topk_logprobs)`, each differentiable with any upstream gradient; None where not asked for.

    Raises:
        ValueError: before any work, naming the argument, what came and what is allowed. On CPU this includes targets outside
            [0, vocab_size) in rows that count; on CUDA, where looking would stall the stream, such a row's log-prob is NaN, and
            BAPO_KERNELS_CHECK=1 raises.
    """
    head = Head.of(
        hidden,
        weight,
        targets,
        bias=bias,
        mask=mask,
        ignore_index=ignore_index,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        vocab_size=vocab_size,
        topk_ids=topk_ids,
        tp_group=tp_group,
        backend=backend,
        memory_budget=memory_budget,
    )
    check_flag("return_entropy", return_entropy)
    if head.backend is None:
        return head.statistics(return_entropy)
    # An entropy is more often looked at than trained on: one that is costs a frozen head two more passes over the rows concerned.
    work = head.work(head.backend, late_because="gradients come with the backward", entropy_grad=False)
    return head.statistics(return_entropy, frozen=choose("auto", work).engine == "frozen")
