"""Score centering straight from the head: the identities of its gradient, recorded ids of every kind, and what has to be recorded."""

import dataclasses
import itertools

import naive_losses
import pytest
import torch
from helpers import BACKENDS, INF, NAN, Problem, assert_bits, close, normal

import bapo_kernels as bk
from bapo_kernels import topk

N, D, V, K = 7, 5, 11, 4
WEIGHTS = [
    bk.ScoreCentering(),
    bk.ScoreCentering(weight="tis", tis_cap=1.1),
    bk.ScoreCentering(weight="mis", mis_low=0.7, mis_high=1.3),
]


def head(seed: int = 0, stale: float = 0.5, k: int = K, dtype=torch.float64, **options):
    """A problem, the sampler's log-probs (N, V) over the whole vocabulary, and the arguments of a call that recorded its top k."""
    p = Problem.random(N, D, V, seed=seed, dtype=dtype, **options)
    sampler = (logits(p).detach() + stale * normal(N, V, seed=seed + 20)).log_softmax(-1)
    ids = sampler.topk(k).indices
    args = {
        "advantages": normal(N, seed=seed + 21),
        "rollout_logprobs": sampler.gather(-1, p.targets[:, None]).squeeze(-1),
        "rollout_topk_ids": ids,
        "rollout_topk_logprobs": sampler.gather(-1, ids),
        "aggregation": "token-sum",
        "return_tokens": True,
    }
    return p, sampler, args


def logits(p: Problem):
    z = p.hidden.double() @ p.weight.double().T
    return z if p.bias is None else z + p.bias.double()


def run(p: Problem, args: dict, backend="reference", loss="score-centering", **options):
    """The call and its three gradients."""
    p = p.requires_grad()
    out = bk.linear_policy_loss(
        p.hidden, p.weight, p.targets, bias=p.bias, loss=loss, backend=backend, **(args | options)
    )
    out.loss.backward()
    return out, p.grads()


def through_logits(p: Problem, slope):
    """The gradients of hidden, weight and bias that a gradient of the logits (N, V) has."""
    return slope @ p.weight.double(), slope.T @ p.hidden.double(), slope.sum(0)


def check(grads, slope, p, rtol=1e-9, atol=1e-10):
    for name, got, want in zip(("hidden", "weight", "bias"), grads, through_logits(p, slope), strict=True):
        close(got, want, name, rtol=rtol, atol=atol)


