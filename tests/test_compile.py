"""Compiled without a break, the functions give what they give uncompiled: values, gradients, errors; for every length from one graph."""

import pytest
import torch
from helpers import Problem, integers, normal
from torch._dynamo.testing import CompileCounterWithBackend

import bapo_kernels as bk
from bapo_kernels.head import api
from bapo_kernels.losses.registered import RegisteredLoss

D, V, K = 5, 40, 3
LENGTHS = (20, 21, 40, 64)


@pytest.fixture(autouse=True)
def _graphs_and_losses_of_one_test(monkeypatch):
    monkeypatch.setitem(bk.losses._LOSSES, "squared", SQUARED.with_parameters({"scale": 0.5}))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def squared(x, scale):
    return scale * (x.logprobs - x.old_logprobs) ** 2 - x.advantages * x.ratio


SQUARED = RegisteredLoss("squared", squared, (("scale", 0.3),), "token-mean", ("old_logprobs",))


# Options of `linear_policy_loss`; what begins with "_" is about the model.
CASES = {
    "bapo": {},
    "bapo of given bounds": {"loss": bk.BAPO.fixed(torch.tensor(0.8), torch.tensor(1.1))},
    "dapo": {"loss": "dapo", "normalizer": torch.tensor(17.0), "kl_coef": 0.1, "kl_estimator": "k3+"},
    "gspo, packed": {"loss": "gspo", "_packed": True, "return_tokens": True},
    "score-centering": {"loss": bk.ScoreCentering(weight="tis"), "_topk": True, "_frozen": True},
    "registered": {"loss": SQUARED, "correction": bk.KPop()},
    "reinforce with entropy": {"loss": "reinforce", "entropy_coef": 0.1, "_frozen": True},
    "topr, corrected": {"loss": "topr", "_packed": True, "correction": bk.TruncatedIS(level="sequence")},
    "clip-cov": {"loss": "clip-cov", "top_entropy": 0.7},
    "options of the logits": {"loss": bk.GRPO(dual_clip=3.0), "logit_scale": 1.3, "softcap": 4.0, "vocab_size": 37},
    "temperatures": {"loss": "cispo", "_temperature": True, "max_length": 9, "aggregation": "seq-mean-token-sum-norm"},
    "frozen": {"loss": "dppo-tv", "_frozen": True, "return_tokens": True},
    "adapter": {"loss": "ppo", "_adapter": True},
    "reference": {"loss": "dapo", "backend": "reference"},
}


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(6, D, dtype=torch.float64)
        self.head = torch.nn.Linear(D, V, dtype=torch.float64)
        self.adapter = torch.nn.Linear(D, 2, bias=False, dtype=torch.float64)
        self.columns = torch.nn.Parameter(normal(V, 2))
        self.about = {k: v for k, v in options.items() if k.startswith("_")}
        self.options = {k: v for k, v in options.items() if not k.startswith("_")}
        if "_frozen" in self.about or "_adapter" in self.about:
            self.head.requires_grad_(False)

    def batch(self, n: int) -> dict:
        """Masked rows hold what must not be looked at."""
        vocab = self.options.get("vocab_size", V)
        batch = {"mask": integers(4, n, seed=n) > 0, "old_logprobs": -normal(n, seed=n + 1).abs() - 3}
        batch["rollout_logprobs"] = batch["old_logprobs"] + 0.1 * normal(n, seed=n + 2)
        batch["targets"] = torch.where(batch["mask"], integers(vocab, n, seed=n + 3), 2**40)
        batch["advantages"] = torch.where(batch["mask"], normal(n, seed=n + 4), torch.nan)
        batch["ref_logprobs"] = batch["old_logprobs"] + 0.3 * normal(n, seed=n + 5)
        if "_packed" in self.about:
            batch["cu_seqlens"] = torch.tensor([0, 3, 3, 11, n])
        if "_temperature" in self.about:
            batch["temperature"] = normal(n, seed=n + 6).abs() + 0.5
        if "_topk" in self.about:
            batch["rollout_topk_ids"] = torch.stack([(integers(V, n, seed=n + 7) + 7 * k) % V for k in range(K)], 1)
            batch["rollout_topk_logprobs"] = normal(n, V, seed=n + 8).log_softmax(-1)[:, :K]
        return {"x": normal(n, 6, seed=n + 9), **batch}

    def forward(self, x, targets, advantages, **batch):
        hidden, weight = torch.tanh(self.body(x)), self.head.weight
        if "_adapter" in self.about:
            hidden, weight = torch.cat([hidden, self.adapter(hidden)], -1), (weight, self.columns)
        out = bk.linear_policy_loss(hidden, weight, targets, advantages, bias=self.head.bias, **batch, **self.options)
        return out._replace(loss=2 * out.loss)

    def outcome(self, function, n: int) -> list[torch.Tensor]:
        self.zero_grad()
        out = function(**self.batch(n))
        out.loss.backward()
        tokens = [] if out.tokens is None else [t for t in out.tokens if t is not None]
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        assert len(grads) >= 2
        return [out.loss.detach(), *out.metrics.values(), *tokens, *grads]


