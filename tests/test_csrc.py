"""The compiled epilogues against fp64 PyTorch, on every instruction set that this machine has.

An error in fp32 may be at most twice what the same formulas in fp32 PyTorch make, or a few roundings.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo_kernels.head.chunked import Coefficients, LogitSpec, Rows, Slice, State, Statistics

epilogues = pytest.importorskip("bapo_kernels._epilogues", reason="the extension is not built (no C++ compiler?)")
from bapo_kernels.head.cpu import CpuEpilogues  # noqa: E402

INF = float("inf")
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
SHAPES = [(0, 5), (1, 1), (3, 7), (5, 65), (4, 129), (2, 4099)]
LOGITS = {  # bias, scale, softcap, temperature
    "plain": (False, 1.0, 0.0, False),
    "bias": (True, 1.0, 0.0, False),
    "scale": (False, -0.7, 0.0, False),
    "temperature": (False, 1.0, 0.0, True),
    "softcap": (False, 1.0, 5.0, False),
    "all": (True, 1.3, 5.0, True),
}


@pytest.fixture(params=epilogues.available_isas(), autouse=True)
def isa(request):
    before = epilogues.isa()
    epilogues.set_isa(request.param)
    yield request.param
    epilogues.set_isa(before)


@pytest.fixture(params=DTYPES.values(), ids=DTYPES)
def dtype(request):
    return request.param


class Problem:
    """A row block of logits, cut into chunks of columns, with ids and coefficients."""

    def __init__(self, shape, logits="plain", dtype=torch.float32, seed=0, ids=None, chunks=None):
        n, w = shape
        has_bias, self.scale, self.softcap, has_temperature = LOGITS[logits]
        rng = torch.Generator().manual_seed(seed)
        normal = lambda *size: torch.randn(*size, generator=rng, dtype=torch.float64).to(dtype)  # noqa: E731
        self.z = normal(n, w) * 3
        self.bias = normal(w) if has_bias else None
        self.inv_temperature = normal(n).abs() + 0.5 if has_temperature else None
        self.ids = torch.randint(0, w, (n, 3), generator=rng) if ids is None else ids
        self.b, self.c = normal(n, self.ids.shape[1]), normal(n)  # gradients of log-probs, entropy
        self.chunks = chunks or [(0, w)]
        self.padding, self.buffers = 0, []  # tiles are cut out of buffers with so many more columns

    def logits(self, dtype, z=None) -> Tensor:
        x = (self.z if z is None else z).to(dtype)
        if self.bias is not None:
            x = x + self.bias.to(dtype)
        x = x * self.scale
        if self.softcap:
            x = self.softcap * torch.tanh(x / self.softcap)
        if self.inv_temperature is not None:
            x = x * self.inv_temperature.to(dtype)[:, None]
        return x

    def expected(self, dtype):
        """Log-probs at ids, entropy, gradient of sum(b * logprob) + sum(c * entropy) with respect to z."""
        z = self.z.to(dtype).requires_grad_()
        logp = self.logits(dtype, z).log_softmax(1)
        picked, entropy = logp.gather(1, self.ids), -(logp.exp() * logp.clamp(min=-1e30)).sum(1)
        loss = (picked * self.b.to(dtype)).sum() + (entropy * self.c.to(dtype)).sum()
        return picked.detach(), entropy.detach(), torch.autograd.grad(loss, z)[0]

    def _tile(self, first, last) -> Tensor:
        buffer = torch.full((len(self.z), last - first + self.padding), 77.0, dtype=self.z.dtype)
        self.buffers.append(buffer)
        return buffer[:, : last - first].copy_(self.z[:, first:last])

    def _common(self, z, first, last):
        bias = None if self.bias is None else self.bias[first:last].contiguous()
        return z, bias, self.scale, self.softcap, self.inv_temperature, self.ids, first

    def fold(self, spread=True, threads=1):
        """(max, sum, spread, picked) after all chunks."""
        n, like = len(self.z), {"dtype": self.z.dtype}
        state = torch.full((n,), -INF, **like), torch.zeros(n, **like), torch.zeros(n, **like) if spread else None
        picked = torch.full(self.ids.shape, math.nan, **like)
        for first, last in self.chunks:
            epilogues.fold(*self._common(self._tile(first, last), first, last), *state, picked, threads)
        return *state, picked

    def dlogits(self, max, log_sum, entropy, threads=1, with_entropy=True):
        out = []
        for first, last in self.chunks:
            z = self._tile(first, last)
            weights = (self.b.sum(1), self.c, entropy) if with_entropy else (self.b.sum(1), None, None)
            epilogues.dlogits(*self._common(z, first, last), max, log_sum, *weights, self.b, threads)
            out.append(z)
        return torch.cat(out, 1)

    def actual(self):
        m, s, u, picked = self.fold()
        log_sum = s.log()
        entropy = log_sum - u / s
        return (picked - m[:, None]) - log_sum[:, None], entropy, self.dlogits(m, log_sum, entropy)


def assert_as_good_as_torch(p: Problem):
    names = "log-prob", "entropy", "gradient"
    exact, eager = p.expected(torch.float64), p.expected(p.z.dtype)
    for name, got, right, torch_own in zip(names, p.actual(), exact, eager, strict=True):
        if right.numel() == 0:
            assert got.shape == right.shape
            continue
        error, own = (got.double() - right).abs().max(), (torch_own.double() - right).abs().max()
        roundings = 8 * torch.finfo(p.z.dtype).eps * max(1.0, right.abs().max().item())
        assert error <= 2 * own + roundings, f"{name}: error {error:.3g}, torch {own:.3g}"


def same_bits(a, b):
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None]
    return all(torch.equal(x.nan_to_num(12345.0), y.nan_to_num(12345.0)) for x, y in pairs)


# ---- values


@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape, logits, dtype):
    assert_as_good_as_torch(Problem(shape, logits, dtype))


@pytest.mark.parametrize("logits", ["plain", "all"])
def test_uneven_chunks(logits, dtype):
    edges = [0, 1, 8, 73, 74, 330, 1000]
    assert_as_good_as_torch(Problem((5, 1000), logits, dtype, chunks=list(pairwise(edges))))


def test_without_entropy(dtype):
    p = Problem((4, 300), "all", dtype)
    p.c.zero_()
    m, s, _, _ = p.fold(spread=False)
    got = p.dlogits(m, s.log(), None, with_entropy=False)
    assert torch.allclose(got.double(), p.expected(torch.float64)[2], rtol=0, atol=40 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("logits", LOGITS)
def test_spread_does_not_change_the_other_statistics(logits):
    p = Problem((6, 517), logits, chunks=[(0, 260), (260, 517)])
    m, s, _, picked = p.fold(spread=True)
    assert same_bits((m, s, picked), (r := p.fold(spread=False))[:2] + r[3:])


def test_common_offset_changes_nothing():
    p = Problem((5, 700), chunks=[(0, 300), (300, 700)])
    p.z = (p.z * 256).round() / 256  # so that adding 1e4 is exact
    m, s, u, picked = p.fold()
    gradient = p.dlogits(m, s.log(), s.log() - u / s)
    p.z = p.z + 1e4
    m2, s2, u2, picked2 = p.fold()
    assert same_bits((m + 1e4, s, u, picked + 1e4), (m2, s2, u2, picked2))
    assert same_bits((gradient,), (p.dlogits(m2, s2.log(), s2.log() - u2 / s2),))


@pytest.mark.parametrize("width", [1, 3, 16, 70])
def test_forward_and_backward_see_the_same_logit(width):
    """One finite column: p is exactly 1 only if the backward's logit has the bits of the forward's maximum."""
    n = 200
    p = Problem((n, width), "temperature", ids=torch.full((n, 1), -1))
    p.scale, p.bias = 1.37, torch.full((width,), -INF)
    p.z, p.bias[width // 2] = p.z * 50, 0.1
    m, s, u, _ = p.fold()
    assert torch.equal(s, torch.ones(n))
    assert torch.equal(u, torch.zeros(n))
    p.b = torch.ones(n, 1)
    wanted = torch.zeros(n, width)
    wanted[:, width // 2] = -(torch.tensor(p.scale) * p.inv_temperature)
    assert torch.equal(p.dlogits(m, s.log(), s.log()), wanted)


# ---- infinities and NaN


def test_minus_infinity_columns_and_blocks(dtype):
    p = Problem((4, 200), "bias", dtype, chunks=[(0, 40), (40, 57), (57, 130), (130, 200)])
    p.bias[:57] = -INF  # the first two blocks hold nothing else
    p.bias[140:150] = -INF
    p.ids = p.ids % 50 + 60
    assert_as_good_as_torch(p)
    gradient = p.actual()[2]
    assert torch.count_nonzero(gradient[:, p.bias == -INF]) == 0


def test_row_of_minus_infinity_is_not_nan():
    p = Problem((3, 70), chunks=[(0, 33), (33, 70)])
    p.z[1] = -INF
    m, s, u, _ = p.fold()
    assert (m[1], s[1], u[1]) == (-INF, 0.0, 0.0)
    assert torch.isfinite(torch.stack([m, s, u])[:, [0, 2]]).all()


@pytest.mark.parametrize("bad", [math.nan, INF], ids=str)
@pytest.mark.parametrize("column", [0, 5, 63, 64, 100, 255, 258, 259])
@pytest.mark.parametrize("logits", ["plain", "bias"])
def test_nan_and_infinity_show_in_their_row_only(bad, column, logits):
    p = Problem((3, 260), logits, chunks=[(0, 130), (130, 260)])
    clean = p.fold()
    p.z[1, column] = bad
    got = p.fold()
    assert got[1][1].isnan()
    assert got[2][1].isnan()
    assert same_bits([t[[0, 2]] for t in clean], [t[[0, 2]] for t in got])


def test_nan_among_minus_infinity_shows():
    p = Problem((1, 20))
    p.z[:] = -INF
    p.z[0, 7] = math.nan
    assert p.fold()[1].isnan().all()


# ---- memory and ids


@pytest.mark.parametrize("width", [1, 63, 100])
def test_row_stride(width):
    p, padded = Problem((5, width), "all"), Problem((5, width), "all")
    padded.padding = 9
    assert same_bits(p.actual(), padded.actual())
    assert all((buffer[:, width:] == 77.0).all() for buffer in padded.buffers)


def test_ids_repeated_absent_and_outside():
    ids = torch.tensor([[3, 3, -1, 100], [0, 99, -100, 50], [-1, -1, -1, 2**40]])
    p = Problem((3, 100), ids=ids, chunks=[(0, 50), (50, 100)])
    m, s, u, picked = p.fold()
    inside = (ids >= 0) & (ids < 100)
    x = p.logits(torch.float32).gather(1, ids.clamp(0, 99))
    assert torch.equal(picked[inside], x[inside])
    assert picked[~inside].isnan().all()

    without = Problem((3, 100), ids=torch.full((3, 1), -1), chunks=p.chunks)
    without.z, without.c, without.b = p.z, p.c, p.b.sum(1, keepdim=True)
    statistics = m, s.log(), s.log() - u / s
    gradient, expected = p.dlogits(*statistics), without.dlogits(*statistics)
    expected.scatter_add_(1, ids.clamp(0, 99), p.b * inside)
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-6)


def test_no_ids():
    p = Problem((4, 90), "all", ids=torch.zeros(4, 0, dtype=torch.int64))
    got, right = p.actual(), p.expected(torch.float64)
    assert torch.allclose(got[2].double(), right[2], rtol=0, atol=1e-5)


# ---- determinism


@pytest.mark.parametrize("logits", ["plain", "all"])
def test_threads_do_not_change_bits(logits):
    p = Problem((37, 1030), logits)
    one = p.fold(threads=1)
    m, s, u, _ = one
    entropy = s.log() - u / s
    gradient = p.dlogits(m, s.log(), entropy, threads=1)
    for threads in (2, 3):
        assert same_bits(one, p.fold(threads=threads))
        assert same_bits((gradient,), (p.dlogits(m, s.log(), entropy, threads=threads),))


def test_rows_do_not_change_each_other():
    p = Problem((9, 333), "all")
    whole = p.fold()
    for row in (0, 4, 8):
        q = Problem((9, 333), "all")
        one = slice(row, row + 1)
        q.z, q.ids, q.inv_temperature = q.z[one], q.ids[one], q.inv_temperature[one]
        assert same_bits([t[one] for t in whole], q.fold())


# ---- exp and tanh. numpy's longdouble is the judge: fp64 cannot judge fp64


def exp_of(x: Tensor) -> Tensor:
    """exp(x) for x <= 0, as the sum of a row with maximum 0 and one logit."""
    n, like = len(x), {"dtype": x.dtype}
    total = torch.zeros(n, **like)
    none = torch.zeros(n, 0, dtype=torch.int64), 0, torch.zeros(n, **like), total, None, torch.zeros(n, 0, **like), 1
    epilogues.fold(x[:, None].clone(), None, 1.0, 0.0, None, *none)
    return total


def tanh_of(x: Tensor, softcap=1.0) -> Tensor:
    n, like = len(x), {"dtype": x.dtype}
    picked = torch.zeros(n, 1, **like)
    state = torch.full((n,), -INF, **like), torch.zeros(n, **like), None, picked
    epilogues.fold(x[:, None].clone(), None, 1.0, softcap, None, torch.zeros(n, 1, dtype=torch.int64), 0, *state, 1)
    return picked[:, 0]


def ulps(got: Tensor, right: np.ndarray) -> float:
    unit = np.spacing(np.abs(right.astype(got.numpy().dtype)))
    return float(np.max(np.abs(got.numpy().astype(np.longdouble) - right) / unit))


def test_exp_accuracy(dtype):
    end = math.log(torch.finfo(dtype).tiny)
    x = torch.cat([torch.linspace(end, 0, 200_001).double(), -torch.logspace(-30, 0, 20_000).double()])
    x = x.clamp(min=end + 1e-4).to(dtype)
    assert ulps(exp_of(x), np.exp(x.numpy().astype(np.longdouble))) <= 1.5


def test_exp_at_the_ends(dtype):
    x = torch.tensor([0.0, -0.0, -1e4, -1e30, -INF, math.nan], dtype=dtype)
    assert exp_of(x)[:5].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert exp_of(x)[5].isnan()
    tiny = torch.finfo(dtype).tiny
    subnormal = exp_of(torch.linspace(1.3, 1.0, 1000, dtype=torch.float64).mul(math.log(tiny)).to(dtype))
    assert ((subnormal >= 0) & (subnormal <= tiny * 1.0001)).all()


def test_tanh_accuracy(dtype):
    magnitude = torch.cat([torch.logspace(-30, 2, 100_000), torch.linspace(0, 10, 100_000)]).double()
    x = torch.cat([magnitude, -magnitude]).to(dtype)
    assert ulps(tanh_of(x), np.tanh(x.numpy().astype(np.longdouble))) <= 4
    assert torch.equal(tanh_of(-x), -tanh_of(x))
    assert tanh_of(torch.tensor([INF, -INF], dtype=dtype)).tolist() == [1.0, -1.0]


def test_gradient_where_softcap_saturates():
    """1 - tanh^2 keeps its relative accuracy where tanh rounds to 1."""
    p = Problem((1, 64), "softcap", ids=torch.zeros(1, 1, dtype=torch.int64))
    p.z = torch.linspace(20, 60, 64)[None]
    right = p.expected(torch.float64)[2][0, 1:]
    m, s, u, _ = p.fold()
    got = p.dlogits(m, s.log(), s.log() - u / s)[0, 1:]
    assert ((got - right).abs() <= 1e-4 * right.abs()).all()


# ---- the binding


@pytest.mark.parametrize("logits", ["plain", "all"])
def test_backend_class(logits, dtype):
    p = Problem((6, 130), logits, dtype)
    m, s, u, picked = p.fold()
    n, like = 6, {"dtype": dtype}
    spec = LogitSpec(vocab_size=130, scale=p.scale, softcap=p.softcap or None)
    bias = None if p.bias is None else torch.nn.Parameter(p.bias)
    backend = CpuEpilogues()
    zero = torch.zeros(n, **like)
    state = State(zero - INF, zero.clone(), zero.clone(), torch.full((n, 3), math.nan, **like))
    rows, part = Rows(torch.zeros(n, 0), p.ids, p.inv_temperature), Slice(torch.zeros(130, 0), bias, 0)
    backend.fold(p.z.clone(), rows, part, spec, state)
    assert same_bits((m, s, u, picked), (state.max, state.sum, state.spread, state.picked))

    entropy = s.log() - u / s
    z = p.z.clone()
    stats, coef = Statistics(m, s.log(), entropy, picked), Coefficients(p.b.sum(1), p.c, p.b)
    backend.dlogits(z, rows, part, spec, stats, coef, z)
    assert same_bits((z,), (p.dlogits(m, s.log(), entropy),))


def test_mistakes_are_refused():
    z, ids, v = torch.zeros(4, 10), torch.zeros(4, 1, dtype=torch.int64), torch.zeros(4)

    def fold(z=z, bias=None, ids=ids, max=v, picked=v[:, None]):
        epilogues.fold(z, bias, 1.0, 0.0, None, ids, 0, max, v.clone(), None, picked, 1)

    fold()
    for wrong in ({"max": torch.zeros(3)}, {"bias": torch.zeros(9)}, {"ids": ids[:2]}, {"picked": torch.zeros(4, 2)}):
        with pytest.raises(ValueError, match="length"):
            fold(**wrong)
    with pytest.raises(ValueError, match="stride"):
        fold(z=torch.zeros(10, 4).t())
    for wrong in ({"max": v.double()}, {"ids": ids.int()}, {"max": torch.zeros(8)[::2]}, {"z": z.bfloat16()}):
        with pytest.raises(TypeError):  # never a silent copy: results would be lost in it
            fold(**wrong)
    with pytest.raises(ValueError, match="needs entropy"):
        epilogues.dlogits(z, None, 1.0, 0.0, None, ids, 0, v, v, v, v, None, torch.zeros(4, 1), 1)
