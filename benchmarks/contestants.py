"""The contestants, each called as its own documentation or trainer does. All give the loss of `batch.dapo`.

A name may end in " compact": the rows that do not count are dropped before the head, by indexing (not for fused losses).
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from batch import CLIP_HIGH, CLIP_LOW, Batch, dapo
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import bapo_kernels as bk

DESIGN = "BAPO_KERNELS_DESIGN"
Logprobs = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden (N, D), weight (V, D), targets (N,) -> (N,)
Contestant = Callable[[Batch], Tensor]  # -> loss

DEFAULT = (
    "plain",
    "plain compact",
    "plain compiled",
    "checkpointed chunks",
    "torch linear_cross_entropy",
    "liger",
    "trl",
    "trl compact",
    "verl",
    "bapo_kernels",
    "bapo_kernels recompute",
)
ENGINES, BACKENDS = ("recompute", "one-pass", "frozen"), ("cpu", "torch", "triton", "reference")
DESIGNS = ("gemm", "tile")  # of the triton backend: the vendor's GEMM and an epilogue, or both in one kernel
OURS = "bapo_kernels"  # alone or with an engine, a backend, a design, a memory budget: "bapo_kernels recompute tile", "bapo_kernels 8GiB"
ON_GPU = (
    OURS,
    f"{OURS} 8GiB",  # the default budget is for what runs beside a model; this one serves every engine
    f"{OURS} recompute gemm",
    f"{OURS} recompute tile",
    f"{OURS} one-pass",
    f"{OURS} frozen",
    "plain",
    "plain compact",
    "torch linear_cross_entropy",
    "liger",
    "trl",
    "trl compact",
    "verl",
    "verl kernel",
)
SCORING_ON_GPU = (
    OURS,
    *(f"{OURS} {d}" for d in DESIGNS),
    "plain",
    "torch linear_cross_entropy",
    "trl",
    "verl",
    "verl kernel",
)


def get(name: str) -> Contestant:
    """ImportError: the package is not here."""
    if name.split()[0] == OURS:
        return partial(ours, **options_of(name))
    if name in LOSSES:
        return LOSSES[name]()
    base = name.removesuffix(" compact")
    if base not in LOGPROBS:
        raise KeyError(f"no contestant {name!r}; there are {', '.join(names())}")
    return partial(compact if base != name else on_logprobs, LOGPROBS[base]())


def names() -> list[str]:
    variants = [f"{OURS} {v}" for v in ENGINES + BACKENDS]
    return [*LOGPROBS, *(f"{n} compact" for n in LOGPROBS), *LOSSES, OURS, *variants]


def options_of(name: str) -> dict:
    """Engine, backend and memory budget from the name of one of ours."""
    options: dict = {}
    for word in name.split()[1:]:
        if word in ENGINES:
            options["engine"] = word
        elif word in BACKENDS:
            options["backend"] = word
        elif word.endswith("GiB"):
            options["memory_budget"] = int(word.removesuffix("GiB")) * 2**30
        elif word not in DESIGNS:
            raise KeyError(f"{word!r} in {name!r} is none of {', '.join(ENGINES + BACKENDS + DESIGNS)}")
    return options


def scorer(name: str) -> Logprobs:
    """Log-probs only, for contestants that have them; ours with the entropy beside them."""
    if name.split()[0] == OURS:
        options = options_of(name)
        return lambda h, w, t: bk.linear_logprobs(h, w, t, return_entropy=True, **options).logprobs
    return LOGPROBS[name]()


def design_of(name: str) -> AbstractContextManager:
    """The design is the environment's, read in each call."""
    chosen = [w for w in name.split() if w in DESIGNS and name.startswith(OURS)]
    return mock.patch.dict(os.environ, {DESIGN: chosen[0]} if chosen else {})


def on_logprobs(logprobs_of: Logprobs, batch: Batch) -> Tensor:
    logprobs = logprobs_of(batch.hidden, batch.weight, batch.targets)
    return dapo(logprobs, batch.old, batch.advantages, batch.mask)


def compact(logprobs_of: Logprobs, batch: Batch) -> Tensor:
    m = batch.mask
    logprobs = logprobs_of(batch.hidden[m], batch.weight, batch.targets[m])
    return dapo(logprobs, batch.old[m], batch.advantages[m], m[m])


