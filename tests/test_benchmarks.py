"""The benchmark runs from the command line, and its contestants compute the same: a peer called wrongly would be an unfair comparison."""

import csv
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"
HERE = ("plain", "checkpointed chunks", "torch linear_cross_entropy", "bapo_kernels", "bapo_kernels recompute")
# Another package's contestants, and what has to be installed for them
PEERS = {"liger eager": "liger_kernel", "trl": "trl", "verl": "verl"}


def run(out: Path, *arguments: str) -> str:
    command = [sys.executable, str(FOLDER / "run.py"), "--quick", "--memory", "none", "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_run_leaves_csv_tables_and_figure(tmp_path):
    out = tmp_path / "cpu.csv"
    refused = "bapo_kernels frozen"  # the weight is trained in both patterns
    run(out, "--section", "agreement,peers", "--contestants", ",".join([*HERE, refused]))
    of = {(r["section"], r["pattern"], r["contestant"]): r for r in rows(out)}
    cases = {("agreement", p + kind) for p in ("full", "rl") for kind in ("", " clipped")}
    assert {key[:2] for key in of} == cases | {("peers", "full"), ("peers", "rl")}
    for (section, _, contestant), row in of.items():
        assert row["torch"] == torch.__version__
        if contestant == refused:
            assert row["reason"]
            assert not row["error"]
            continue
        assert not row["reason"]
        assert 0 < float(row["error"]) < 1e-5
        if section == "peers":
            assert float(row["seconds"]) > 0
            assert float(row["gemm_share"]) > 0
            assert contestant != "plain" or float(row["ratio"]) == 1

    figure = ["--plot"] if importlib.util.find_spec("matplotlib") else []
    tables = run(out, "--markdown", *figure)
    for name in HERE:
        assert f"| {name} |" in tables or f"| **{name}** |" in tables
    assert all(line.startswith("|") or not line or "torch" in line for line in tables.splitlines()), tables
    if figure:
        assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def batch(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("batch")
    for module in ("batch", "contestants"):
        sys.modules.pop(module, None)


@pytest.mark.parametrize("stale", [0.0, 0.3])
@pytest.mark.parametrize("pattern", ["full", "rl", "rl-frozen"])
@pytest.mark.parametrize("contestant", PEERS)
def test_peer_computes_the_same(batch, contestant, pattern, stale):
    if importlib.util.find_spec(PEERS[contestant]) is None:  # `import verl` itself would need Ray
        pytest.skip(f"{PEERS[contestant]} is not installed: `make bench` installs it")
    loss_of = importlib.import_module("contestants").get(contestant)
    b, answer = batch.batch_with_answer(batch.Size(96, 64, 3000), batch.PATTERNS[pattern], stale)
    assert 0 < answer.error(batch.step(loss_of, b), b) < 1e-5


@pytest.mark.parametrize("pattern", ["full", "rl"])
def test_answer_is_that_of_autograd_in_fp64(batch, pattern):
    b, answer = batch.batch_with_answer(batch.Size(37, 24, 5001), batch.PATTERNS[pattern], stale=0.3)
    hidden, weight = (t.detach().double().requires_grad_() for t in (b.hidden, b.weight))
    logprobs = torch.log_softmax(hidden @ weight.t(), -1)[torch.arange(37), b.targets]
    ratio = (logprobs - b.old.double()).exp()
    clipped = (ratio > 1.28) & (b.advantages > 0) | (ratio < 0.8) & (b.advantages < 0)
    assert clipped[b.mask].any()
    surrogate = torch.where(clipped, ratio.clamp(0.8, 1.28).detach(), ratio) * b.advantages
    loss = -surrogate[b.mask].mean()
    loss.backward()
    for mine, expected in ((answer.loss, loss), (answer.hidden, hidden.grad), (answer.weight, weight.grad)):
        torch.testing.assert_close(mine, expected.detach(), rtol=1e-10, atol=1e-14)


def test_error_sees_a_scaled_and_a_missing_gradient(batch):
    b, answer = batch.batch_with_answer(batch.Size(37, 24, 501), batch.PATTERNS["rl"])
    logprobs = torch.log_softmax(b.hidden @ b.weight.t(), -1)[torch.arange(37), b.targets]
    loss = batch.dapo(logprobs, b.old, b.advantages, b.mask)
    assert answer.error(loss, b) == float("inf")
    loss.backward()
    assert answer.error(loss, b) < 1e-5
    assert answer.error(loss + 0.1, b) > 0.1
    b.hidden.grad *= 0.7
    assert answer.error(loss, b) == pytest.approx(0.3, rel=1e-3)
