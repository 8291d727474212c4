"""`exact_bpo_loss`, and how score centering, the gradient of KL(mu || pi), and BPO hang together."""

from itertools import pairwise

import pytest
import torch
from helpers import NAN, integers, normal

import bapo_kernels as bk

N, D, V = 7, 5, 11
EDGES = [0, 3, 3, 7]


def batch():
    logprobs, rollout = -normal(N).abs(), -normal(N, seed=1).abs()
    kl = normal(N, seed=2).abs()
    return logprobs.requires_grad_(), rollout, kl.requires_grad_(), normal(3, seed=3), normal(3, seed=4)


@pytest.mark.parametrize("phi", [2.0, torch.tensor([1.0, 5.0, 3.0])], ids=["number", "per sequence"])
def test_exact_bpo_by_hand(phi):
    logprobs, rollout, kl, rewards, values = batch()
    loss = bk.exact_bpo_loss(logprobs, rollout, kl, rewards, values, cu_seqlens=torch.tensor(EDGES), eta=0.7, phi=phi)
    total, grads = 0.0, [0.0] * N
    for s in (0, 2):  # the sequence between them is empty
        weight = phi if isinstance(phi, float) else float(phi[s])
        rows = range(EDGES[s], EDGES[s + 1])
        delta = 0.7 * float(rewards[s] - values[s]) - sum(float(logprobs[t] - rollout[t] + kl[t]) for t in rows)
        total += weight * delta**2 / 1.4 / 2
        for t in rows:
            grads[t] = -weight * delta / 0.7 / 2
    assert loss.item() == pytest.approx(total)
    loss.backward()
    for leaf in (logprobs, kl):
        torch.testing.assert_close(leaf.grad, torch.tensor(grads, dtype=torch.float64))


def test_exact_bpo_padded_equals_packed_and_ignores_what_is_masked():
    logprobs, rollout, kl, rewards, values = (t.detach() for t in batch())
    packed = bk.exact_bpo_loss(logprobs, rollout, kl, rewards, values, cu_seqlens=torch.tensor(EDGES))
    mask = torch.zeros(3, 5)
    padded = [torch.full((3, 5), NAN, dtype=torch.float64) for _ in range(3)]
    for s, (a, b) in enumerate(pairwise(EDGES)):
        mask[s, : b - a] = 1
        for full, t in zip(padded, (logprobs, rollout, kl), strict=True):
            full[s, : b - a] = t[a:b]
    rewards[1], values[1] = NAN, torch.inf  # of the sequence without a token
    leaf = padded[0].requires_grad_()
    loss = bk.exact_bpo_loss(leaf, *padded[1:], rewards, values, mask=mask)
    torch.testing.assert_close(loss, packed)
    loss.backward()
    assert leaf.grad.isfinite().all()
    assert (leaf.grad[mask == 0] == 0).all()


def test_exact_bpo_with_nothing_active():
    logprobs, rollout, kl, rewards, values = batch()
    loss = bk.exact_bpo_loss(logprobs, rollout, kl, rewards[:1], values[:1], mask=torch.zeros(N))
    assert loss == 0
    loss.backward()
    assert (logprobs.grad == 0).all()


def test_exact_bpo_gradcheck():
    logprobs, rollout, kl, rewards, values = batch()
    torch.autograd.gradcheck(
        lambda a, b: bk.exact_bpo_loss(
            a, rollout, b, rewards, values, cu_seqlens=torch.tensor(EDGES), phi=values.abs()
        ),
        (logprobs, kl),
    )


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"eta": 0}, "eta"),
        ({"phi": NAN}, "phi"),
        ({"phi": torch.ones(2)}, "phi"),
        ({"rewards": torch.ones(2)}, "rewards"),
        ({"kl": torch.ones(3)}, "kl"),
    ],
)
def test_mistakes_name_the_argument(change, name):
    logprobs, rollout, kl, rewards, values = batch()
    given = {"kl": kl, "rewards": rewards, "values": values, "cu_seqlens": torch.tensor(EDGES), **change}
    with pytest.raises(ValueError, match=f"^{name} "):
        bk.exact_bpo_loss(logprobs, rollout, **given)


class Heads:
    """A policy and its sampler, and one token of each row."""

    def __init__(self):
        self.hidden, self.weight = normal(N, D).requires_grad_(), normal(V, D, seed=1).requires_grad_()
        self.rollout_hidden = self.hidden.detach() + 0.4 * normal(N, D, seed=2)
        self.targets, self.advantages = integers(V, N, seed=3), normal(N, seed=4)
        self.log_q = (self.rollout_hidden @ self.weight.detach().T).log_softmax(-1)
        self.rollout = self.log_q.gather(1, self.targets[:, None]).squeeze(1)

    def grads(self, loss):
        return torch.autograd.grad(loss, (self.hidden, self.weight))

    def centered(self, ids):
        return bk.linear_policy_loss(
            self.hidden, self.weight, self.targets, self.advantages, loss="score-centering", aggregation="token-sum",
            rollout_logprobs=self.rollout, rollout_topk_ids=ids, rollout_topk_logprobs=self.log_q.gather(1, ids),
        ).loss  # fmt: skip

    def logprobs_and_kl(self):
        logprobs = bk.linear_logprobs(self.hidden, self.weight, self.targets).logprobs
        return logprobs, bk.linear_kl(self.hidden, self.weight, self.rollout_hidden, self.weight.detach())


def close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11)


def test_full_centering_is_the_gradient_of_logprob_plus_kl():
    heads = Heads()
    everything = torch.arange(V).expand(N, V)
    logprobs, kl = heads.logprobs_and_kl()
    close(heads.grads(heads.centered(everything)), heads.grads(-(heads.advantages * (logprobs + kl)).sum()))


def test_full_centering_is_the_linearised_bpo_residual():
    """Where delta / eta is replaced by R - V = A, the gradient of phi delta^2 / (2 eta) is -phi A grad(sum log pi/mu + KL)."""
    heads = Heads()
    logprobs, kl = heads.logprobs_and_kl()
    advantage = 0.3  # one sequence, far from pi = mu only by second order
    heads.advantages = torch.full((N,), advantage, dtype=torch.float64)
    residual = bk.exact_bpo_loss(
        logprobs, heads.rollout, kl, torch.tensor([advantage]).double(), torch.zeros(1).double()
    )
    delta = advantage - (logprobs - heads.rollout + kl).sum().detach()
    exact = heads.grads(residual)
    everything = torch.arange(V).expand(N, V)
    close([g * advantage / delta for g in exact], heads.grads(heads.centered(everything)))


def test_bpo_without_smoothing_is_centering_on_the_sampled_token():
    heads = Heads()
    unbounded = bk.BPO(smoothing=1e-12, cap=1e9, clip_low=0.999999999, clip_high=1e9)
    bpo = bk.linear_policy_loss(
        heads.hidden,
        heads.weight,
        heads.targets,
        heads.advantages,
        loss=unbounded,
        aggregation="token-sum",
        rollout_logprobs=heads.rollout,
    ).loss
    close(heads.grads(heads.centered(heads.targets[:, None])), heads.grads(bpo))
