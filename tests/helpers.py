"""Shared by the tests: random problems, and the head written down independently of the package, on materialised logits."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

import bapo_kernels as bk
from bapo_kernels.head.rows import Selection

FUSED = ("torch", "cpu")
BACKENDS = (*FUSED, "reference")
INF = float("inf")
NAN = float("nan")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=generator(seed))


def as_under_capture(monkeypatch) -> None:
    """While a CUDA graph is captured rows are masked, as the host may not learn how many there are."""
    monkeypatch.setattr(Selection, "of", classmethod(lambda cls, wanted: cls(wanted.shape[0], mask=wanted)))


@dataclass
class Problem:
    """Inputs of the head. `leaves` are hidden, weight and bias (or None)."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    options: dict = field(default_factory=dict)

    @classmethod
    def random(cls, n=5, d=7, v=13, *, seed=0, dtype=torch.float64, bias=True, logits=2.0, layout=None, k=0, **options):
        """Logits of about the size `logits`; with k > 0 also recorded ids, some of them padding."""
        layout = (n,) if layout is None else layout
        hidden = normal(*layout, d, seed=seed, dtype=dtype)
        weight = (normal(v, d, seed=seed + 1) * logits / d**0.5).to(dtype)
        vocab = options.get("vocab_size") or v
        if k:
            ids = integers(vocab, *layout, k, seed=seed + 4)
            options["topk_ids"] = torch.where(integers(4, *layout, k, seed=seed + 5) == 0, -1, ids)
        return cls(
            hidden,
            weight,
            normal(v, seed=seed + 2, dtype=dtype) if bias else None,
            integers(vocab, *layout, seed=seed + 3),
            options,
        )

    @property
    def leaves(self) -> tuple[Tensor | None, ...]:
        return self.hidden, self.weight, self.bias

    def to(self, dtype: torch.dtype) -> "Problem":
        """The same numbers in another dtype."""
        options = {
            k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in self.options.items()
        }
        return Problem(*(None if t is None else t.detach().to(dtype) for t in self.leaves), self.targets, options)

    def requires_grad(self, *which: bool) -> "Problem":
        """Fresh leaves; `which` of hidden, weight, bias learn (default: all)."""
        flags = which or (True, True, True)
        leaves = (
            None if t is None else t.detach().clone().requires_grad_(f) for t, f in zip(self.leaves, flags, strict=True)
        )
        return Problem(*leaves, self.targets, self.options)

    def run(self, backend: str, entropy: bool = True, **options) -> bk.TokenStatistics:
        return bk.linear_logprobs(
            self.hidden,
            self.weight,
            self.targets,
            backend=backend,
            return_entropy=entropy,
            **{"bias": self.bias, **self.options, **options},
        )

    def oracle(self) -> bk.TokenStatistics:
        return oracle(self.hidden, self.weight, self.targets, bias=self.bias, **self.options)

    def grads(self) -> tuple[Tensor | None, ...]:
        return tuple(None if t is None else t.grad for t in self.leaves)


def oracle(
    hidden,
    weight,
    targets,
    *,
    bias=None,
    mask=None,
    ignore_index=-100,
    temperature=1.0,
    logit_scale=1.0,
    softcap=None,
    vocab_size=None,
    topk_ids=None,
):
    """Materialised logits in the dtype of the inputs, plain autograd. Masked rows are left out before anything is computed."""
    layout = targets.shape
    flat_hidden, flat_targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    rows = [
        i for i, t in enumerate(flat_targets.tolist()) if t != ignore_index and (mask is None or mask.reshape(-1)[i])
    ]
    z = torch.einsum("nd,vd->nv", flat_hidden[rows], weight)
    if bias is not None:
        z = z + bias
    z = z * logit_scale
    if softcap is not None:
        z = torch.tanh(z / softcap) * softcap
    if isinstance(temperature, Tensor):
        per_row = temperature if temperature.shape == layout else temperature.reshape(-1, 1).expand(layout)
        temperature = per_row.reshape(-1)[rows, None]
    z = (z / temperature)[:, :vocab_size]
    log_p = z.log_softmax(-1)

    def place(t: Tensor) -> Tensor:
        full = torch.zeros(flat_targets.shape[0], *t.shape[1:], dtype=t.dtype)
        return full.index_put((torch.tensor(rows, dtype=torch.int64),), t).reshape((*layout, *t.shape[1:]))

    logprobs = place(log_p[torch.arange(len(rows)), flat_targets[rows]])
    present = log_p > -INF
    entropy = place(-(log_p.exp() * torch.where(present, log_p, 0.0)).sum(-1))
    topk = None
    if topk_ids is not None:
        ids = topk_ids.reshape(-1, topk_ids.shape[-1])[rows]
        topk = place(torch.where(ids == -1, 0.0, log_p.gather(1, ids.clamp(min=0))))
    return bk.TokenStatistics(logprobs, entropy, topk)


def weighted(out: bk.TokenStatistics, seed: int = 11) -> Tensor:
    """A scalar that gives every element of every output a gradient of its own."""
    parts = [t for t in out if t is not None]
    return sum((t * normal(*t.shape, seed=seed + i).to(t.dtype)).sum() for i, t in enumerate(parts))


def assert_bits(got: Tensor | None, want: Tensor | None, what: str = "") -> None:
    """Equal to the last bit, NaN included."""
    if got is None or want is None:
        assert got is want, what
        return
    assert got.dtype == want.dtype, f"{what}: {got.dtype} and {want.dtype}"
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} and {tuple(want.shape)}"
    same = (got == want) | (got.isnan() & want.isnan()) if got.is_floating_point() else got == want
    assert bool(same.all()), (
        f"{what}: {int((~same).sum())} of {same.numel()} differ, first {got[~same][0]} and {want[~same][0]}"
    )


def close(got: Tensor, want: Tensor, what: str = "", rtol: float = 1e-9, atol: float = 1e-10) -> None:
    torch.testing.assert_close(
        got, want.to(got.dtype), rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{what}: {m}" if what else m
    )


def errors(got: Tensor, exact: Tensor) -> tuple[float, float]:
    """Largest and root-mean-square error."""
    e = (got.detach().double() - exact.detach().double()).abs()
    return float(e.max()), float(e.square().mean().sqrt())
