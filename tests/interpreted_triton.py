"""The Triton kernels against fp64, in Triton's interpreter. Collected only by `test_triton_interpreter.py`, which turns it on."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from bapo_kernels.head import chunked
from bapo_kernels.head.chunked import Coefficients, LogitSpec, Needs, Rows, Slice, State, Statistics, Weight, dz_dtype
from bapo_kernels.head.eager import GemmBackend, TorchEpilogues
from bapo_kernels.head.precision import accumulation_dtype
from bapo_kernels.head.triton import tuning
from bapo_kernels.head.triton.epilogues import TritonEpilogues
from bapo_kernels.head.triton.tiles import TileBackend
from bapo_kernels.launching import INTERPRETED, Config

assert INTERPRETED, "run with TRITON_INTERPRET=1"

DESIGNS = {
    "gemm": GemmBackend(TritonEpilogues(), narrow=True),
    "tile": TileBackend(descriptors=False),
    "tma": TileBackend(descriptors=True),
}
TORCH = GemmBackend(TorchEpilogues())
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Case:
    """A head of V columns in slices that end at `cuts`. The sizes leave a remainder against the interpreter's blocks."""

    n: int = 17
    V: int = 129
    D: int = 65
    K: int = 5
    hidden: torch.dtype = F32
    weight: torch.dtype = F32
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    temperature: bool = False
    entropy: bool = True
    cuts: tuple[int, ...] = ()

    @property
    def spec(self) -> LogitSpec:
        return LogitSpec(self.V, self.scale, self.softcap)


ALL = Case(bias=True, scale=0.75, softcap=5.0, temperature=True)
CASES = {
    "one-of-each": Case(n=1, V=1, D=1, K=0),
    "plain": Case(),
    "no-entropy": Case(entropy=False),
    "target-only": Case(K=0),
    "scale": Case(scale=0.75),
    "softcap": Case(softcap=5.0),
    "bias": Case(bias=True),
    "temperature": Case(temperature=True),
    "all": ALL,
    "all-fp64": replace(ALL, hidden=F64, weight=F64),
    "all-bf16": replace(ALL, hidden=BF16, weight=BF16),
    "all-fp16": replace(ALL, hidden=F16, weight=F16),
    "bf16-on-fp32": replace(ALL, hidden=BF16, n=3),
    "fp16-on-bf16": replace(ALL, hidden=F16, weight=BF16, n=3),
    "fp32-on-fp64": replace(ALL, weight=F64, n=3),
    "slices": Case(cuts=(1, 70), bias=True),
    "blocks-filled": Case(n=32, V=64, D=64, K=4),
}


@dataclass
class Problem:
    rows: Rows
    weight: Tensor
    bias: Tensor | None
    coef: Coefficients  # in fp64

    def to_fp64(self) -> "Problem":
        bias = None if self.bias is None else self.bias.double()
        inv = self.rows.inv_temperature
        rows = Rows(self.rows.hidden.double(), self.rows.ids, None if inv is None else inv.double())
        return Problem(rows, self.weight.double(), bias, self.coef)


def make(case: Case) -> Problem:
    g = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=F64)

    hidden, weight = normal(case.n, case.D).to(case.hidden), (0.3 * normal(case.V, case.D)).to(case.weight)
    acc = accumulation_dtype(hidden, weight)
    ids = torch.randint(0, case.V, (case.n, 1 + case.K), generator=g)
    if case.K >= 3:
        ids[0, 2] = -1
        ids[-1, 3] = ids[-1, 2]  # twice among the recorded ids
        ids[-1, 1] = ids[-1, 0]  # the target once more
    inv_temperature = (0.5 + torch.rand(case.n, generator=g, dtype=F64)).to(acc) if case.temperature else None
    bias = normal(case.V).to(acc) if case.bias else None
    coef = Coefficients(normal(case.n), normal(case.n) if case.entropy else None, normal(case.n, 1 + case.K))
    return Problem(Rows(hidden, ids, inv_temperature), weight, bias, coef)


def slices(case: Case, weight: Tensor, bias: Tensor | None):
    edges = (0, *case.cuts, case.V)
    for a, b in pairwise(edges):
        yield Slice(weight[a:b], None if bias is None else bias[a:b], a)


