"""OpenRLHF's losses and ours, on the same batches.

The package itself asks for Ray, DeepSpeed and CUDA. What is compared needs only PyTorch: its file models/loss.py, taken from the package
where it is installed (`pip install --no-deps openrlhf`) and from wheels (BAPO_KERNELS_OPENRLHF, a folder of openrlhf-*.whl), and put
in where its actor would be.
"""

import glob
import importlib.util
import os
import sys
import types
import zipfile

import pytest
import torch
from helpers import generator
from torch import nn

import bapo_kernels as bk
from bapo_kernels.integrations import openrlhf as integration
from bapo_kernels.integrations import packages
from bapo_kernels.integrations.openrlhf import restore_policy_loss, use_policy_loss

B, T = 4, 7


def sources() -> dict[str, str]:
    """models/loss.py of each version at hand."""
    found = {}
    for wheel in sorted(glob.glob(os.path.join(os.environ.get("BAPO_KERNELS_OPENRLHF", "nowhere"), "openrlhf-*.whl"))):
        with zipfile.ZipFile(wheel) as z:
            name = next(n for n in z.namelist() if n.endswith("openrlhf/models/loss.py"))
            found[os.path.basename(wheel).split("-")[1]] = z.read(name).decode()
    if (spec := importlib.util.find_spec("openrlhf")) is not None:
        path = os.path.join(spec.submodule_search_locations[0], "models", "loss.py")
        with open(path) as f:
            found["installed"] = f.read()
    return found


SOURCES = sources()


@pytest.fixture(params=SOURCES or ["none"])
def actor(request, monkeypatch):
    """A module in the place of OpenRLHF's actor, with the real PolicyLoss in it."""
    if not SOURCES:
        pytest.skip("openrlhf is neither installed nor among the wheels of BAPO_KERNELS_OPENRLHF")
    utils = types.ModuleType("openrlhf_models.utils")
    utils.masked_mean = lambda t, mask, dim=None: (t * mask).sum(dim=dim) / mask.sum(dim=dim)
    models = types.ModuleType("openrlhf_models")
    models.__path__ = []
    loss = types.ModuleType("openrlhf_models.loss")
    loss.__package__ = "openrlhf_models"
    monkeypatch.setitem(sys.modules, "openrlhf_models", models)
    monkeypatch.setitem(sys.modules, "openrlhf_models.utils", utils)
    exec(compile(SOURCES[request.param], "loss.py", "exec"), vars(loss))
    return put_in(monkeypatch, loss.PolicyLoss, request.param)


def put_in(monkeypatch, policy_loss, version="0.11.2"):
    module = types.ModuleType(integration.ACTOR)
    module.PolicyLoss = policy_loss
    for i in range(1, len(parts := integration.ACTOR.split("."))):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
    monkeypatch.setitem(sys.modules, integration.ACTOR, module)
    monkeypatch.setattr(packages.Package, "version", "0.11.2" if version == "installed" else version)
    return module


@pytest.fixture
def batch():
    """Ratios on both sides of the bounds, of both signs; one sequence masked from its middle on."""
    g = generator(0)
    rollout = -torch.rand(B, T, generator=g) * 3 - 0.05
    old = rollout + 0.3 * torch.randn(B, T, generator=g)
    now = old + 0.4 * torch.randn(B, T, generator=g)
    advantages = torch.randn(B, 1, generator=g).expand(B, T).contiguous()
    mask = torch.rand(B, T, generator=g) < 0.8
    mask[1, 3:] = False
    return now, old.clamp(max=-0.01), advantages, mask.long(), rollout


def run(loss_fn, batch, **info):
    now, old, advantages, mask, rollout = batch
    leaf = now.clone().requires_grad_()
    out = loss_fn(leaf, old, advantages, action_mask=mask, rollout_log_probs=rollout, **info)
    out[0].backward()
    return out, leaf.grad


def both(actor, batch, ours, info=None, **options):
    """The same step with OpenRLHF's loss and with ours in its place."""
    theirs = run(actor.PolicyLoss(**options), batch, **(info or {}))
    use_policy_loss(**ours)
    return theirs, run(actor.PolicyLoss(**options), batch, **(info or {}))


