"""`linear_kl`: values and gradients against an oracle on materialised logits, and what the head promises."""

import pytest
import torch
from helpers import BACKENDS, FUSED, INF, NAN, assert_bits, integers, normal

import bapo_kernels as bk
from bapo_kernels.head import chunked


class Pair:
    """A policy's head and a sampler's of another width, over the same vocabulary."""

    def __init__(self, n=6, d=7, d2=5, v=300, seed=0, dtype=torch.float64, **options):
        self.hidden = normal(n, d, seed=seed, dtype=dtype).requires_grad_()
        self.weight = normal(v, d, seed=seed + 1, dtype=dtype).requires_grad_()
        self.bias = normal(v, seed=seed + 2, dtype=dtype).requires_grad_()
        self.rollout_hidden, self.rollout_weight = (
            normal(n, d2, seed=seed + 3).to(dtype),
            normal(v, d2, seed=seed + 4).to(dtype),
        )
        self.rollout_bias = normal(v, seed=seed + 5, dtype=dtype)
        self.options = options

    def run(self, backend, **options):
        return bk.linear_kl(
            self.hidden, self.weight, self.rollout_hidden, self.rollout_weight,
            bias=self.bias, rollout_bias=self.rollout_bias, backend=backend, **{**self.options, **options},
        )  # fmt: skip

    def grads(self):
        return [t.grad for t in (self.hidden, self.weight, self.bias)]

    def oracle(self):
        def log_probs(h, w, b):
            z = (h.double() @ w.double().T + b.double()) * self.options.get("logit_scale", 1.0)
            if cap := self.options.get("softcap"):
                z = cap * torch.tanh(z / cap)
            t = self.options.get("temperature", 1.0)
            z = z / (t[:, None] if isinstance(t, torch.Tensor) else t)
            return z[:, : self.options.get("vocab_size")].log_softmax(-1)

        log_p = log_probs(self.hidden, self.weight, self.bias)
        log_q = log_probs(self.rollout_hidden, self.rollout_weight, self.rollout_bias)
        return (log_q.exp() * (log_q - log_p)).sum(-1)