def same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, equal_nan=True)


def compiled(function, backend: str = "aot_eager", dynamic: bool | None = True):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic), counter


@pytest.mark.parametrize("case", CASES)
def test_compiled_equals_uncompiled(case):
    model = Model(**CASES[case])
    function, counter = compiled(model)
    for n in LENGTHS:
        same(model.outcome(function, n), model.outcome(model, n))
    assert counter.frame_count <= 2  # a start is made anew where a number of an object turns out to be one that counts


@pytest.mark.parametrize("case", ["bapo", "adapter", "gspo, packed"])
def test_graph_that_is_run_as_it_is(case):
    model = Model(**CASES[case])
    function, counter = compiled(model, "eager")
    for n in LENGTHS:
        same(model.outcome(function, n), model.outcome(model, n))
    assert counter.frame_count == 1


def test_inductor():
    model = Model(loss="dapo", entropy_coef=0.1)
    function, counter = compiled(model, "inductor")
    for n in (20, 21):
        same(model.outcome(function, n), model.outcome(model, n))
    assert counter.frame_count == 1
    batch = model.batch(20)
    batch["targets"][batch["mask"]] = V
    with pytest.raises(ValueError, match="targets must lie in"):
        function(**batch)


def test_lengths_become_dynamic_by_themselves():
    model = Model(loss="dapo")
    function, counter = compiled(model, dynamic=None)
    for n in LENGTHS:
        same(model.outcome(function, n), model.outcome(model, n))
    assert counter.frame_count == 2


def test_padded_layout_and_modules():
    criterion = bk.LinearPolicyLoss(loss="grpo", temperature=0.7)

    def loss(hidden, weight, targets, advantages):
        return criterion(2 * hidden, weight, targets, advantages).loss

    function, counter = compiled(loss)
    for b, t in ((3, 4), (3, 6), (5, 7)):
        problem = Problem.random(layout=(b, t), d=D, v=V)
        grads = []
        for call in (function, loss):
            leaves = problem.requires_grad()
            call(leaves.hidden, leaves.weight, leaves.targets, normal(b)).backward()
            grads.append(leaves.grads()[:2])
        same(*grads)
    assert counter.frame_count <= 2


def test_log_probs():
    def logprobs(hidden, weight, bias, targets, topk_ids):
        out = bk.linear_logprobs(hidden, weight, targets, bias=bias, topk_ids=topk_ids, return_entropy=True)
        assert isinstance(out, bk.TokenStatistics)
        return out.logprobs + 0.1 * out.entropy.exp() + (out.topk_logprobs**2).sum(-1)

    function, counter = compiled(logprobs)
    for n in LENGTHS:
        problem, found = Problem.random(n, D, V, k=K), []
        for call in (function, logprobs):
            p = problem.requires_grad()
            out = call(*p.leaves, p.targets, p.options["topk_ids"])
            out.sum().backward()
            found.append([out.detach(), *p.grads()])
        same(*found)
    assert counter.frame_count == 1


