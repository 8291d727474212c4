"""Inputs that are not plain contiguous tensors: strides of every kind give the result of a contiguous copy, gradients land in the base."""

import pytest
import torch
from helpers import BACKENDS, Problem, assert_bits, integers, normal, weighted

import bapo_kernels as bk

N, D, V = 20, 7, 129

# Each gives a base that learns and the view of it that is handed in.
HIDDEN = {
    "every other row": lambda: (normal(2 * N, D), lambda b: b[::2]),
    "columns of a wider buffer": lambda: (normal(N, 2 * D), lambda b: b[:, :D]),
    "transposed": lambda: (normal(D, N), lambda b: b.t()),
    "offset": lambda: (normal(N * D + 3), lambda b: b[3:].view(N, D)),
    "one row expanded": lambda: (normal(1, D), lambda b: b.expand(N, D)),
    "one column expanded": lambda: (normal(N, 1), lambda b: b.expand(N, D)),
    "without the last token": lambda: (normal(4, 6, D), lambda b: b[:, :-1]),
    "time first": lambda: (normal(5, 4, D), lambda b: b.transpose(0, 1)),
    "flipped": lambda: (normal(N, D), lambda b: b.flip(0)),
}
WEIGHT = {
    "first rows": lambda: (normal(V + 9, D), lambda b: b[:V]),
    "last rows": lambda: (normal(V + 9, D), lambda b: b[9:]),
    "transposed": lambda: (normal(D, V), lambda b: b.t()),
    "columns of a wider buffer": lambda: (normal(V, 2 * D), lambda b: b[:, D:]),
    "every other column": lambda: (normal(V, 2 * D), lambda b: b[:, ::2]),
    "one row expanded": lambda: (normal(1, D), lambda b: b.expand(V, D)),
}
BIAS = {
    "every other": lambda: (normal(2 * V), lambda b: b[::2]),
    "column": lambda: (normal(V, 3), lambda b: b[:, 1]),
    "expanded": lambda: (normal(1), lambda b: b.expand(V)),
}


def check(which: str, made, backend: str, dtype: torch.dtype, **options) -> None:
    base, view = made[0].to(dtype), made[1]
    problem = Problem.random(N, D, V, dtype=dtype, **options)
    results = []
    for contiguous in (False, True):
        leaf = base.clone().requires_grad_()
        value = view(leaf).contiguous() if contiguous else view(leaf)
        p = problem.requires_grad()
        setattr(p, which, value)
        if which == "hidden" and value.dim() == 3:
            p.targets = p.targets.view(value.shape[:2])
            p.options = {
                k: v.view(*value.shape[:2], -1).squeeze(-1) if torch.is_tensor(v) else v for k, v in p.options.items()
            }
        out = p.run(backend)
        weighted(out).backward()
        results.append((*out, leaf.grad, *(t.grad for t in p.leaves if t is not value and t.is_leaf)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=1e-12 if dtype == torch.float64 else 1e-5
        )
    assert not torch.equal(results[0][3], torch.zeros_like(results[0][3]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize(
    ("which", "name"), [(w, n) for w, c in (("hidden", HIDDEN), ("weight", WEIGHT), ("bias", BIAS)) for n in c]
)
def test_strides_of_what_learns(which, name, masked, dtype, backend):
    made = {"hidden": HIDDEN, "weight": WEIGHT, "bias": BIAS}[which][name]()
    options = {"mask": integers(3, N) > 0} if masked else {}
    check(which, made, backend, dtype, **options)


STRIDED = {
    "every other": lambda t: t.repeat_interleave(2, 0)[::2],
    "column": lambda t: torch.stack([t, t + 1 if t.dtype != torch.bool else ~t], dim=1).select(1, 0),
    "offset": lambda t: torch.cat([t[:3], t])[3:],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stride", STRIDED)
@pytest.mark.parametrize("which", ["targets", "mask", "temperature", "topk_ids", "all"])
def test_strides_of_constants(which, stride, backend):
    problem = Problem.random(N, D, V, k=2, mask=integers(3, N) > 0, temperature=normal(N).abs() + 0.5)
    names = ["targets", "mask", "temperature", "topk_ids"] if which == "all" else [which]
    strided = Problem(*problem.leaves, problem.targets, dict(problem.options))
    for name in names:
        if name == "targets":
            strided.targets = STRIDED[stride](problem.targets)
        else:
            strided.options[name] = STRIDED[stride](problem.options[name])
    got, want = strided.requires_grad(), problem.requires_grad()
    a, b = got.run(backend), want.run(backend)
    weighted(a).backward()
    weighted(b).backward()
    for x, y in zip((*a, *got.grads()), (*b, *want.grads()), strict=True):
        assert_bits(x, y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shifted_labels_and_expanded_mask(backend):
    """The shift that trainers do: hidden[:, :-1] with labels[:, 1:]; one mask value for a whole sequence."""
    hidden, labels = normal(3, 6, D), integers(V, 3, 6)
    weight, mask = normal(V, D), torch.tensor([[1], [0], [1]]).expand(3, 5)
    temperature = torch.tensor([[0.7]], dtype=torch.float64).expand(3, 5)
    got = bk.linear_logprobs(
        hidden[:, :-1], weight, labels[:, 1:], mask=mask, temperature=temperature, return_entropy=True, backend=backend
    )
    want = bk.linear_logprobs(
        hidden[:, :-1].contiguous(),
        weight,
        labels[:, 1:].contiguous(),
        mask=mask.contiguous(),
        temperature=0.7,
        return_entropy=True,
        backend=backend,
    )
    for a, b in zip(got[:2], want[:2], strict=True):
        assert_bits(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_not_written_to(backend):
    problem = Problem.random(
        N, D, V, k=2, mask=integers(3, N) > 0, temperature=normal(N).abs() + 0.5, softcap=3.0, logit_scale=1.2
    )
    kept = [
        t.clone()
        for t in (*problem.leaves, problem.targets, problem.options["topk_ids"], problem.options["temperature"])
    ]
    p = problem.requires_grad()
    out = p.run(backend)
    saved = [t.detach().clone() for t in out]
    weighted(out).backward()
    now = (*(t.detach() for t in p.leaves), p.targets, p.options["topk_ids"], p.options["temperature"])
    for a, b in zip((*now, *(t.detach() for t in out)), (*kept, *saved), strict=True):
        assert_bits(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_policy_loss_with_strided_inputs(backend):
    shape = (4, 5)
    values = {
        k: -normal(*shape, seed=i).abs()
        for i, k in enumerate(("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages"))
    }
    values["mask"] = integers(3, *shape) > 0
    hidden, weight, targets = normal(*shape, D), normal(V, D), integers(V, *shape)

    def run(change):
        h = hidden.clone().requires_grad_()
        given = {k: change(v) for k, v in values.items()}
        out = bk.linear_policy_loss(
            change(h), weight, change(targets), loss="bapo", kl_coef=0.1, entropy_coef=0.1, backend=backend, **given
        )
        out.loss.backward()
        return out.loss, h.grad

    def time_first(t):
        return t.transpose(0, 1).contiguous().transpose(0, 1)

    for a, b in zip(run(time_first), run(lambda t: t), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