def ours(batch: Batch, **options) -> Tensor:
    return bk.linear_policy_loss(
        batch.hidden,
        batch.weight,
        batch.targets,
        batch.advantages,
        **{"loss": "dapo", "mask": batch.mask, "old_logprobs": batch.old, **options},
    ).loss


# Written here


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax((hidden @ weight.t()).float(), -1).gather(1, targets[:, None]).squeeze(1)


@cache
def plain_compiled() -> Contestant:
    @torch.compile
    def loss(hidden, weight, targets, old, advantages, mask):
        return dapo(full_logits(hidden, weight, targets), old, advantages, mask)

    return lambda b: loss(b.hidden, b.weight, b.targets, b.old, b.advantages, b.mask)


def checkpointed_chunks(batch: Batch, chunk: int = 256) -> Tensor:
    """Full logits of 256 tokens at a time, computed again in the backward; rows that do not count are dropped first."""

    def chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        pairs = zip(hidden.split(chunk), targets.split(chunk), strict=True)
        return torch.cat([checkpoint(full_logits, h, weight, t, use_reentrant=False) for h, t in pairs])

    return compact(chunks, batch)


# Of other packages, imported only when asked for


def torch_linear_cross_entropy() -> Logprobs:
    """Chunks are opt-in there; per-token losses take the path that computes the logits again in the backward."""
    from torch.nn import LinearCrossEntropyOptions
    from torch.nn.functional import linear_cross_entropy

    options = LinearCrossEntropyOptions(batch_chunk_size=512, chunking_method=None)
    return lambda h, w, t: -linear_cross_entropy(h, w, t, reduction="none", options=options)


def trl() -> Logprobs:
    """The call of `trl.trainer.utils.add_fused_lm_head`, with all rows. (On a GPU rows are dropped before it: "trl compact".)"""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as COLUMNS

    def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, COLUMNS, None, 1.0, ("log_probs",))[0]

    return logprobs


def verl() -> Logprobs:
    """Its chunks of plain PyTorch, for CPUs and GPUs ("verl kernel": its own kernels). Entropy is always computed there too."""
    head = _verl_file("utils/experimental/torch_functional.py").FusedLinearForPPO(chunk_size=512, impl_backend="torch")
    return lambda h, w, t: head(h, w, t)[0]


def verl_kernel() -> Logprobs:
    """The Triton kernels of verl's own. Its imports ask for most of verl's dependencies."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return lambda h, w, t: linear_cross_entropy(h, w, t, 1.0, "none")[0]


def liger(compiled: bool = True) -> Contestant:
    """Advantages are per sequence there, so each token is a sequence of one; all of them in one chunk, which is its fastest setting.
    `compiled` is about the loss on log-probs; the head is not compiled either way."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    def loss(batch: Batch) -> Tensor:
        head = LigerFusedLinearGRPOLoss(
            beta=0.0,
            compiled=compiled,
            use_ref_model=False,
            chunk_size=batch.size.tokens,
            epsilon_low=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            loss_type="dapo",
        )
        tokens = batch.targets[:, None]
        return head(
            batch.hidden[:, None],
            batch.weight,
            tokens,
            batch.mask[:, None],
            batch.advantages,
            old_per_token_logps=batch.old[:, None],
        )[0]

    return loss


@cache
def _verl_file(path: str) -> ModuleType:
    """One file of verl by its path, since `import verl` needs Ray and a dozen packages that this file does not."""
    package = importlib.util.find_spec("verl")
    if package is None or package.origin is None:
        raise ImportError("verl is not installed (pip install --no-deps verl)")
    name = "verl_" + Path(path).stem
    spec = importlib.util.spec_from_file_location(name, Path(package.origin).parent / path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LOGPROBS: dict[str, Callable[[], Logprobs]] = {
    "plain": lambda: full_logits,
    "torch linear_cross_entropy": torch_linear_cross_entropy,
    "trl": trl,
    "verl": verl,
    "verl kernel": verl_kernel,
}
LOSSES: dict[str, Callable[[], Contestant]] = {
    "plain compiled": plain_compiled,
    "checkpointed chunks": lambda: checkpointed_chunks,
    "liger": liger,
    "liger eager": partial(liger, compiled=False),
}
