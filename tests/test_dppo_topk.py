"""DPPO's divergences over recorded ids."""

import math

import pytest
import torch
from helpers import NAN, Problem, integers, normal

import bapo_kernels as bk

N, V, K = 12, 20, 4


def batch():
    problem = Problem.random(N, 6, V, bias=False, logits=3.0)
    log_q = (problem.hidden + 0.5 * normal(N, 6, seed=7)) @ problem.weight.T
    log_q = log_q.log_softmax(-1)
    ids = log_q.topk(K).indices
    rollout = log_q.gather(1, problem.targets[:, None]).squeeze(1)
    return problem, log_q, ids, rollout


def by_hand(kind, log_p, log_q, ids):
    p = [math.exp(log_p[v]) for v in ids]
    q = [math.exp(log_q[v]) for v in ids]
    p.append(max(1 - sum(p), 1e-12))
    q.append(max(1 - sum(q), 1e-12))
    if kind == "topk-tv":
        return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    return sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("kind", ["topk-tv", "topk-kl"])
@pytest.mark.parametrize("backend", ["torch", "cpu", "reference"])
def test_against_a_loop(kind, backend):
    problem, log_q, ids, rollout = batch()
    log_p = (problem.hidden @ problem.weight.T).log_softmax(-1)
    advantages = normal(N, seed=3)
    divergences = [by_hand(kind, log_p[i].tolist(), log_q[i].tolist(), ids[i].tolist()) for i in range(N)]
    bound = sum(sorted(divergences)[N // 2 - 1 : N // 2 + 1]) / 2  # between two of them
    out = bk.linear_policy_loss(
        problem.hidden, problem.weight, problem.targets, advantages, loss=bk.DPPO(kind, bound, bound),
        rollout_logprobs=rollout, rollout_topk_ids=ids, rollout_topk_logprobs=log_q.gather(1, ids), return_tokens=True, backend=backend,
    )  # fmt: skip
    flags = []
    for i in range(N):
        p, q, far = float(log_p[i, problem.targets[i]]), float(rollout[i]), divergences[i] > bound
        flags.append(1 if far and p > q and advantages[i] > 0 else -1 if far and p < q and advantages[i] < 0 else 0)
    assert out.tokens.clipped.tolist() == flags
    assert {-1, 0, 1} == set(flags)
    assert ((out.tokens.coef == 0) == (out.tokens.clipped != 0)).all()


def test_padding_and_repetitions_do_not_count(monkeypatch):
    problem, log_q, ids, rollout = batch()
    loss = bk.DPPO("topk-kl", 0.02, 0.02)

    def flags(ids, topk):
        return bk.linear_policy_loss(
            problem.hidden, problem.weight, problem.targets, normal(N, seed=3), loss=loss, rollout_logprobs=rollout,
            rollout_topk_ids=ids, rollout_topk_logprobs=topk, return_tokens=True,
        ).tokens.clipped  # fmt: skip

    plain = flags(ids, log_q.gather(1, ids))
    padded = torch.cat([ids, torch.full((N, 2), -1)], 1)
    assert (flags(padded, torch.cat([log_q.gather(1, ids), torch.full((N, 2), NAN)], 1)) == plain).all()
    twice = torch.cat([ids, ids[:, :1]], 1)
    with pytest.raises(ValueError, match="rollout_topk_ids"):
        flags(twice, log_q.gather(1, twice))
    monkeypatch.setattr("bapo_kernels.topk.values_are_checked", lambda device: False)
    assert (flags(twice, log_q.gather(1, twice)) == plain).all()


def test_missing_records_are_named():
    with pytest.raises(ValueError, match=r"rollout_topk_ids.*vLLM"):
        bk.policy_loss(normal(N), normal(N), loss=bk.DPPO("topk-tv"))
    with pytest.raises(ValueError, match="topk_logprobs"):
        bk.policy_loss(
            normal(N),
            normal(N),
            loss=bk.DPPO("topk-tv"),
            rollout_topk_ids=torch.arange(2).expand(N, 2),
            rollout_topk_logprobs=normal(N, 2),
        )
    assert bk.DPPO("tv").needs == ()
    with pytest.raises(ValueError, match="divergence"):
        bk.DPPO(str(integers(9)))
