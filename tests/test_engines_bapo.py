"""BAPO on the one-pass engine: coefficients that the ends of the bounds leave open until the whole batch is known."""

import pytest
import torch
from engine_batches import (
    HIDDEN,
    Trace,
    assert_same,
    batch,
    pool_of,
    reference,
    run,
    trace,  # noqa: F401
)
from helpers import FUSED

import bapo_kernels as bk

FORMS = {
    "paper": {},
    "signed": {"contribution": "signed"},
    "ratio": {"contribution": "ratio"},
    "gradient": {"measure": "gradient"},
    "gradient, low first": {"measure": "gradient", "order": "low-first"},
    "unweighted": {"weighting": "none"},
    "dual clip": {"dual_clip": 1.5},
    "dual clip under c_low": {"dual_clip": 1.1, "c_low": (0.6, 1.14), "measure": "gradient"},
    "authors' code": {
        "contribution": "ratio", "order": "low-first", "weighting": "none", "dual_clip": 3.0, "measure": "gradient"
    },
}  # fmt: skip


def spread_batch(seed: int = 0, **options) -> dict:
    """Ratios over all of the grids and beyond; as many bad tokens as good ones."""
    args = batch("bapo", v=300, seed=seed, spread=0.9, return_tokens=True, **options)
    args["rollout_logprobs"] = args["old_logprobs"]
    return args


def contribution(args: dict, form: dict, end: int, **changed) -> float:
    """With the bounds at their start (0) or end (1)."""
    loss = bk.BAPO(**form)
    loss = bk.BAPO.fixed(loss.c_low[end], loss.c_high[end], **{k: v for k, v in form.items() if k[:2] != "c_"})
    return float(reference(args | {"loss": loss} | changed).out.metrics["contribution"])


def undecided(args: dict, loss: bk.BAPO, ratio) -> int:
    """Active tokens between the ends of the bounds."""
    a, m = args["advantages"], args["mask"]
    high = (a > 0) & (ratio > loss.c_high[0]) & (ratio <= loss.c_high[1])
    low = (a < 0) & (ratio >= loss.c_low[0]) & (ratio < loss.c_low[1])
    if loss.dual_clip is not None:
        low &= ratio <= loss.dual_clip
    return int(((high | low) & m).sum())


@pytest.mark.parametrize("where", ["start", "inside", "end"])
@pytest.mark.parametrize("form", FORMS)
def test_bounds_wherever_the_search_ends(form, where, trace: Trace):  # noqa: F811
    backend = FUSED[len(form + where) % 2]
    args, form = spread_batch(), FORMS[form]
    ends = [contribution(args, form, end) for end in (0, 1)]
    assert ends[0] < ends[1]
    target = {"start": 0.0, "inside": 0.75 * ends[0] + 0.25 * ends[1], "end": ends[1] + 1.0}[where]
    loss = args["loss"] = bk.BAPO(target=target, **form)
    want = reference(args)
    found = [float(want.out.metrics[k]) for k in ("c_low", "c_high")]
    at = [found == pytest.approx([loss.c_low[end], loss.c_high[end]]) for end in (0, 1)]
    assert at == [where == "start", where == "end"]

    open_tokens = undecided(args, loss, want.out.tokens.ratio)
    assert open_tokens >= 15
    for rows in (16, 48, 96):
        got = run(args, backend=backend, engine="one-pass", memory_budget=pool_of(rows, args, backend=backend))
        assert_same(got, want, f"{rows} rows")
        # The last block is never asked for, and stays.
        assert trace.blocks > 1 and open_tokens - rows <= trace.undecided <= open_tokens + rows
        if rows == 16:
            assert trace.undecided > 0 and trace.turned > 0
            trained = int(((want.out.tokens.coef != 0) & args["mask"]).sum())
            assert trace.turned + trace.again == trained  # each row with a gradient once, whoever makes it
            assert trace.again > 0 or where != "end"
    assert_same(run(args, HIDDEN, backend=backend, engine="frozen"), want, "frozen")


def test_a_pool_with_room_for_the_undecided_makes_no_logits_again(trace: Trace):  # noqa: F811
    args = spread_batch(n=600)
    args["loss"] = bk.BAPO(target=10.0)
    open_tokens = undecided(args, args["loss"], reference(args).out.tokens.ratio)
    rows = -(-2 * open_tokens // 16) * 16 + 32
    assert rows < int(args["mask"].sum())
    run(args, engine="one-pass", memory_budget=pool_of(rows, args))
    assert trace.blocks > 1 and trace.undecided > 0 and trace.again == 0


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("kind", ["float", "tensor", "half tensor"])
def test_fixed_bounds(kind, backend, trace: Trace):  # noqa: F811
    args = spread_batch()
    bounds = {
        "float": (0.8, 1.3),
        "tensor": (torch.tensor(0.8, dtype=torch.float64), torch.tensor(1.3, dtype=torch.float64)),
        "half tensor": (torch.tensor(0.75, dtype=torch.bfloat16), 1.3),
    }[kind]
    args["loss"] = bk.BAPO.fixed(*bounds)
    want = reference(args)
    for rows in (16, 48, None):
        got = run(args, backend=backend, engine="one-pass", memory_budget=rows and pool_of(rows, args, backend=backend))
        assert_same(got, want, f"{rows} rows")
        assert trace.again == 0
    assert float(want.out.metrics["c_low"]) == pytest.approx(float(bounds[0]))


@pytest.mark.parametrize("backend", FUSED)
def test_one_bound_moves_and_the_other_is_a_tensor(backend):
    args = spread_batch()
    low = torch.tensor(0.7, dtype=torch.float64)
    args["loss"] = bk.BAPO(c_low=(low, low), target=10.0)
    want = reference(args)
    assert_same(run(args, backend=backend, engine="one-pass", memory_budget=pool_of(32, args, backend=backend)), want)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("seed", range(4))
def test_with_everything_else(seed, backend):
    """KL, entropy, correction and a packed layout beside bounds that move."""
    options = {"kl_coef": 0.1, "entropy_coef": 0.02, "correction": bk.TruncatedIS(cap=1.2), "layout": "packed"}
    args = batch("bapo", v=300, seed=seed, spread=0.8, return_tokens=True, **options)
    if seed % 2:
        args["correction"] = bk.TruncatedIS(cap=1.2, level="sequence")
    args["loss"] = bk.BAPO(target=sum(contribution(args, {}, end) for end in (0, 1)) / 2)
    want = reference(args)
    for rows in (16, 48):
        got = run(args, backend=backend, engine="one-pass", memory_budget=pool_of(rows, args, backend=backend))
        assert_same(got, want, f"{rows} rows")