def test_without_a_gradient():
    function, _ = compiled(lambda *given: bk.linear_logprobs(*given))
    for n in LENGTHS:
        p = Problem.random(n, D, V)
        with torch.no_grad():
            got = function(p.hidden, p.weight, p.targets)
        assert got.entropy is None
        same([got.logprobs], [bk.linear_logprobs(p.hidden, p.weight, p.targets).logprobs])


def test_from_log_probs():
    def loss(logprobs, advantages, old, mask):
        bounds = bk.bapo_bounds(logprobs, advantages, old_logprobs=old, mask=mask)
        given = bk.BAPO.fixed(bounds.c_low, bounds.c_high)
        out = bk.policy_loss(logprobs, advantages, old_logprobs=old, mask=mask, loss=given)
        again = bk.policy_loss(logprobs, advantages, old_logprobs=old, mask=mask)
        return out.loss + 2 * again.loss, bounds

    function, counter = compiled(loss)
    for n in LENGTHS:
        old, advantages, mask = -normal(n, seed=1).abs(), normal(n, seed=2), integers(3, n) > 0
        found = []
        for call in (function, loss):
            logprobs = (old + 0.3 * normal(n, seed=3)).requires_grad_()
            total, bounds = call(logprobs, advantages, old, mask)
            total.backward()
            found.append([total.detach(), *bounds, logprobs.grad])
        same(*found)
    assert counter.frame_count <= 2


def test_coefficient_on_a_schedule():
    """A coefficient that is another number at every step needs no graph of its own."""

    def loss(logprobs, advantages, entropy, coef):
        return bk.policy_loss(logprobs, advantages, entropy=entropy, entropy_coef=coef, loss="reinforce").loss

    function, counter = compiled(loss)
    batch = (-normal(9).abs(), normal(9, seed=1), normal(9, seed=2).abs())
    for coef in (0.1, 0.2, 0.35, 0.5):
        same([function(*batch, coef)], [loss(*batch, coef)])
    assert counter.frame_count == 1


def test_sums_over_ranks(monkeypatch, tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'rank'}", rank=0, world_size=1)

    def of_three_ranks(t, *_, group):
        """As if each had the same batch."""
        assert type(t) is torch.Tensor  # when the graph is run, not when it is traced
        return t.mul_(3 if t.is_floating_point() else 1)

    monkeypatch.setattr(torch.distributed, "all_reduce", of_three_ranks)
    group = torch.distributed.group.WORLD

    def loss(logprobs, advantages, entropy):
        return bk.policy_loss(logprobs, advantages, entropy=entropy, top_entropy=0.4, dp_group=group)

    function, counter = compiled(loss)
    for n in LENGTHS:
        batch = (-normal(n).abs(), normal(n, seed=1), normal(n, seed=2).abs())
        got, want = function(*batch), loss(*batch)
        same([got.loss, *got.metrics.values()], [want.loss, *want.metrics.values()])
        alone = bk.policy_loss(*batch[:2]).metrics
        same([got.metrics["positive"]], [3 * alone["positive"]])
    torch.distributed.destroy_process_group()
    assert counter.frame_count <= 2


# What is wrong, in which argument, at which place, and what is said.
SPOILED = (
    ("mask", 2, 0.5, "mask must hold 0 or 1 only, got 0.5"),
    ("targets", 2, 41, r"targets must lie in \[0, 40\) in every active row, got 41"),
    ("temperature", 2, 0.0, "temperature must be > 0 in every active row, got 0.0"),
    ("cu_seqlens", 2, 2, "cu_seqlens must rise from 0 to the tokens of hidden, got 2"),
    ("cu_seqlens", 4, 19, "cu_seqlens must rise from 0 to the tokens of hidden, got 19"),
    ("rollout_topk_ids", (2, slice(2)), 5, r"must hold each id once per token \(-1 is padding\), got 5 twice"),
    ("rollout_topk_ids", (2, 1), -2, "rollout_topk_ids must hold vocabulary ids, or -1 for padding, got -2"),
    ("rollout_topk_ids", (2, 1), 40, r"topk_ids must lie in \[0, 40\) in every active row, got 40"),
)