def assert_same(theirs, ours, tolerance=1e-6):
    assert len(theirs[0]) == len(ours[0]) in (4, 5)
    assert theirs[1].abs().max() > 1e-3
    for want, got in zip((*theirs[0], theirs[1]), (*ours[0], ours[1]), strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


AGGREGATIONS = {
    "batch-tokens": (True, {}),
    "global-tokens": (
        True,
        {"dp_size": 3, "batch_num_tokens": torch.tensor(41.0), "global_batch_size": torch.tensor(9.0)},
    ),
    "batch-sequences": (False, {}),
    "global-sequences": (False, {"dp_size": 3, "batch_num_tokens": 41.0, "global_batch_size": 9.0}),
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("high", [0.2, 0.28])
def test_ppo_is_theirs(actor, batch, aggregation, high):
    token_level, info = AGGREGATIONS[aggregation]
    assert_same(*both(actor, batch, {"loss": "ppo"}, info, token_level_loss=token_level, clip_eps_high=high))


def test_one_sequence_without_tokens(actor, batch):
    batch[3][2] = 0
    for token_level, info in AGGREGATIONS.values():
        use_policy_loss("ppo")
        mine = run(actor.PolicyLoss(token_level_loss=token_level), batch, **info)
        restore_policy_loss()
        assert_same(run(actor.PolicyLoss(token_level_loss=token_level), batch, **info), mine)


def test_dual_clip_is_theirs(actor, batch):
    theirs, ours = both(actor, batch, {"loss": "ppo"}, dual_clip=1.2)
    assert ours[0][1] > theirs[0][1]  # the share of clipped tokens: ours counts those that the dual clip stopped
    assert_same(((theirs[0][0], ours[0][1], *theirs[0][2:]), theirs[1]), ours)


@pytest.mark.parametrize("aggregation", ["batch-tokens", "global-sequences"])
def test_gspo_is_theirs(actor, batch, aggregation):
    clips = {"clip_eps_low": 0.03, "clip_eps_high": 0.04}
    for correction in ({}, corrections(actor)[0]):
        restore_policy_loss()
        theirs, ours = both(
            actor, batch, {"loss": "gspo"}, AGGREGATIONS[aggregation][1], policy_loss_type="gspo", **clips, **correction
        )
        assert_same(theirs, ours, 2e-6)


def corrections(actor):
    """Every way of correcting that the version has."""
    base = getattr(actor.PolicyLoss, "replaces", actor.PolicyLoss)
    if "is_correction_level" in base.__init__.__code__.co_varnames:
        return [
            {
                "is_correction_level": level,
                "is_correction_mode": mode,
                "is_correction_gating": gating,
                "is_correction_threshold": band,
            }
            for level, mode, gating, band in (
                ("token", "mask", "ratio", (0.8, 1.3)),
                ("token", "clip", "ratio", (0.8, 1.3)),
                ("seq", "mask", "ratio", (0.9, 1.1)),
                ("token", "mask", "binary_kl", (0.0, 0.02)),
                ("seq", "mask", "binary_kl", (0.0, 0.03)),
                ("token", "mask", "tv", (0.0, 0.05)),
                ("seq", "mask", "tv", (0.0, 0.06)),
            )
        ]
    return [
        {"enable_vllm_is_correction": True, "vllm_is_truncated_threshold": band, "vllm_is_correction_type": kind}
        for kind, band in (("tis", (0.8, 1.3)), ("icepop", (0.8, 1.3)), ("seq-mask-tis", (0.9, 1.1)))
    ]


def test_corrections_are_theirs(actor, batch):
    plain, _ = run(actor.PolicyLoss(), batch)
    for options in corrections(actor):
        restore_policy_loss()
        theirs, ours = both(actor, batch, {"loss": "ppo"}, **options)
        assert theirs[0][3] is not None and theirs[0][0] != plain[0], options  # it is on, and does something
        assert_same(theirs, ours)
        with pytest.raises(ValueError, match=r"needs rollout_log_probs"):
            run(actor.PolicyLoss(**options), (*batch[:4], None))


def test_bapo_finds_its_bounds(actor, batch):
    use_policy_loss()
    got, grad = run(actor.PolicyLoss(), batch)
    now, old, advantages, mask, rollout = batch
    leaf = now.clone().requires_grad_()
    want = bk.policy_loss(leaf, advantages, loss="bapo", mask=mask, old_logprobs=old, rollout_logprobs=rollout)
    want.loss.backward()
    assert torch.equal(got[0], want.loss) and torch.equal(grad, leaf.grad)
    assert got[1] == want.metrics["clip_frac_low"] + want.metrics["clip_frac_high"]
    # Fixed at the clips, it is PPO.
    use_policy_loss(bk.BAPO.fixed(0.8, 1.2))
    fixed = run(actor.PolicyLoss(), batch)
    restore_policy_loss()
    assert_same(run(actor.PolicyLoss(), batch), fixed)


def test_aggregation_of_ones_own(actor, batch):
    use_policy_loss("ppo", aggregation="seq-mean-token-sum")
    (loss, *_), _ = run(actor.PolicyLoss(), batch, dp_size=2, global_batch_size=8.0, batch_num_tokens=99.0)
    now, old, advantages, mask, _ = batch
    want = bk.policy_loss(now, advantages, loss="ppo", mask=mask, old_logprobs=old, aggregation="token-sum").loss
    torch.testing.assert_close(loss, want * 2 / 8)


def test_what_masked_tokens_hold(actor, batch):
    use_policy_loss("ppo")
    loss_fn = actor.PolicyLoss()
    (loss, clipped, *_), grad = run(loss_fn, batch)
    for t in batch[:3]:
        t[batch[3] == 0] = float("nan")
    (again, clipped_again, *_), grad_again = run(loss_fn, batch)
    assert torch.equal(loss, again) and torch.equal(clipped, clipped_again) and torch.equal(grad, grad_again)
    assert loss_fn(batch[0].nan_to_num(), batch[1].nan_to_num(), batch[2].nan_to_num())[
        0
    ].isfinite()  # no mask: all count


def test_options_that_would_have_no_effect(actor):
    use_policy_loss("bapo")
    with pytest.raises(ValueError, match=r"eps_clip_low_high sets clip_high=0.28, which has no effect on loss bapo"):
        actor.PolicyLoss(clip_eps_high=0.28)
    with pytest.raises(ValueError, match=r"policy_loss_type='gspo' has no effect on loss 'bapo'"):
        actor.PolicyLoss(policy_loss_type="gspo")
    assert actor.PolicyLoss(dual_clip=3.0).rule.dual_clip == 3.0
    use_policy_loss("sapo")
    with pytest.raises(ValueError, match=r"dual_clip sets dual_clip=3, .*sapo"):
        actor.PolicyLoss(dual_clip=3.0)
    use_policy_loss(bk.GRPO(clip_high=0.3))
    with pytest.raises(ValueError, match=r"clip_high=0.28"):
        actor.PolicyLoss(clip_eps_high=0.28)
    assert actor.PolicyLoss(clip_eps_high=0.3).rule == bk.GRPO(clip_high=0.3)
    use_policy_loss("dapo")
    assert actor.PolicyLoss().rule == bk.DAPO() and actor.PolicyLoss().aggregation == "token-mean"
    use_policy_loss("gspo")
    assert actor.PolicyLoss().rule == bk.GSPO() and actor.PolicyLoss().aggregation == "seq-mean-token-mean"
    with pytest.raises(ValueError, match=r"rollout_topk_ids, which OpenRLHF does not record"):
        use_policy_loss("score-centering")
    with pytest.raises(ValueError, match=r"aggregation must be None or one of token-mean"):
        use_policy_loss("ppo", aggregation="token-sum")
    with pytest.raises(ValueError, match=r"loss must be one of"):
        use_policy_loss("pppo")


def test_replaced_and_restored(actor):
    own = actor.PolicyLoss
    use_policy_loss("ppo")
    use_policy_loss("bapo")  # not on top of the other
    assert actor.PolicyLoss.replaces is own and issubclass(actor.PolicyLoss, own)
    restore_policy_loss()
    assert actor.PolicyLoss is own
    restore_policy_loss()
    assert actor.PolicyLoss is own


class Other(nn.Module):
    def __init__(self, clip_eps_low=0.2, clip_eps_high=0.2):
        super().__init__()

    def forward(self, log_probs, old_log_probs, advantages):
        return log_probs.sum()


def test_hooks_that_have_moved(monkeypatch):
    module = put_in(monkeypatch, Other)
    with pytest.raises(
        RuntimeError, match=r"takes clip_eps_high, clip_eps_low .*tested with openrlhf 0.11.0 to 0.11.2"
    ):
        use_policy_loss("ppo")
    assert module.PolicyLoss is Other
    del module.PolicyLoss
    with pytest.raises(RuntimeError, match=r"has no openrlhf.trainer.ray.ppo_actor.PolicyLoss"):
        use_policy_loss("ppo")


def test_another_version(actor, monkeypatch):
    monkeypatch.setattr(packages.Package, "version", "0.12.0")
    packages._warned.clear()
    with pytest.warns(UserWarning, match=r"openrlhf 0.12.0 .*tested: 0.11.0 to 0.11.2"):
        use_policy_loss("ppo")
    packages._warned.clear()


@pytest.mark.skipif(importlib.util.find_spec("openrlhf") is not None, reason="openrlhf is installed")
def test_without_openrlhf():
    with pytest.raises(ImportError, match=r"this integration needs openrlhf: install openrlhf"):
        use_policy_loss("ppo")
