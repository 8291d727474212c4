"""Batch-wide quantities over two ranks (gloo): those of the global batch, and equal on both ranks."""

import os
from datetime import timedelta

import pytest
import torch
import torch.multiprocessing as mp
from engine_batches import batch, pool_of, run
from helpers import assert_bits, integers, normal

import bapo_kernels as bk

SIZES = (23, 9)  # tokens of each rank


def global_batch(kind: str):
    n = sum(SIZES)
    old = -normal(n, seed=1).abs() - 0.05
    batch = {
        "logprobs": old + 0.7 * normal(n, seed=2),
        "advantages": normal(n, seed=3) - 0.6,
        "old_logprobs": old,
        "rollout_logprobs": old + 0.2 * normal(n, seed=4),
        "entropy": normal(n, seed=5).abs(),
        "mask": integers(5, n, seed=6) > 0,
    }
    if kind == "one rank masked":
        batch["mask"][SIZES[0] :] = False
    if kind == "one rank positive":  # alone, neither rank would move its bounds
        batch["advantages"][: SIZES[0]] = -batch["advantages"][: SIZES[0]].abs()
        batch["advantages"][SIZES[0] :] = batch["advantages"][SIZES[0] :].abs()
    return batch


KINDS = ("mixed", "one rank masked", "one rank positive")
LOSSES = {"bapo": {}, "ppo": {"top_entropy": 0.3}}


def evaluate(batch: dict, group=None, count=None):
    """Bounds, and for each loss: loss, gradient, coefficients."""
    keys = ("mask", "old_logprobs", "rollout_logprobs")
    found = [
        list(bk.bapo_bounds(batch["logprobs"], batch["advantages"], dp_group=group, **{k: batch[k] for k in keys}))
    ]
    for loss, options in LOSSES.items():
        logprobs = batch["logprobs"].clone().requires_grad_()
        rest = {k: batch[k] for k in (*keys, "entropy")}
        out = bk.policy_loss(
            logprobs,
            batch["advantages"],
            loss=loss,
            dp_group=group,
            normalizer=count,
            return_tokens=True,
            **rest,
            **options,
        )
        out.loss.backward()
        found.append([out.loss.detach(), logprobs.grad, out.tokens.coef])
    return found


HEAD_SIZES = (90, 20)  # several blocks of the one-pass engine on one rank, one on the other
ENGINES = ("recompute", "one-pass")


def from_the_head(engine: str, rows=slice(None), group=None):
    """BAPO straight from hidden states: bounds, loss, and gradients of hidden and weight."""
    args = batch("bapo", n=sum(HEAD_SIZES), d=9, v=80, spread=0.9, normalizer=70.0, dp_group=group)
    args["loss"] = bk.BAPO(target=0.32, weighting="none")
    for name in ("hidden", "targets", "advantages", "mask", "old_logprobs", "rollout_logprobs", "ref_logprobs"):
        args[name] = args[name][rows]
    found = run(args, engine=engine, memory_budget=pool_of(16, args) if group else None)
    bounds = [found.out.metrics[name] for name in ("c_low", "c_high")]
    return [*bounds, found.out.loss.detach(), found.grads["hidden"], found.grads["weight"]]


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    where = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": 2}
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60), **where)
    group, results = torch.distributed.group.WORLD, {}
    for kind in KINDS:
        data = global_batch(kind)
        rows = slice(0, SIZES[0]) if rank == 0 else slice(SIZES[0], None)
        results[kind] = evaluate({k: v[rows] for k, v in data.items()}, group, data["mask"].sum())
    for engine in ENGINES:
        rows = slice(0, HEAD_SIZES[0]) if rank == 0 else slice(HEAD_SIZES[0], None)
        results[engine] = from_the_head(engine, rows, group)
    torch.save(results, os.path.join(folder, f"rank{rank}.pt"))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gloo")
    mp.spawn(worker, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"rank{i}.pt") for i in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_are_those_of_the_global_batch(kind, ranks):
    want = evaluate(global_batch(kind))[0]
    for a, b, w in zip(ranks[0][kind][0], ranks[1][kind][0], want, strict=True):
        assert_bits(a, b, "the ranks differ")
        assert a.item() == pytest.approx(w.item(), rel=1e-12)
    if kind == "one rank positive":
        assert want[1].item() > 1.2


@pytest.mark.parametrize("which", range(len(LOSSES)), ids=list(LOSSES))
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_add_up(kind, which, ranks):
    loss, grad, coef = evaluate(global_batch(kind))[1 + which]
    parts = [r[kind][1 + which] for r in ranks]
    torch.testing.assert_close(parts[0][0] + parts[1][0], loss)
    torch.testing.assert_close(torch.cat([p[1] for p in parts]), grad)
    torch.testing.assert_close(torch.cat([p[2] for p in parts]), coef)


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_wait_for_the_other_rank_as_often_as_it_does(engine, ranks):
    """Once, for the bounds, into however many blocks the rows of a rank go."""
    want = from_the_head("recompute")
    assert 1.2 < want[1] < 3.0
    for i in range(2):
        assert_bits(ranks[0][engine][i], ranks[1][engine][i])
        torch.testing.assert_close(ranks[0][engine][i], want[i])
    loss, hidden, weight = zip(*(r[engine][2:] for r in ranks), strict=True)
    torch.testing.assert_close(sum(loss), want[2])
    torch.testing.assert_close(torch.cat(hidden), want[3])
    torch.testing.assert_close(sum(weight), want[4])
