"""What the README shows a newcomer runs as it stands, and what it calls the same is the same."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bapo_kernels as bk

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.fixture
def names():
    torch.manual_seed(0)
    hidden, head = torch.randn(3, 5, 8, requires_grad=True), torch.nn.Linear(8, 50, bias=False)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]])
    return {
        "torch": torch,
        "bk": bk,
        "model": SimpleNamespace(lm_head=head),
        "hidden": hidden,
        "weight": head.weight,
        "targets": torch.randint(0, 50, (3, 5)),
        "advantages": (advantages := torch.randn(3)),
        "A": advantages[:, None],
        "mask": mask,
        "old_logprobs": (old := -4 + 0.2 * torch.randn(3, 5)),
        "old": old,
        "temperature": 0.8,
    }


def test_there_is_something_to_run():
    assert len(BLOCKS) >= 3


def test_you_have_this_write_this(names):
    gradients = []
    for block in BLOCKS[:2]:
        names["hidden"].grad = names["model"].lm_head.weight.grad = None
        exec(block, names)
        loss = names["loss"] if "out" not in names else names["out"].loss
        gradients.append((loss.detach(), names["hidden"].grad, names["model"].lm_head.weight.grad))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_loss_of_your_own(names, monkeypatch):
    monkeypatch.setattr("bapo_kernels.losses._LOSSES", dict(bk.losses._LOSSES))
    (block,) = (b for b in BLOCKS if "register" in b)
    exec(block, names)
    assert names["out"].loss.requires_grad
    assert "asymmetric" in bk.losses.available()


def test_lora_on_the_head(names):
    lora_a, lora_b = torch.randn(4, 8, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    frozen = names["weight"].detach()
    names |= {"scaling": 0.5, "lora_A": lora_a, "lora_B": lora_b, "frozen_weight": frozen}
    (block,) = (b for b in BLOCKS if "lora_B" in b)
    exec(block, names)
    inputs = names["hidden"], lora_a, lora_b
    got = torch.autograd.grad(names["out"].loss, inputs)
    options = {"loss": "dapo", "mask": names["mask"], "old_logprobs": names["old"]}
    merged = frozen + 0.5 * lora_b @ lora_a
    out = bk.reference.linear_policy_loss(names["hidden"], merged, names["targets"], names["advantages"], **options)
    for a, b in zip(got, torch.autograd.grad(out.loss, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_what_a_plan_says(names):
    (block,) = (b for b in BLOCKS if "bk.plan(" in b)
    call, shown = block.strip().split("\n# ")
    assert repr(eval(call, names)) == shown


def test_every_loss_is_in_the_table():
    table = README.read_text().split("## Losses")[1].split("Names stand for objects")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    listed = {name: cells for cells in rows for name in re.findall(r"`([a-z-]+)`", cells[1])}
    assert set(listed) == set(bk.losses.available())
    for name, cells in listed.items():
        assert cells[-3].strip() == bk.losses.get(name).aggregation, name


def test_links_to_files_hold():
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert target.startswith("https://") or (README.parent / target).exists(), target