def test_values_are_checked_when_the_graph_is_run():
    model = Model(loss="score-centering", _topk=True, _packed=True, _temperature=True)
    function, counter = compiled(model)
    good = model.batch(20) | {"mask": torch.ones(20, dtype=torch.float64), "targets": integers(V, 20)}
    function(**good)
    for name, at, value, message in SPOILED:
        spoiled = good[name].clone()
        spoiled[at] = value
        with pytest.raises(ValueError, match=message):
            function(**good | {name: spoiled})
    function(**good)
    assert counter.frame_count == 1


def words(error: BaseException | None) -> str:
    return "" if error is None else f"{error}\n{words(error.__cause__ or error.__context__)}"


def test_engine_that_needs_to_count_rows():
    model = Model(loss="dapo", engine="one-pass")
    assert torch.isfinite(model(**model.batch(20)).loss)
    with pytest.raises(torch._dynamo.exc.Unsupported) as error:
        compiled(model)[0](**model.batch(20))
    assert "engine='one-pass' cannot serve this call: rows are not counted while a graph is compiled" in words(
        error.value
    )
    with pytest.raises(ValueError, match="engine must be one of"):  # with a break, the error is the uncompiled one
        torch.compile(Model(engine="fast"), backend="eager")(**model.batch(20))


def test_engine_is_frozen_where_it_can(monkeypatch):
    chosen = []
    statistics = api.Head.statistics
    monkeypatch.setattr(
        api.Head,
        "statistics",
        lambda self, entropy, frozen=False: chosen.append(frozen) or statistics(self, entropy, frozen),
    )
    for options in ({"_frozen": True}, {}):
        model = Model(loss="dapo", **options)
        if options:
            model.head.bias.requires_grad_(False)
        compiled(model)[0](**model.batch(20))
    half = len(chosen) // 2
    assert half
    assert chosen == [True] * half + [False] * half


def operands(n: int = 12, **options):
    p = Problem.random(n, D, V, k=K)
    mask = integers(3, n, seed=5) > 0
    ids = torch.cat([p.targets[:, None], p.options["topk_ids"].clamp(min=0)], 1)  # at padding there is NaN
    options = {"entropy": True, "frozen": False, "inv_temperature": normal(n, seed=6).abs() + 0.5} | options
    return (
        *(p.hidden, [p.weight], p.bias, mask, ids[:, :1] if options["frozen"] else ids, options["inv_temperature"]),
        *(not options["frozen"], V, 1.3, 4.0, "torch", options["entropy"], options["frozen"], 2**20),
    )


CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize(
    "options", [{}, {"entropy": False, "inv_temperature": None}, {"frozen": True}, {"n": 0}], ids=str
)
def test_operators_keep_to_their_descriptions(options):
    ops, given = torch.ops.bapo_kernels, operands(**options)
    torch.library.opcheck(ops.head_statistics, given, test_utils=CHECKS)
    maximum, log_sum, entropy, picked, score = ops.head_statistics(*given)
    entropy_wanted, frozen = options.get("entropy", True), options.get("frozen", False)
    upstream = (torch.ones_like(picked), torch.ones_like(entropy) if entropy_wanted and not frozen else None)
    wanted = [True, not frozen, not frozen]
    saved = (maximum, log_sum, entropy if entropy_wanted else None, picked, score if frozen else None)
    torch.library.opcheck(ops.head_gradients, (*upstream, wanted, *saved, *given), test_utils=CHECKS)


def test_small_operators_keep_to_their_descriptions():
    ops, mask = torch.ops.bapo_kernels, integers(2, 9) > 0
    torch.library.opcheck(ops.lottery, (mask, 3), test_utils=CHECKS)
    torch.library.opcheck(ops.require, (torch.ones(4, dtype=torch.bool), normal(4), "never"), test_utils=CHECKS)
