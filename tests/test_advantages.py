"""`group_advantages` and `TargetEntropy`."""

import pytest
import torch
from helpers import normal

import bapo_kernels as bk


def by_hand(rewards, groups, mode):
    out = []
    for i, r in enumerate(rewards):
        group = [x for x, g in zip(rewards, groups, strict=True) if g == groups[i]]
        n, mean = len(group), sum(group) / len(group)
        if n == 1 or max(group) == min(group):
            out.append(0.0)
        elif mode == "grpo":
            std = (sum((x - mean) ** 2 for x in group) / (n - 1)) ** 0.5
            out.append((r - mean) / (std + 1e-6))
        elif mode == "dr_grpo":
            out.append(r - mean)
        else:
            out.append(r - (sum(group) - r) / (n - 1))
    return out


@pytest.mark.parametrize("mode", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_against_a_loop(mode, dtype):
    rewards, ids = normal(12).to(dtype), torch.tensor([3, -1, 3, 8, 3, -1, 2**40, 8, 8, 8, 3, -1])
    got = bk.group_advantages(rewards, group_ids=ids, mode=mode)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    want = torch.tensor(by_hand(rewards.tolist(), ids.tolist(), mode), dtype=torch.float64)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    sized = bk.group_advantages(rewards, group_size=4, mode=mode)
    want = by_hand(rewards.tolist(), [i // 4 for i in range(12)], mode)
    torch.testing.assert_close(sized.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["grpo", "dr_grpo", "rloo"])
def test_equal_rewards_have_no_advantage_at_all(mode):
    """0.1 three times has a mean that is not 0.1; divided by 1e-6 the rest would train."""
    for value in (0.1, 0.3, 1 / 3):
        assert (bk.group_advantages(torch.full((21,), value), group_size=7, mode=mode) == 0).all()
    assert (bk.group_advantages(torch.tensor([5.0, 1.0]), group_size=1, mode=mode) == 0).all()


def test_rewards_may_be_whole_numbers_and_need_no_gradient():
    rewards = torch.tensor([1, 0, 1, 1])
    torch.testing.assert_close(
        bk.group_advantages(rewards, group_size=4, mode="dr_grpo"), torch.tensor([0.25, -0.75, 0.25, 0.25])
    )
    assert not bk.group_advantages(torch.randn(4, requires_grad=True), group_size=2).requires_grad
    assert bk.group_advantages(torch.zeros(0), group_size=3).shape == (0,)


@pytest.mark.parametrize(
    ("rewards", "options", "name"),
    [
        (torch.zeros(4), {}, "group_size"),
        (torch.zeros(4), {"group_size": 2, "group_ids": torch.zeros(4).long()}, "group_size"),
        (torch.zeros(4), {"group_size": 3}, "group_size"),
        (torch.zeros(4), {"group_size": 0}, "group_size"),
        (torch.zeros(4), {"group_ids": torch.zeros(3).long()}, "group_ids"),
        (torch.zeros(4), {"group_ids": torch.zeros(4)}, "group_ids"),
        (torch.zeros(4), {"group_size": 2, "mode": "x"}, "mode"),
        (torch.zeros(2, 2), {"group_size": 2}, "rewards"),
    ],
)
def test_mistakes_are_refused(rewards, options, name):
    with pytest.raises(ValueError, match=name):
        bk.group_advantages(rewards, **options)


def test_target_entropy_follows_its_recursion():
    control = bk.TargetEntropy(target=0.2, step=0.25, max_coef=0.6)
    entropies = [0.1, 0.1, 0.1, 0.1, 0.3, 0.2, 0.1, 0.5, 0.5, 0.5]
    got = [control.update(torch.tensor(e)) for e in entropies]
    c, want = 0.0, []
    for e in torch.tensor(entropies).tolist():
        want.append(c if e <= 0.2 else 0.0)
        c = min(max(c + (0.25 if e < 0.2 else -0.25), 0.0), 0.6)
    assert got == pytest.approx(want)
    assert max(got) == pytest.approx(0.6)
    assert control.coef == 0.0


def test_target_entropy_defaults_and_mistakes():
    control = bk.TargetEntropy()
    assert (control.target, control.step, control.max_coef) == (0.2, 1e-4, 5e-3)
    with pytest.raises(ValueError, match="target"):
        bk.TargetEntropy(target=-1)
    with pytest.raises(ValueError, match="NaN"):
        control.update(float("nan"))