OPTIONS = {
    "plain": {},
    "all": {"softcap": 4.0, "logit_scale": 0.7, "temperature": normal(6, seed=9).abs() + 0.5, "vocab_size": 290},
    "temperature": {"temperature": 1.7},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("columns", [4096, 64], ids=["one slice", "many slices"])
def test_values_and_gradients(backend, options, columns, monkeypatch):
    monkeypatch.setattr(chunked, "MAX_COLUMNS", columns)
    upstream = torch.where(integers(3, 6) > 0, normal(6, seed=8), 0.0)
    ours, oracle = Pair(**OPTIONS[options]), Pair(**OPTIONS[options])
    kl, want = ours.run(backend), oracle.oracle()
    torch.testing.assert_close(kl, want, rtol=1e-10, atol=1e-12)
    assert (kl >= 0).all()
    (kl * upstream).sum().backward()
    (want * upstream).sum().backward()
    for a, b in zip(ours.grads(), oracle.grads(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backend", FUSED)
def test_fp32_is_as_exact_as_pytorch(backend):
    pair = Pair(n=200, d=33, d2=20, v=1000, dtype=torch.float32)
    exact = pair.oracle().detach()
    ours, theirs = ((pair.run(b).double() - exact).square().mean().sqrt() for b in (backend, "reference"))
    assert ours <= 2 * theirs


@pytest.mark.parametrize("backend", FUSED)
def test_rows_across_blocks(backend, monkeypatch):
    monkeypatch.setenv("BAPO_KERNELS_MEMORY_BUDGET", "1")
    pair = Pair(n=70)
    torch.testing.assert_close(pair.run(backend), pair.oracle(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_heads_have_no_divergence(backend):
    pair = Pair(d=5, d2=5)
    pair.rollout_hidden, pair.rollout_weight, pair.rollout_bias = (
        pair.hidden,
        pair.weight,
        pair.bias,
    )  # constants even so
    kl = pair.run(backend)
    assert kl.abs().max() < 1e-12
    kl.sum().backward()
    assert max(g.abs().max() for g in pair.grads()) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("side", ["bias", "rollout_bias"])
def test_a_common_offset_changes_nothing(backend, side):
    pair = Pair(dtype=torch.float32)
    want = pair.oracle().detach()
    with torch.no_grad():
        getattr(pair, side).add_(4096.0)
    torch.testing.assert_close(pair.run(backend).double(), want, rtol=2e-3, atol=2e-3)  # the bias itself was rounded


@pytest.mark.parametrize("backend", BACKENDS)
def test_minus_infinity(backend):
    pair = Pair(v=300)
    with torch.no_grad():
        pair.rollout_bias[:150] = -INF  # the sampler never makes them: their part is 0
    want = pair.oracle().detach().nan_to_num()  # 0 * inf in the oracle
    log_p = (pair.hidden @ pair.weight.T + pair.bias).log_softmax(-1).detach()
    log_q = (pair.rollout_hidden @ pair.rollout_weight.T + pair.rollout_bias).log_softmax(-1)[:, 150:]
    want = (log_q.exp() * (log_q - log_p[:, 150:])).sum(-1)
    kl = pair.run(backend)
    torch.testing.assert_close(kl.detach(), want, rtol=1e-10, atol=1e-12)
    kl.sum().backward()
    assert all(g.isfinite().all() for g in pair.grads())
    with torch.no_grad():
        pair.bias[200] = -INF  # the policy cannot make what the sampler does
    assert (pair.run(backend) == INF).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_rows_are_absent(backend):
    mask = torch.tensor([1, 0, 1, 1, 0, 1])
    clean, garbage = Pair(), Pair()
    with torch.no_grad():
        garbage.hidden[1], garbage.rollout_hidden[4] = NAN, INF
        clean.hidden[1], clean.rollout_hidden[4] = 0.0, 0.0
    results = []
    for pair in (clean, garbage):
        kl = pair.run(backend, mask=mask)
        kl.sum().backward()
        results.append((kl.detach(), *pair.grads()))
    for a, b in zip(*results, strict=True):
        assert_bits(a, b)
    assert results[0][0][1] == 0
    assert (results[0][1][mask == 0] == 0).all()


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("learn", range(8))
def test_frozen_operands(backend, learn):
    pair, flags = Pair(), [bool(learn & 1 << i) for i in range(3)]
    for t, flag in zip((pair.hidden, pair.weight, pair.bias), flags, strict=True):
        t.requires_grad_(flag)
    kl = pair.run(backend)
    assert kl.requires_grad == any(flags)
    if any(flags):
        kl.sum().backward()
    assert [g is not None for g in pair.grads()] == flags


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_do(backend):
    for pair, mask in ((Pair(n=0), None), (Pair(), torch.zeros(6))):
        kl = pair.run(backend, mask=mask)
        assert (kl == 0).all()
        kl.sum().backward()
        assert all((g == 0).all() for g in pair.grads())


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"rollout_hidden": normal(5, 5)}, "rollout_hidden"),
        ({"rollout_weight": normal(299, 5), "rollout_bias": None}, "rollout_weight"),
        ({"rollout_weight": normal(300, 4)}, "rollout_weight"),
        ({"rollout_bias": normal(299)}, "rollout_bias"),
        ({"hidden": None}, "hidden"),
        ({"bias": normal(3)}, "bias"),
    ],
)
def test_mistakes_name_the_argument(change, name):
    pair = Pair()
    for key, value in change.items():
        setattr(pair, key, value)
    with pytest.raises(ValueError, match=rf"^{name} "):
        pair.run("torch")


@pytest.mark.parametrize(
    ("option", "value"),
    [("tp_group", 1), ("temperature", 0), ("vocab_size", 301), ("backend", "x"), ("mask", torch.ones(5))],
)
def test_bad_options_are_refused(option, value):
    with pytest.raises(ValueError, match=option):
        Pair().run(**{"backend": "torch", option: value})


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_do_not_depend_on_their_number(backend, dtype):
    pair = Pair(n=37, d=65, v=1000, dtype=dtype)
    whole = pair.run(backend)
    for rows in (slice(0, 1), slice(3, 4), slice(5, 22)):
        part = bk.linear_kl(
            pair.hidden[rows], pair.weight, pair.rollout_hidden[rows], pair.rollout_weight,
            bias=pair.bias, rollout_bias=pair.rollout_bias, backend=backend,
        )  # fmt: skip
        assert_bits(part, whole[rows])


def test_16_bit_heads_are_multiplied_as_they_are_where_that_is_exact(monkeypatch):
    """As on a GPU: the same numbers, but that dz is rounded to bf16 once."""
    from bapo_kernels.head import divergence

    dtype = torch.bfloat16
    hidden, weight = normal(7, 12, seed=1).to(dtype), normal(301, 12, seed=2).to(dtype)
    rollout, other = normal(7, 9, seed=3).to(dtype), normal(301, 9, seed=4).to(dtype)

    def run():
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        kl = bk.linear_kl(*leaves, rollout, other, backend="torch")
        return kl.detach(), *torch.autograd.grad((kl * normal(7, seed=5)).sum(), leaves)

    kl, *want = run()
    seen = []
    multiply = divergence.multiply
    monkeypatch.setattr(divergence, "multiply", lambda a, b, out: (seen.append(a.dtype), multiply(a, b, out)))
    monkeypatch.setattr(divergence, "multiplies_narrow", lambda device: True)
    narrow_kl, *got = run()
    assert set(seen) == {dtype}
    torch.testing.assert_close(narrow_kl, kl, rtol=1e-5, atol=1e-6)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b.double()).abs().max() <= 2**-7 * b.double().abs().max()