def fold(backend, case: Case, p: Problem) -> State:
    n, acc = case.n, accumulation_dtype(p.rows.hidden, p.weight)
    p = as_operands(backend, p)
    state = State.start(p.rows.ids, case.entropy, acc)
    for part in slices(case, p.weight, p.bias):
        tile = torch.full((n, part.weight.shape[0]), torch.nan, dtype=acc) if backend.tiles[0] else None
        backend.fold(p.rows, part, case.spec, state, tile)
    return state


def dlogits(backend, case: Case, p: Problem, stats: Statistics) -> Tensor:
    acc = accumulation_dtype(p.rows.hidden, p.weight)
    p = as_operands(backend, p)
    entropy = None if p.coef.entropy is None else p.coef.entropy.to(acc)
    coef = Coefficients(p.coef.probability.to(acc), entropy, p.coef.picked.to(acc))
    tiles = []
    for part in slices(case, p.weight, p.bias):
        buffer = torch.full((case.n, part.weight.shape[0]), torch.nan, dtype=acc)
        tiles.append(backend.dlogits(p.rows, part, case.spec, stats, coef, buffer))
        assert tiles[-1].dtype == dz_dtype(p.rows, part, acc)
    return torch.cat(tiles, 1)


def as_operands(backend, p: Problem) -> Problem:
    """As the driver hands them to the backend."""
    acc = accumulation_dtype(p.rows.hidden, p.weight)
    operand = backend.operand(acc, p.rows.hidden.dtype, [p.weight.dtype])
    return replace(p, rows=replace(p.rows, hidden=p.rows.hidden.to(operand)), weight=p.weight.to(operand))


def results(backend, case: Case, p: Problem) -> dict[str, Tensor]:
    stats = fold(backend, case, p).statistics()
    out = {"max": stats.max, "log_sum": stats.log_sum, "entropy": stats.entropy, "logprobs": stats.logprobs}
    return {k: v for k, v in out.items() if v is not None} | {"dz": dlogits(backend, case, p, stats)}


def assert_right(backend, case: Case, p: Problem, got: dict[str, Tensor] | None = None):
    """Within twice the error that PyTorch makes with the same numbers, plus a few roundings; dz in bf16 may be rounded to that once."""
    got = got or results(backend, case, p)
    want = results(TORCH, case, p.to_fp64())
    acc = accumulation_dtype(p.rows.hidden, p.weight)
    upcast = Problem(Rows(p.rows.hidden.to(acc), p.rows.ids, p.rows.inv_temperature), p.weight.to(acc), p.bias, p.coef)
    peer = results(TORCH, case, upcast)
    for name, expected in want.items():
        assert got[name].isnan().equal(expected.isnan()), f"{name}: NaN elsewhere than in the reference"
        allowed = 2 * error(peer[name], expected).max() + 4 * torch.finfo(acc).eps * (1 + finite(expected).abs().max())
        # Triton's interpreter rounds toward zero, where a GPU rounds to the nearest: a whole unit, not half of one.
        rounding = torch.finfo(got[name].dtype).eps if got[name].dtype != acc else 0.0
        assert (error(got[name], expected) <= allowed + rounding * finite(expected).abs()).all(), name


def finite(t: Tensor) -> Tensor:
    return t.nan_to_num(0.0, 0.0, 0.0)


def error(got: Tensor, want: Tensor) -> Tensor:
    difference = torch.where(got == want, 0.0, got.double() - want)  # equal infinities differ by 0
    return difference.nan_to_num(0.0).abs()


def same_bits(a, b) -> bool:
    return torch.equal(a.nan_to_num(7.25), b.nan_to_num(7.25))


@pytest.fixture(params=DESIGNS.values(), ids=DESIGNS.keys())
def backend(request):
    return request.param


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_fp64(backend, case):
    if backend is DESIGNS["tma"]:
        case = replace(case, D=72)  # rows of whole 16 bytes
    p = make(case)
    assert_right(backend, case, p)
    if backend is DESIGNS["tma"]:
        p = as_operands(backend, p)
        assert backend._by_descriptors(p.rows, Slice(p.weight, None, 0))


def test_inputs_with_strides(backend):
    case = replace(ALL, n=3, V=70)
    p = make(case)
    plain = results(backend, case, p)
    wide = torch.zeros(case.n, 2 * case.D)
    wide[:, ::2] = p.rows.hidden
    strided = replace(p, rows=replace(p.rows, hidden=wide[:, ::2]), weight=p.weight.t().contiguous().t())
    got = results(backend, case, strided)
    assert_right(backend, case, p, got)
    if not isinstance(backend, GemmBackend):  # whose bits are its vendor's
        for name, value in got.items():
            assert same_bits(value, plain[name]), name


