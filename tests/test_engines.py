"""The engines of `linear_policy_loss` give the numbers of the reference: every loss, every option, one block and several."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from engine_batches import (
    ALL,
    HIDDEN,
    LOSSES,
    assert_identical,
    assert_same,
    batch,
    configuration,
    narrow_slices,  # noqa: F401
    pool_of,
    reference,
    run,
    to,
    trace,  # noqa: F401
    whole_batch,
)
from helpers import FUSED, INF, NAN, errors

import bapo_kernels as bk
from bapo_kernels.losses.base import Loss, TokenLoss

POOLS = (16, 32, 48)
LAYOUTS = ("padded", "packed", "flat")


def needs_topk(args: dict) -> bool:
    return "rollout_topk_ids" in args


def engines_of(args: dict, learns) -> list[str]:
    served = ["recompute", "auto"]
    if not whole_batch(args):
        served.append("one-pass")
    if learns == HIDDEN and not needs_topk(args):
        served.append("frozen")
    return served


@cache
def every_loss(number: int):
    args = batch(
        LOSSES[number],
        layout=LAYOUTS[number % 3],
        v=(1003, 300)[number // 3 % 2],
        seed=number,
        return_tokens=True,
        kl_coef=(0.0, 0.1)[number % 2],
        entropy_coef=(0.02, 0.0, 0.0)[number % 3],
    )
    return args, reference(args)


@pytest.mark.parametrize("blocks", ["one", "several"])
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("number", range(len(LOSSES)), ids=[str(x) for x in LOSSES])
def test_every_loss(number, backend, blocks, request, trace):  # noqa: F811
    args, want = every_loss(number)
    if blocks == "several":
        request.getfixturevalue("narrow_slices")
    for learns in (ALL, HIDDEN):
        budget = pool_of(POOLS[number % 3], args, learns, backend=backend) if blocks == "several" else None
        for engine in engines_of(args, learns):
            got = run(args, learns, backend=backend, engine=engine, memory_budget=budget)
            assert_same(got, want, engine)
            assert [t is not None for t in got.grads.values()] == list(learns)
            if engine == "one-pass":
                assert (trace.blocks == 1) == (blocks == "one")
                assert blocks == "one" or trace.capacity == POOLS[number % 3]


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("seed", range(50))
def test_random_configurations(seed, backend, request):
    args = configuration(500 * seed + (backend == "cpu"))
    want = reference(args)
    if seed % 2:
        request.getfixturevalue("narrow_slices")
    learns = (ALL, HIDDEN, (False, True, False), (False, False, True), (True, False, True))[seed % 5]
    if args["bias"] is None:
        learns = ALL if seed % 2 else HIDDEN
    budget = None if seed % 4 == 0 else pool_of(POOLS[seed % 3], args, learns, backend=backend)
    for engine in engines_of(args, learns):
        assert_same(run(args, learns, backend=backend, engine=engine, memory_budget=budget), want, engine)
    if "one-pass" not in engines_of(args, learns):
        with pytest.raises(ValueError, match="one-pass"):
            run(args, learns, backend=backend, engine="one-pass")


@pytest.mark.parametrize("rows", [16, 48, None])
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("loss", ["bapo", "dapo", "score-centering"])
def test_fp32_is_as_exact_as_the_recomputed_backward(loss, backend, rows):
    args = batch(loss, dtype=torch.float32, entropy_coef=0.02, return_tokens=True, spread=0.8)
    exact = reference(args)
    for learns in (ALL, HIDDEN):
        budget = rows and pool_of(rows, args, learns, backend=backend)
        plain = [
            run(args, learns, function=bk.reference.linear_policy_loss),
            run(args, learns, backend=backend, engine="recompute", memory_budget=budget),
        ]
        for engine in set(engines_of(args, learns)) - {"recompute"}:
            got = run(args, learns, backend=backend, engine=engine, memory_budget=budget)
            for name, t in got.grads.items():
                if t is not None:
                    assert t.dtype == torch.float32
                    allowed = [max(errors(p.grads[name], exact.grads[name])[i] for p in plain) for i in range(2)]
                    found = errors(t, exact.grads[name])
                    assert found[0] <= 2 * allowed[0] and found[1] <= 2 * allowed[1], (engine, name, found, allowed)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", ["bapo", "grpo", "score-centering"])
def test_garbage_under_the_mask_changes_nothing(loss, layout, backend):
    options = {"kl_coef": 0.1, "entropy_coef": 0.02, "return_tokens": True}
    args = batch(loss, layout=layout, v=300, dtype=torch.float32, **options)
    args["temperature"] = torch.full_like(args["advantages"], 0.8)
    off = ~args["mask"]
    per_token = ("hidden", "temperature", "advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs")
    per_token += ("rollout_topk_logprobs",)
    for learns in (ALL, HIDDEN):
        for engine in set(engines_of(args, learns)) - {"auto"}:
            options = {
                "backend": backend,
                "engine": engine,
                "memory_budget": pool_of(32, args, learns, backend=backend),
            }
            want = run(args, learns, **options)
            for value in (NAN, INF, -1e30):
                dirty = dict(args)
                for name in per_token:
                    if name in args:
                        dirty[name] = args[name].clone()
                        dirty[name][off] = value
                if needs_topk(args):
                    dirty["rollout_topk_ids"] = args["rollout_topk_ids"].masked_fill(off[..., None], 2**40)
                dirty["targets"] = args["targets"].masked_fill(off, 2**40 if value == value else -7)
                got = run(dirty, learns, **options)
                assert_identical(got, want, engine)
                assert not got.grads["hidden"][off].any()


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("name", ["hidden", "advantages", "old_logprobs"])
@pytest.mark.parametrize("loss", ["ppo", "bapo"])
def test_a_nan_that_counts_shows_where_it_does_in_the_recomputed_backward(loss, name, backend):
    """In BAPO it decides the bounds of all tokens."""
    args = batch(loss, v=300, spread=0.8, return_tokens=True)
    row = int(args["mask"].nonzero()[9])
    args["advantages"][row] = 1.0
    args[name] = args[name].clone()
    args[name][row] = NAN
    want = run(args, backend=backend, engine="recompute")
    assert want.out.loss.isnan()
    for learns in (ALL, HIDDEN):
        for engine in set(engines_of(args, learns)) - {"recompute"}:
            for rows in (16, 48, None):
                budget = rows and pool_of(rows, args, learns, backend=backend)
                got = run(args, learns, backend=backend, engine=engine, memory_budget=budget)
                assert_same(got, want, engine)
    if loss == "bapo" and name == "advantages":
        missing = want.grads["hidden"].isnan().all(1)
        assert torch.equal(missing, args["mask"] & (want.out.tokens.coef != 0))
        assert int(missing.sum()) > 30


@pytest.mark.parametrize("backend", FUSED)
def test_sizes_around_a_unit_of_rows(backend):
    for n in (0, 1, 2, 15, 16, 17, 33):
        args = batch("bapo", n=n, d=5, v=40, return_tokens=True, mask=torch.ones(n, dtype=torch.bool))
        want = reference(args)
        for learns in (ALL, HIDDEN):
            for engine in engines_of(args, learns):
                for rows in (16, 32, None):
                    budget = rows and pool_of(rows, args, learns, backend=backend)
                    got = run(args, learns, backend=backend, engine=engine, memory_budget=budget)
                    assert_same(got, want, f"{engine} {n}")
                    assert got.grads["hidden"].shape == (n, 5)


@pytest.mark.parametrize("backend", FUSED)
def test_nothing_counts(backend):
    args = batch("dapo", mask=torch.zeros(150, dtype=torch.bool), kl_coef=0.1, entropy_coef=0.1)
    args["hidden"] = torch.full_like(args["hidden"], NAN)
    for learns in (ALL, HIDDEN):
        for engine in engines_of(args, learns):
            got = run(args, learns, backend=backend, engine=engine)
            assert got.out.loss == 0 and got.out.loss.requires_grad
            for t in got.grads.values():
                assert t is None or not t.any()


@pytest.mark.parametrize("backend", FUSED)
def test_nothing_has_a_gradient(backend, trace):  # noqa: F811
    args = batch("dapo")
    args["advantages"] = torch.zeros_like(args["advantages"])
    for learns in (ALL, HIDDEN):
        for engine in engines_of(args, learns):
            got = run(
                args, learns, backend=backend, engine=engine, memory_budget=pool_of(32, args, learns, backend=backend)
            )
            assert all(t is None or not t.any() for t in got.grads.values())
    assert trace.turned == trace.again == 0


WHOLE = {
    **{
        name: {"loss": bk.losses.get(name)} for name in ("gspo", "luspo", "gmpo", "topr", "vespo", "clip-cov", "kl-cov")
    },
    "top_entropy": {"top_entropy": 0.5},
    "correction": {"correction": bk.TruncatedIS(level="sequence"), "old_logprobs": None},
}


@pytest.mark.parametrize("what", WHOLE)
def test_what_needs_the_whole_batch_refuses_to_keep_products(what):
    args = batch("dapo", n=40, d=5, v=30) | WHOLE[what]
    names = args["loss"].name if "loss" in WHOLE[what] else what if what == "top_entropy" else "TruncatedIS"
    with pytest.raises(ValueError, match=f"one-pass.*{names}"):
        run(args, engine="one-pass")
    want = reference(args)
    for learns in (ALL, HIDDEN):
        for engine in engines_of(args, learns):
            assert_same(run(args, learns, engine=engine), want, engine)


def test_a_registered_loss_is_taken_to_need_the_whole_batch():
    name = "engines-registered"
    bk.losses.register(name, lambda x: -x.advantages * x.ratio - 0.1 * x.sequence_mean(x.logprobs))
    try:
        args = batch(name, layout="padded", v=60)
        with pytest.raises(ValueError, match=f"one-pass.*{name}"):
            run(args, engine="one-pass")
        assert_same(run(args), reference(args))
        assert_same(run(args, HIDDEN, engine="frozen"), reference(args))
    finally:
        bk.losses._LOSSES.pop(name)


@dataclass(frozen=True)
class Liar(Loss):
    """Says that it is token-local, and is not: its coefficients have a mean of the batch."""

    attached: bool = False

    name = "liar"
    token_local = True

    def rule(self, x):
        logprobs = x.logprobs if self.attached else x.logprobs.detach()
        baseline = x.mean(logprobs) if self.attached else x.mean(logprobs).detach()
        if self.attached:
            return TokenLoss(-x.advantages * x.logprobs + (x.logprobs - baseline).square())
        return TokenLoss(x.score(-x.advantages * (logprobs - baseline).exp()))


@dataclass(frozen=True)
class SometimesLiar(Loss):
    """Its coefficients have the batch in them where the advantage is positive only."""

    name = "sometimes-liar"
    token_local = True

    def rule(self, x):
        share = x.mean((x.advantages > 0).to(x.logprobs.dtype))
        return TokenLoss(x.score(torch.where(x.advantages > 0, share, 1.0) * -x.advantages))


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize("rows", POOLS)
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("loss", [Liar(), Liar(True), SometimesLiar()], ids=["value", "gradient", "sometimes"])
def test_a_loss_that_is_wrong_about_its_tokens_is_corrected(loss, backend, rows, entropy_coef, trace):  # noqa: F811
    args = batch(loss, return_tokens=True, entropy_coef=entropy_coef)
    want = reference(args)
    got = run(args, backend=backend, engine="one-pass", memory_budget=pool_of(rows, args, backend=backend))
    assert_same(got, want)
    assert trace.again > 0 and trace.turned > 0
    if isinstance(loss, SometimesLiar):  # only the wrong rows are done again
        assert trace.again <= int((args["mask"] & (args["advantages"] > 0)).sum())


def test_the_small_pool_is_what_the_budget_allows(trace):  # noqa: F811
    args = to(batch("dapo"), torch.float32)
    for rows in (16, 32, 96):
        run(args, engine="one-pass", memory_budget=pool_of(rows, args))
        assert trace.capacity == rows
    with pytest.raises(ValueError, match=r"one-pass.*memory_budget=.*16 rows"):
        run(args, engine="one-pass", memory_budget=pool_of(16, args) - 1)


def test_rows_wait_for_others_before_they_are_multiplied(trace):  # noqa: F811
    """Where few have a gradient, a product with the vocabulary still has as many rows as half of the pool."""
    args = batch("dapo", n=800, d=5, v=60)
    args["advantages"] = args["advantages"].masked_fill(torch.arange(800) % 5 != 0, 0.0)
    run(args, engine="one-pass", memory_budget=pool_of(64, args))
    assert trace.blocks > 9 and trace.turned > 50
    assert (trace.turns - 1) * 32 < trace.turned
