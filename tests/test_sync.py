"""What a GPU would have to wait for: operations whose result has to come to the host, counted on a CPU where they look alike."""

import pytest
import torch
from engine_batches import LOSSES, batch
from helpers import as_under_capture, normal
from torch.utils._python_dispatch import TorchDispatchMode

import bapo_kernels as bk
from bapo_kernels import checks, layout, topk
from bapo_kernels.head import inputs

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.repeat_interleave, aten._unique2}
COPIES = {aten.lift_fresh, aten.lift_fresh_copy}  # torch.tensor(...) of Python numbers
LOOKS = 2  # how many rows count, and how many have a gradient


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        by_mask = op.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        )
        if op.overloadpacket in WAITS | COPIES or by_mask:
            self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


@pytest.fixture(params=[True, False], ids=["captured", "compacted"])
def captured(request, monkeypatch) -> bool:
    """As on a GPU: values are not looked at, and rows are counted only outside of a graph capture."""
    for module in (inputs, layout, topk, checks):
        monkeypatch.setattr(module, "values_are_checked", lambda device: False)
    if request.param:
        as_under_capture(monkeypatch)
    return request.param


def arguments(loss, layout: str) -> dict:
    args = batch(loss, layout=layout, n=40, d=9, v=300, dtype=torch.float32)
    args |= {"temperature": normal(*args["targets"].shape, seed=8).abs() + 0.5, "softcap": 20.0}
    args.pop("cu_seqlens", None)  # its numbers are the host's own where it is a CPU tensor
    return {k: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in args.items()}


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("layout_name", ["flat", "padded"])
def test_a_step_waits_for_nothing_but_its_rows(loss, layout_name, captured):
    args = arguments(loss, layout_name)
    leaves = [args[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    extra = {"normalizer": torch.tensor(7.0)} if loss.name in ("dapo", "ppo") else {}
    with Watch() as watch:
        out = bk.linear_policy_loss(
            **args, **extra, engine="recompute", backend="torch", entropy_coef=0.1, return_tokens=True
        )
        out.loss.backward()
    assert all(leaf.grad is not None for leaf in leaves)
    assert watch.seen == [] if captured else len(watch.seen) <= LOOKS, watch.seen


@pytest.mark.parametrize("entropy", [False, True])
def test_the_log_probs_wait_for_nothing_but_their_rows(captured, entropy):
    args = arguments(bk.GRPO(), "padded")
    head = {name: args[name] for name in ("hidden", "weight", "targets", "bias", "mask", "temperature", "softcap")}
    head["hidden"].requires_grad_()
    with Watch() as watch:
        out = bk.linear_logprobs(**head, return_entropy=entropy, backend="torch")
        (out.logprobs if out.entropy is None else out.logprobs + out.entropy).sum().backward()
    # The weight is not trained: whether the entropy is, is one look more.
    assert watch.seen == [] if captured else len(watch.seen) <= LOOKS + entropy, watch.seen


def test_what_waits_is_seen():
    t = torch.arange(4.0)
    for waits in (
        lambda: t.sum().item(),
        lambda: t.nonzero(),
        lambda: t[t > 1],
        lambda: bool(t[0]),
        lambda: torch.tensor(1.0),
    ):
        with Watch() as watch:
            waits()
        assert watch.seen