def test_ids_outside_the_vocabulary_pick_nothing(backend):
    case = Case(n=5, V=40, D=8)
    p = make(case)
    p.rows.ids[:, 0] = torch.tensor([-100, 40, 2**32 + 5, -(2**32) + 5, 5])
    p.rows.ids[:, 1] = p.rows.ids[:, 0]
    state = fold(backend, case, p)
    assert state.picked[:, :2].isnan().tolist() == [[True] * 2] * 4 + [[False] * 2]
    assert_right(backend, case, p)


@pytest.mark.parametrize("backend", [DESIGNS["tile"], DESIGNS["tma"]], ids=["tile", "tma"])
def test_rows_do_not_see_each_other(backend):
    """Blocks of rows, written through views, give the bits of all rows at once. (A GEMM's bits are its vendor's.)"""
    case = replace(ALL, cuts=(52,), D=72)
    p = make(case)
    whole = fold(backend, case, p)
    state = State(*(torch.full_like(t, torch.nan) for t in (whole.max, whole.sum, whole.spread, whole.picked)))
    state.max.fill_(-torch.inf), state.sum.zero_(), state.spread.zero_()
    stats = whole.statistics()
    coef = Coefficients(p.coef.probability.float(), p.coef.entropy.float(), p.coef.picked.float())
    dz = torch.full((case.n, case.V), torch.nan)
    for block in (slice(0, 1), slice(1, 12), slice(12, 17)):
        for part in slices(case, p.weight, p.bias):
            backend.fold(p.rows.rows(block), part, case.spec, state.rows(block))
            out = dz[block, part.first : part.first + part.weight.shape[0]]
            backend.dlogits(p.rows.rows(block), part, case.spec, stats.rows(block), coef.rows(block), out)
    for name in ("max", "sum", "spread", "picked"):
        assert same_bits(getattr(state, name), getattr(whole, name)), name
    assert same_bits(dz, dlogits(backend, case, p, stats))


def test_entropy_changes_no_other_bit(backend):
    case = replace(ALL, n=3)
    p = make(case)
    with_entropy, without = fold(backend, case, p), fold(backend, replace(case, entropy=False), p)
    for name in ("max", "sum", "picked"):
        assert same_bits(getattr(with_entropy, name), getattr(without, name)), name


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_bad_rows_stay_alone(backend):
    case = Case(n=5, K=3)
    p = make(case)
    clean = results(backend, case, p)
    p.rows.hidden[1, 3] = torch.nan
    p.rows.hidden[3, 5] = torch.inf
    broken = results(backend, case, p)
    for name, value in broken.items():
        assert same_bits(value[[0, 2, 4]], clean[name][[0, 2, 4]]), name
        if name != "max":
            assert value[[1, 3]].isnan().all(), name


@pytest.mark.parametrize("cuts", [(), (1, 33, 66)], ids=["one-slice", "slices"])
def test_columns_at_minus_infinity(backend, cuts):
    """A whole first tile, a slice of one column and a target among them."""
    case = Case(n=3, bias=True, cuts=cuts)
    p = make(case)
    p.bias[:34] = -torch.inf
    p.bias[[50, 128]] = -torch.inf
    p.rows.ids[0, :2] = torch.tensor([50, 3])
    p.rows.ids[1, 0] = 60
    assert fold(backend, case, p).picked[0, :2].tolist() == [-torch.inf] * 2
    assert_right(backend, case, p)


def test_nothing_but_minus_infinity(backend):
    case = Case(n=3, V=40, bias=True, cuts=(7,))
    p = make(case)
    p.bias.fill_(-torch.inf)
    state = fold(backend, case, p)
    assert state.max.eq(-torch.inf).all()
    assert state.sum.eq(0).all()
    assert state.spread.eq(0).all()


def test_a_common_offset_cancels(backend):
    case = Case(n=3, bias=True, cuts=(50,))
    p = make(case)
    # Multiples of 1/64, so that 10,000 is added without rounding and whatever differs was lost by the kernels.
    p.rows.hidden, p.weight = (8 * p.rows.hidden).round() / 8, (8 * p.weight).round() / 8
    p.bias = torch.zeros(case.V)
    before = results(backend, case, p)
    p.bias = torch.full((case.V,), 1e4)
    after = results(backend, case, p)
    assert same_bits(after.pop("max"), before.pop("max") + 1e4)
    for name, value in after.items():
        assert same_bits(value, before[name]), name


