"""The cost model gives the tables that the design was chosen by, says what it is, and takes rates from a measurement where there is one."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
MODULES = ("cost", "gpu_report", "report", "contestants", "batch")

# ms at 8192 tokens. Forward and backward: fused tile, vendor's GEMM, one pass; forward only: fused tile, vendor's GEMM
FULL = {
    ("h100", 2048, 131072): (28, 29, 24, 7.8, 7.6),
    ("h200", 2048, 131072): (27, 26, 21, 7.4, 6.9),
    ("b200", 2048, 131072): (12, 13, 10, 3.4, 3.3),
    ("h100", 4096, 151936): (64, 62, 50, 17.2, 16.0),
    ("h200", 4096, 151936): (61, 58, 46, 16.4, 14.8),
    ("b200", 4096, 151936): (29, 27, 22, 7.8, 7.0),
    ("h100", 8192, 131072): (109, 104, 83, 29, 26),
    ("h200", 8192, 151936): (120, 114, 89, 32, 29),
    ("b200", 8192, 151936): (57, 53, 42, 16, 13),
}
# ms on an H200 at 8192 x 4096 x 151936, by the share that counts and the share of that with a gradient. Trained: fused tile, vendor's GEMM,
# one pass; frozen: fused tile, vendor's GEMM, gradient in the forward
SHARES = {
    (1.0, 1.0): (61, 58, 46, 47, 45, 29),
    (1.0, 0.7): (48, 45, 37, 38, 36, 29),
    (1.0, 0.4): (34, 32, 29, 29, 27, 29),
    (0.7, 1.0): (43, 41, 33, 33, 31, 20),
    (0.7, 0.7): (33, 32, 27, 27, 25, 20),
    (0.7, 0.4): (24, 23, 21, 20, 19, 20),
    (0.4, 1.0): (24, 23, 19, 19, 18, 12),
    (0.4, 0.7): (19, 18, 16, 15, 14, 12),
    (0.4, 0.4): (14, 13, 12, 12, 11, 12),
}


@pytest.fixture
def cost(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("cost")
    for module in MODULES:
        sys.modules.pop(module, None)


def assert_near(got, want):
    """Within 2 %, beside the rounding of the table: to 0.1 below 20 where it has a decimal, else to 1."""
    for g, w in zip(got, want, strict=True):
        rounding = 0.05 if isinstance(w, float) else 0.5
        assert abs(g * 1e3 - w) <= rounding + 0.02 * w, (g * 1e3, w)


@pytest.mark.parametrize(("chip", "hidden", "vocab"), FULL, ids=lambda x: str(x))
def test_every_row_has_a_gradient(cost, chip, hidden, vocab):
    s, rates = cost.Step(8192, hidden, vocab), cost.CHIPS[chip]
    steps = cost.recompute(s, "tile"), cost.recompute(s), cost.one_pass(s), cost.score(s, "tile"), cost.score(s)
    assert_near([c.seconds(rates) for c in steps], FULL[chip, hidden, vocab])


@pytest.mark.parametrize(("counted", "of_those"), SHARES)
def test_some_rows_count_and_some_have_a_gradient(cost, counted, of_those):
    s = cost.Step(8192, 4096, 151936, counted, counted * of_those)
    f = replace(s, frozen=True)
    steps = cost.recompute(s, "tile"), cost.recompute(s), cost.one_pass(s)
    steps += cost.recompute(f, "tile"), cost.recompute(f), cost.frozen(f)
    assert_near([c.seconds(cost.CHIPS["h200"]) for c in steps], SHARES[counted, of_those])


@pytest.mark.parametrize(
    ("chip", "rates"),
    {"h200": (557, 637, 687, 715), "h100": (483, 576, 638, 674), "b200": (1120, 1328, 1463, 1542)}.items(),
)
def test_where_a_tile_beats_a_gemm_and_a_fold(cost, chip, rates):
    chip = cost.CHIPS[chip]
    for hidden, want in zip((1024, 2048, 4096, 8192), rates, strict=True):
        assert cost.break_even(chip, hidden) == pytest.approx(want * 1e12, rel=1e-3)
        # And there the two forwards take the same time.
        even = replace(chip, tile=cost.break_even(chip, hidden), epilogue=0.0)
        s = cost.Step(8192, hidden, 151936)
        assert cost.score(s, "tile").seconds(even) == pytest.approx(cost.score(s, "gemm").seconds(even))


def test_passes_are_those_of_the_engines(cost):
    """m + 3a, m + 2a, 2m; the plain path 3, or 2 with a frozen head."""
    s = cost.Step(1000, 64, 5000, 0.7, 0.25)
    f = replace(s, frozen=True)
    for c, passes in (
        (cost.recompute(s), 0.7 + 3 * 0.25),
        (cost.recompute(s, "tile"), 0.7 + 3 * 0.25),
        (cost.one_pass(s), 0.7 + 2 * 0.25),
        (cost.recompute(f), 0.7 + 2 * 0.25),
        (cost.one_pass(f), 0.7 + 0.25),
        (cost.frozen(f), 1.4),
        (cost.plain(s), 3),
        (cost.plain(f), 2),
        (cost.score(s), 0.7),
    ):
        assert c.flop == pytest.approx(passes * s.a_pass)


def row(cost, **fields):
    return cost.GpuRow(**{"section": "rates", "card": "NVIDIA H200", "commit": "abc"} | fields)


def test_rates_and_times_of_a_measurement(cost, command, tmp_path):
    path = tmp_path / "card.csv"
    rates = [row(cost, contestant=f"head: {x}", tflops=t) for x, t in (("a", 700.0), ("b", 700.0), ("c", 700.0))]
    rates += [row(cost, contestant="mm 8192", tflops=790.0), row(cost, contestant="copy", gbs=4200.0)]
    old = [replace(r, card="another", tflops=r.tflops and 1.0) for r in rates]
    timed = [
        row(
            cost,
            section="timings",
            contestant="bapo_kernels recompute gemm",
            pattern="full",
            tokens=8192,
            hidden=4096,
            vocab=151936,
            dtype="bfloat16",
            seconds=0.0615,
            model="recompute, gemm",
        )
    ]
    timed.append(replace(timed[0], contestant="bapo_kernels", pattern="score", seconds=0.0155, model="log-probs, gemm"))
    timed.append(replace(timed[0], pattern="full", dtype="float32", seconds=0.001, model=""))
    cost.report.save(path, old + rates + timed)
    assert cost.Chip.of_rows(timed) is None
    chip = cost.Chip.of_rows(rates)
    assert chip.name == "NVIDIA H200"
    assert (chip.gemm, chip.bandwidth) == (700e12, 4200e9) and chip.measured == ("gemm", "bandwidth")
    assert chip.origin("tile") == "assumed" and chip.tile == pytest.approx(700e12 * 650 / 745)
    out = command("--results", str(path))
    line = next(s for s in out.splitlines() if s.startswith("trained: recompute, gemm"))
    assert line.endswith("61.5 ms") and "predicted" in out and "measured" in out
    assert "61.5" not in command("--results", str(path), "--hidden", "2048")
    # A score takes as long whatever would have a gradient.
    for active in ("1.0", "0.5"):
        out = command("--results", str(path), "--active", active)
        assert next(s for s in out.splitlines() if s.startswith("scoring: log-probs, gemm")).endswith("15.5 ms")
    cost.report.save(tmp_path / "none.csv", timed)
    with pytest.raises(SystemExit):
        command("--results", str(tmp_path / "none.csv"))


@pytest.fixture
def command(cost, monkeypatch, capsys):
    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["cost.py", *arguments])
        assert cost.main() == 0
        return capsys.readouterr().out

    return run


def test_command_line_says_that_it_predicts(command):
    out = command("--chip", "h200", "--tokens", "8192", "--hidden", "4096", "--vocab", "151936")
    assert "A prediction, not a measurement." in out and "(assumed)" in out and "(measured)" in out
    assert next(s for s in out.splitlines() if s.startswith("trained: one-pass")).endswith("46.0 ms")
    assert "| trained: plain |" in command("--markdown", "--unmasked", "0.7", "--active", "0.25")
    with pytest.raises(SystemExit):
        command("--active", "1.5")
