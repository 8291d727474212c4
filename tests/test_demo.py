"""The demo runs from the command line, leaves its table and plot, and what it trains learns."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

for module in ("transformers", "reasoning_gym", "matplotlib", "tqdm"):
    pytest.importorskip(module, reason=f"{module} is missing: the demo needs `pip install bapo-kernels[demo]`")

SCRIPT = Path(__file__).parents[1] / "demo" / "train.py"


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_quick_run_learns_and_reports(tmp_path):
    done = run("--quick", "--losses", "grpo,bapo:target=0.55", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in done.stdout.splitlines()
        if line.startswith("|")
    ]
    table = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert list(table) == ["grpo", "bapo:target=0.55"], done.stdout
    for row in table.values():
        numbers = [float(x) for cell in list(row.values())[1:] for x in re.split(r"[/±]", cell)]
        assert all(map(math.isfinite, numbers)), done.stdout
        assert 0.1 < float(row["before"]) < 0.45, "the warm-up leaves something to learn"
        assert float(row["after"]) > float(row["before"]) + 0.04, "40 updates gain about 0.13 where the loss is right"
        assert 0 < float(row["rows with gradient"]) < 1

    assert table["grpo"]["before"] == table["bapo:target=0.55"]["before"], "both start from one checkpoint"
    assert table["grpo"]["mean c_low / c_high"] == "0.800 / 1.200"
    low, high = map(float, table["bapo:target=0.55"]["mean c_low / c_high"].split("/"))
    assert low > 0.6, "positive tokens contribute less than 0.55 here, so that the search has to move the bounds"
    assert high > 1.2
    assert "the bounds moved in" in done.stdout

    png = (tmp_path / "bapo_vs_grpo.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 20_000


def test_unknown_loss_parameter_is_refused():
    done = run("--losses", "bapo:aim=0.5")
    assert done.returncode != 0
    assert "has no parameter 'aim'" in done.stderr