BLOCKS = {
    "gemm": (
        {"fold_rows": {"BN": 2, "BV": 64, "BP": 2}, "dlogits_rows": {"BN": 4, "BV": 16}, "scatter_grad": {"BK": 1}},
        {"fold_rows": {"BN": 1, "BV": 256, "BP": 8}, "dlogits_rows": {"BN": 1, "BV": 256}, "scatter_grad": {"BK": 8}},
    ),
    "tile": (
        {"fold_tile": {"BN": 32, "BV": 64, "BD": 16}, "gather_logits": {"BK": 2, "BD": 32}, "scatter_grad": {"BK": 1}},
        {"dlogits_tile": {"BN": 16, "BV": 16, "BD": 64}, "merge_partials": {"BN": 2}},
    ),
}


@pytest.mark.parametrize(("design", "which"), [(d, i) for d in BLOCKS for i in (0, 1)])
def test_block_sizes_can_be_forced(design, which):
    case = replace(ALL, n=5)
    configs = {kernel: Config(blocks) for kernel, blocks in BLOCKS[design][which].items()}
    backend = GemmBackend(TritonEpilogues(configs)) if design == "gemm" else TileBackend(configs=configs)
    assert_right(backend, case, make(case))


def test_autotuning_is_asked_for_and_kept(monkeypatch):
    case, backend = Case(n=3, K=0), DESIGNS["tile"]
    p = make(case)
    plain = results(backend, case, p)
    assert not tuning.found
    monkeypatch.setenv("BAPO_KERNELS_AUTOTUNE", "1")
    monkeypatch.setattr(tuning, "CANDIDATES", (Config({"BN": 16, "BV": 16, "BD": 32}),))
    monkeypatch.setattr(tuning, "_seconds", lambda launch, config, _: (launch(config), config.blocks["BV"])[1])
    try:
        assert_right(backend, case, p)
        assert {key[0]: config.blocks["BV"] for key, config in tuning.found.items()} == {
            "fold_tile": 16,
            "dlogits_tile": 16,
        }
        monkeypatch.setattr(tuning, "_seconds", None)  # not measured again
        assert_right(backend, case, p)
    finally:
        tuning.found.clear()
    monkeypatch.delenv("BAPO_KERNELS_AUTOTUNE")
    for name, value in results(backend, case, p).items():
        assert same_bits(value, plain[name]), name


@pytest.mark.parametrize(("K", "bias", "dtype"), [(0, False, BF16), (5, False, F32), (0, True, F32)])
def test_dz_is_rounded_once_and_last(backend, K, bias, dtype):
    """Not before what recorded ids add, nor before a bias's gradient is summed up."""
    case = Case(n=3, D=72, K=K, bias=bias, hidden=BF16, weight=BF16)
    p = make(case)
    got = results(backend, case, p)
    assert got["dz"].dtype == dtype
    assert_right(backend, case, p, got)


def test_in_the_driver(backend):
    case = replace(ALL, n=5, hidden=BF16, weight=BF16, V=60)
    p = make(case)
    both = []
    for one in (backend, GemmBackend(TorchEpilogues(), narrow=True)):
        budget, needs = 1 << 20, Needs(hidden=True, weight=(True,), bias=True)
        weight = Weight.of(p.weight)
        stats = chunked.forward(one, p.rows, weight, p.bias, case.spec, True, budget)
        coef = Coefficients(p.coef.probability.float(), p.coef.entropy.float(), p.coef.picked.float())
        grads = chunked.backward(one, p.rows, stats, coef, weight, p.bias, case.spec, needs, budget)
        both.append((stats.logprobs, stats.entropy, grads.hidden, *grads.weight, grads.bias))
    (*statistics_, d_hidden, d_weight, d_bias), want = both
    for got, expected in zip((*statistics_, d_bias), (*want[:2], want[-1]), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)
    for got, expected in zip((d_hidden, d_weight), want[2:4], strict=True):  # an ulp of a dz may fall the other way
        assert error(got, expected).max() <= 2**-8 * expected.abs().max()