def by_formula(p, args, loss, active=None):
    """-A [f (e_y - p) - (scatter(c) - p sum_H c)] for each token, with the coefficients in plain numbers."""
    log_p = logits(p).log_softmax(-1)
    ids = args["rollout_topk_ids"]
    given = log_p.gather(-1, ids.clamp(min=0)), ids, args["rollout_topk_logprobs"].double()
    rows = zip(*(t.tolist() for t in given), strict=True)
    heads = [[None if v == -1 else (lp, lq) for lp, v, lq in zip(*row, strict=True)] for row in rows]
    own = log_p.gather(-1, p.targets[:, None]).flatten().tolist()
    rollout, advantages = args["rollout_logprobs"].tolist(), args["advantages"].tolist()
    x = naive_losses.Batch(own, own, rollout, advantages, active or [True] * N, [0] * N, heads)
    want = naive_losses.evaluate("score-centering", x, **dataclasses.asdict(loss))
    slope = torch.zeros(N, V, dtype=torch.float64)
    eye = torch.eye(V, dtype=torch.float64)
    for i, (y, row) in enumerate(zip(p.targets.tolist(), ids.tolist(), strict=True)):
        slope[i] += want.coef[i] * (eye[y] - log_p[i].exp())
        for v, c in zip(row, want.head_coef[i], strict=True):
            if v != -1:
                slope[i] += c * (eye[v] - log_p[i].exp())
    return slope


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", WEIGHTS, ids=str)
def test_the_gradient_of_the_logits(loss, backend):
    for seed in range(3):
        p, _, args = head(seed)
        for padded in (False, True):
            if padded:
                args["rollout_topk_ids"][:, -1] = -1
                args["rollout_topk_ids"][2] = -1
            _, grads = run(p, args, backend, loss)
            check(grads, by_formula(p, args, loss), p)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_heads_in_lower_precision(dtype, backend):
    p, _, args = head(dtype=dtype)
    for loss in WEIGHTS:
        out, grads = run(p, args, backend, loss)
        assert out.loss.dtype == torch.float32
        assert [g.dtype for g in grads] == [dtype] * 3
        tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
        check([g.double() for g in grads], by_formula(p, args, loss), p, tolerance, tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_the_whole_vocabulary_it_is_reinforce_plus_the_kl(backend):
    """-A (log pi(y) + KL(q || pi)), whose gradient is -A (e_y - q)."""
    p, sampler, args = head(k=V)
    _, grads = run(p, args, backend)
    leaf = p.requires_grad()
    log_p = logits(leaf).log_softmax(-1)
    kl = (sampler.exp() * (sampler - log_p)).sum(-1)
    own = log_p.gather(-1, p.targets[:, None]).squeeze(-1)
    (-args["advantages"] * (own + kl)).sum().backward()
    for got, want in zip(grads, leaf.grads(), strict=True):
        close(got, want, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_the_sampled_token_alone_it_is_bpo_without_smoothing(backend):
    p, sampler, args = head()
    own = sampler.gather(-1, p.targets[:, None])
    args |= {"rollout_topk_ids": p.targets[:, None], "rollout_topk_logprobs": own}
    _, grads = run(p, args, backend)
    mine = logits(p).softmax(-1)
    p_y, q_y = mine.gather(-1, p.targets[:, None]), own.exp()
    omega = (1 - q_y) / (1 - p_y)
    eye = torch.eye(V, dtype=torch.float64)[p.targets]
    check(grads, -args["advantages"][:, None] * omega * (eye - mine), p)
    bpo = bk.BPO(smoothing=1e-30, cap=1e9, clip_low=1e9, clip_high=1e9)
    bare = {k: v for k, v in args.items() if "topk" not in k}
    for got, want in zip(grads, run(p, bare, backend, bpo)[1], strict=True):
        close(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", WEIGHTS, ids=str)
def test_a_sampler_that_is_the_policy_leaves_reinforce(loss, backend):
    p, _, args = head(stale=0.0)
    bare = {k: v for k, v in args.items() if "topk" not in k}
    for got, want in zip(run(p, args, backend, loss)[1], run(p, bare, backend, "reinforce")[1], strict=True):
        close(got, want)


def test_there_is_no_drift_under_the_modelled_sampler():
    """The mean over y of the gradient under q on H and rho p elsewhere is 0, for weights none and tis."""
    for loss, seed in itertools.product(WEIGHTS[:2], range(3)):
        p, sampler, args = head(seed)
        ids, mine = args["rollout_topk_ids"], logits(p).softmax(-1)
        q = torch.zeros(N, V, dtype=torch.float64).scatter(-1, ids, sampler.gather(-1, ids).exp())
        off = torch.ones(N, V, dtype=torch.float64).scatter(-1, ids, 0.0)
        q = q + off * mine * (1 - q.sum(-1, keepdim=True)) / (off * mine).sum(-1, keepdim=True)
        total = torch.zeros(N, D, dtype=torch.float64)
        for y in range(V):
            token = Problem(*p.leaves, torch.full((N,), y))
            given = args | {"advantages": torch.ones(N), "rollout_logprobs": q[:, y].log()}
            total += q[:, y, None] * run(token, given, loss=loss)[1][0]
        close(total, torch.zeros_like(total))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", WEIGHTS, ids=str)
def test_padding_has_no_weight(loss, backend):
    p, _, args = head()
    want_out, want = run(p, args, backend, loss)
    ids, recorded = args["rollout_topk_ids"], args["rollout_topk_logprobs"]
    for value in (0.0, -INF, NAN, 5.0):
        wide = {
            "rollout_topk_ids": torch.cat([ids[:, :2], torch.full((N, 3), -1), ids[:, 2:]], 1),
            "rollout_topk_logprobs": torch.cat([recorded[:, :2], torch.full((N, 3), value), recorded[:, 2:]], 1),
        }
        out, grads = run(p, args | wide, backend, loss)
        close(out.tokens.loss, want_out.tokens.loss)
        for a, b in zip(grads, want, strict=True):
            close(a, b)
    nothing = {"rollout_topk_ids": torch.full((N, 2), -1), "rollout_topk_logprobs": torch.zeros(N, 2)}
    none = {"rollout_topk_ids": torch.zeros(N, 0, dtype=torch.int64), "rollout_topk_logprobs": torch.zeros(N, 0)}
    for empty in (nothing, none):
        close(run(p, args | empty, backend)[1][0], run(p, args, backend, "reinforce")[1][0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_duplicates_are_refused_or_counted_once(backend, monkeypatch):
    p, _, args = head()
    ids, recorded = args["rollout_topk_ids"], args["rollout_topk_logprobs"]
    twice = args | {
        "rollout_topk_ids": torch.cat([ids, ids[:, 1:3]], 1),
        "rollout_topk_logprobs": torch.cat([recorded, torch.tensor([[NAN, 0.0]]).double().expand(N, 2)], 1),
    }
    for loss in WEIGHTS:
        with pytest.raises(ValueError, match=r"rollout_topk_ids.*twice"):
            run(p, twice, backend, loss)
        want_out, want = run(p, args, backend, loss)
        with monkeypatch.context() as m:
            m.setattr(topk, "values_are_checked", lambda device: False)
            out, grads = run(p, twice, backend, loss)
        close(out.tokens.loss, want_out.tokens.loss)
        for a, b in zip(grads, want, strict=True):
            close(a, b)
    masked = torch.zeros(N, dtype=torch.bool)
    run(p, twice, backend, mask=masked)  # of rows that do not count nothing is asked
    run(Problem(*p.leaves, torch.full((N,), -100)), twice, backend)


@pytest.mark.parametrize("loss", WEIGHTS, ids=str)
def test_probabilities_at_their_limits(loss):
    """Recorded mass above 1, ids that the sampler never drew, a policy that has nothing outside the head, y outside of it."""
    p, sampler, args = head()
    cases = {"y outside": args | {"rollout_topk_ids": torch.stack([(p.targets + i) % V for i in (1, 2, 3)], 1)}}
    cases["y outside"]["rollout_topk_logprobs"] = sampler.gather(-1, cases["y outside"]["rollout_topk_ids"])
    cases["above 1"] = args | {"rollout_topk_logprobs": args["rollout_topk_logprobs"] + 1.0}
    cases["q = 0"] = args | {"rollout_topk_logprobs": args["rollout_topk_logprobs"].clone()}
    cases["q = 0"]["rollout_topk_logprobs"][:, 1] = -INF
    cases["no q"] = args | {"rollout_topk_logprobs": torch.full((N, K), -INF, dtype=torch.float64)}
    for what, given in cases.items():
        out, grads = run(p, given, loss=loss)
        assert out.loss.isfinite(), what
        check(grads, by_formula(p, given, loss), p)
    whole = args | {"rollout_topk_ids": torch.arange(V).expand(N, V), "rollout_topk_logprobs": sampler}
    sure = Problem(p.hidden, p.weight, p.bias.clone().index_fill_(0, torch.tensor([3]), 40.0), p.targets)
    for given, problem in ((whole, p), (whole, sure), (args | {"rollout_topk_logprobs": sampler[:, :K]}, sure)):
        out, grads = run(problem, given, loss=loss)
        assert out.loss.isfinite()
        assert all(g.isfinite().all() for g in grads)


def test_ids_that_the_policy_excludes_are_harmless():
    """A head whose padding columns are at -inf: p = 0 there."""
    p, _, args = head()
    bias = p.bias.clone()
    hidden_id = next(v for v in args["rollout_topk_ids"][0].tolist() if v not in p.targets.tolist())
    bias[hidden_id] = -INF
    excluded = Problem(p.hidden, p.weight, bias, p.targets)
    for loss in WEIGHTS[1:]:  # min(p, C q) and the mask of mis are 0 there
        out, grads = run(excluded, args, loss=loss)
        assert out.loss.isfinite()
        assert all(g.isfinite().all() for g in grads)


def test_ids_that_only_the_sampler_knows_do_not_make_nan_without_advantage():
    out = bk.policy_loss(
        torch.tensor([-1.0, -2.0]),
        torch.tensor([0.0, 1.0]),
        loss="score-centering",
        topk_logprobs=torch.tensor([[-0.7, -INF], [-0.7, -3.0]]),
        rollout_topk_ids=torch.tensor([[1, 2], [1, 2]]),
        rollout_topk_logprobs=torch.tensor([[-0.7, -2.0], [-0.7, -2.0]]),
    )
    assert not out.loss.isnan()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", WEIGHTS, ids=str)
def test_garbage_in_masked_rows_changes_no_bit(loss, backend):
    p, _, args = head()
    mask = torch.tensor([1, 0, 1, 1, 0, 1, 1], dtype=torch.bool)
    want_out, want = run(p, args | {"mask": mask}, backend, loss)
    check(want, by_formula(p, args, loss, mask.tolist()), p)
    for value, garbage_id in ((NAN, -7), (INF, 2**40), (-INF, V), (1e30, 3)):
        dirty = args | {"mask": mask}
        for k in ("rollout_logprobs", "rollout_topk_logprobs", "advantages"):
            dirty[k] = args[k].clone()
            dirty[k][~mask] = value
        dirty["rollout_topk_ids"] = args["rollout_topk_ids"].clone()
        dirty["rollout_topk_ids"][~mask] = garbage_id
        hidden = p.hidden.clone()
        hidden[~mask] = value
        out, grads = run(Problem(hidden, p.weight, p.bias, p.targets), dirty, backend, loss)
        for a, b in zip((out.loss, *out.tokens, *grads), (want_out.loss, *want_out.tokens, *want), strict=True):
            assert_bits(a, b, f"{value}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_missing_is_named_with_how_to_record_it(backend):
    p, _, args = head()
    for name in ("rollout_topk_ids", "rollout_topk_logprobs"):
        with pytest.raises(ValueError, match=rf"score-centering.*{name}.*sampl.*vLLM"):
            run(p, args | {name: None}, backend)
        plain = {k: v for k, v in args.items() if k != name}
        with pytest.raises(ValueError, match=rf"{name}.*vLLM"):
            bk.policy_loss(torch.zeros(N), loss="score-centering", topk_logprobs=torch.zeros(N, K), **plain)
    with pytest.raises(ValueError, match=r"topk_logprobs.*linear_logprobs"):
        bk.policy_loss(torch.zeros(N), loss="score-centering", **args)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rollout_topk_ids", torch.zeros(N, dtype=torch.int64)),
        ("rollout_topk_ids", torch.zeros(N - 1, K, dtype=torch.int64)),
        ("rollout_topk_ids", torch.zeros(N, K)),
        ("rollout_topk_ids", torch.zeros(N, K, dtype=torch.bool)),
        ("rollout_topk_ids", [[0] * K] * N),
        ("rollout_topk_logprobs", torch.zeros(N, K - 1)),
        ("rollout_topk_logprobs", torch.zeros(N)),
        ("rollout_topk_logprobs", torch.zeros(N, K, dtype=torch.int64)),
        ("topk_logprobs", torch.zeros(N, K + 1)),
        ("topk_logprobs", torch.zeros(N, K, dtype=torch.int64)),
    ],
)
def test_recorded_ids_of_a_wrong_shape_or_dtype(name, value):
    p, _, args = head()
    if name != "topk_logprobs":
        with pytest.raises(ValueError, match=name):
            run(p, args | {name: value})
    given = {"topk_logprobs": torch.zeros(N, K)} | args | {name: value}
    with pytest.raises(ValueError, match=name):
        bk.policy_loss(torch.zeros(N), loss="score-centering", **given)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_outside_the_vocabulary_are_refused(backend):
    p, _, args = head()
    for wrong in (V, -2, 2**40):
        ids = args["rollout_topk_ids"].clone()
        ids[2, 1] = wrong
        with pytest.raises(ValueError, match="topk_ids"):
            run(p, args | {"rollout_topk_ids": ids}, backend)


def test_other_losses_do_not_read_what_was_recorded_for_this_one():
    p, _, args = head()
    args |= {"rollout_topk_ids": None, "rollout_topk_logprobs": torch.zeros(3)}
    assert run(p, args, loss="bpo")[0].loss.isfinite()


def test_both_functions_are_one():
    p, _, args = head()
    for loss in WEIGHTS:
        out, grads = run(p, args, "torch", loss)
        leaf = p.requires_grad()
        stats = leaf.run("torch", topk_ids=args["rollout_topk_ids"])
        again = bk.policy_loss(
            stats.logprobs, loss=loss, topk_logprobs=stats.topk_logprobs, entropy=stats.entropy, **args
        )
        again.loss.backward()
        assert_bits(again.loss.detach(), out.loss.detach())
        for a, b in zip(grads, leaf.grads(), strict=True):
            assert_bits(a, b)
