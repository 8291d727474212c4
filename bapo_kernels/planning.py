"""Which engine a policy loss takes through the head: `plan` says it beforehand, and `linear_policy_loss` asks the same question."""

from dataclasses import replace

import torch

from bapo_kernels import losses
from bapo_kernels.checks import check_flag, is_number, is_whole
from bapo_kernels.corrections import Correction
from bapo_kernels.evaluation import Batch
from bapo_kernels.head.api import Head
from bapo_kernels.head.backends import choose as choose_backend
from bapo_kernels.head.backends import resolve_budget
from bapo_kernels.head.chunked import Backend
from bapo_kernels.head.engines import Plan, Work, check_engine, choose
from bapo_kernels.head.precision import accumulation_dtype
from bapo_kernels.losses.base import Loss
from bapo_kernels.options import PolicyOptions


def plan(
    tokens: int,
    hidden_size: int,
    vocab_size: int,
    *,
    loss: str | Loss = "bapo",
    unmasked: float = 1.0,
    active: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    weight_grad: bool = True,
    hidden_grad: bool = True,
    memory_budget: int | None = None,
    backend: str = "auto",
    engine: str = "auto",
    correction: Correction | None = None,
    old_logprobs: bool = True,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    top_entropy: float | None = None,
) -> Plan:
    """What `linear_policy_loss` would do with a batch: its engine, its cost, and why.

    Args:
        tokens, hidden_size, vocab_size: N, D and V of the call.
        loss, correction, kl_coef, entropy_coef, top_entropy, memory_budget, backend, engine: as there.
        unmasked, active: shares of the tokens that count, and that have a gradient (neither masked, nor clipped, nor of advantage 0;
            None: all that count).
        dtype: of hidden states and weight.
        weight_grad, hidden_grad: whether they are trained.
        old_logprobs: whether they are given.

    Returns:
        `Plan(engine, passes, memory_bytes, reason)`. A pass is one product of all N hidden states and the weight, 2 N V D operations; the
        unfused path pays 3, or 2 where the weight is not trained. `memory_bytes` is what is held at most beyond inputs and gradients, but
        for a few vectors of N numbers.

    Raises:
        ValueError: naming the argument; and as `linear_policy_loss` would, where `engine` cannot serve.
    """
    for name, size, least in (("tokens", tokens, 0), ("hidden_size", hidden_size, 1), ("vocab_size", vocab_size, 1)):
        if not is_whole(size) or size < least:
            raise ValueError(f"{name} must be an integer, at least {least}, got {size!r}")
    active = unmasked if active is None else active
    for name, share, most in (("unmasked", unmasked, 1.0), ("active", active, unmasked)):
        if not is_number(share) or not 0 <= share <= most:
            raise ValueError(f"{name} must be a share in [0, {most:g}], got {share!r}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point dtype, got {dtype!r}")
    for name, flag in (("weight_grad", weight_grad), ("hidden_grad", hidden_grad), ("old_logprobs", old_logprobs)):
        check_flag(name, flag)
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be a torch.device or the name of one, got {device!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={str(device)!r} is not there: a plan hangs on its backends, so ask where the call will run"
        )
    check_engine(engine)
    options = PolicyOptions(
        loss=losses.resolve(loss),
        correction=correction,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        top_entropy=top_entropy,
    )
    chosen, budget = choose_backend(backend, device, dtype, [dtype]), resolve_budget(memory_budget, device)
    if chosen is None:
        raise ValueError("backend='reference' has no engines: it holds the logits of all tokens that count")
    work = Work.of(
        chosen,
        dtype,
        [(hidden_size, dtype, weight_grad)],
        accumulation_dtype(torch.empty(0, dtype=dtype)),
        tokens=tokens,
        unmasked=unmasked,
        active=unmasked if _all_have_a_gradient(options) else active,
        vocab_size=vocab_size,
        hidden_grad=hidden_grad,
        bias_grad=False,
        late_because=_late_because(options, old_logprobs),
        topk=options.needs_topk,
        entropy_grad=entropy_coef != 0,
        captured=False,
        traced=False,
        budget=budget,
    )
    answer = choose(engine, work)
    return answer._replace(reason="; ".join(filter(None, (answer.reason, chosen.design))))


def work_of(head: Head, backend: Backend, batch: Batch, engine: str) -> Work:
    """The work of a call that asks for `engine`."""
    options, recorded = batch.options, batch.recorded
    late_because = _late_because(options, recorded.old_logprobs is not None)
    work = head.work(backend, late_because=late_because, entropy_grad=options.entropy_coef != 0)
    settled = engine != "auto" or not work.keeps or work.captured or work.traced or work.head_grad
    if settled or _all_have_a_gradient(options):
        return work
    # Only here the choice hangs on it. Some losses train tokens without an advantage too; the result is as right.
    return replace(work, active=int((batch.active & (recorded.advantages != 0)).sum()) / max(work.tokens, 1))


def _all_have_a_gradient(options: PolicyOptions) -> bool:
    return options.kl_coef != 0 or options.entropy_coef != 0


def _late_because(options: PolicyOptions, old_given: bool) -> str | None:
    """Why the coefficients of a token hang on other tokens; None: they do not, or only through what `Loss.brackets` has."""
    if not options.loss.brackets:
        return f"the coefficients of loss {options.loss} follow from the whole batch only"
    if options.top_entropy is not None:
        return "top_entropy chooses tokens from the whole batch"
    if options.correction is not None and options.correction.level == "sequence" and not old_given:
        return f"without old_logprobs, the weights of {options.correction} hang on whole sequences"
    return None
