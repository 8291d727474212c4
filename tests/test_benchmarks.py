"""The benchmark runs from the command line, and its contestants compute the same: a peer called wrongly would be an unfair comparison."""

import csv
import importlib
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bapo_kernels.cli import bench, main

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
    for module in [n for n, m in sys.modules.items() if str(FOLDER) in (getattr(m, "__file__", None) or "")]:
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


# The run on a GPU machine, dry: the same code on this machine's CPU, with tiny shapes

OURS = ("", " 8GiB", " recompute tile", " one-pass", " frozen", " gemm")
SOME = ",".join([*(f"bapo_kernels{x}" for x in OURS), "plain", "torch linear_cross_entropy"])


def gpu(out: Path, *arguments: str, code: int = 0, path: str = "", driver: str = "") -> str:
    script = ["-c", driver] if driver else [str(FOLDER / "gpu.py")]
    command = [sys.executable, *script, "--device", "cpu", "--quick", "--sizes", "48x32x2000", "--out", str(out)]
    environment = {**os.environ, "PATH": os.pathsep.join(filter(None, [path, os.environ["PATH"]]))}
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_dry_run_goes_through_every_section_and_a_second_one_measures_nothing(tmp_path):
    out = tmp_path / "dry.csv"
    told = gpu(out, "--contestants", SOME, "--autotune")
    assert "FAILED" not in told and "not run" not in told
    found = rows(out)
    assert {r["section"] for r in found} == {
        *("env", "rates", "tests", "sanitizer", "check", "agreement", "timings", "autotune", "full")
    }
    assert all(r["card"].startswith("cpu") and r["commit"] and r["torch"] for r in found)
    timed = {(r["pattern"], r["contestant"]): r for r in found if r["section"] == "timings"}
    assert {p for p, _ in timed} == {"full", "rl", "frozen", "score", "busy"}
    assert ("frozen", "bapo_kernels frozen") in timed and ("full", "bapo_kernels frozen") not in timed
    for (pattern, name), row in timed.items():
        assert row["result"] == "done", row
        assert float(row["seconds"]) > 0 and float(row["tflops"]) > 0 and float(row["gemm_share"]) > 0
        assert bool(row["predicted"]) == (not name.startswith("torch"))
        assert (row["engine"] != "") == (name.startswith("bapo_kernels") and pattern != "score")
    for row in found:
        if row["section"] == "agreement" and row["result"] == "done":
            assert 0 < float(row["error"]) < 3e-2
    assert all(r["result"] == "not present" for r in found if r["section"] == "sanitizer")
    tests = next(r for r in found if r["section"] == "tests")
    assert " skipped" in tests["reason"] and "failed" not in tests["reason"]
    text = out.with_suffix(".md").read_text()
    assert "| **bapo_kernels one-pass** |" in text and "not a measurement" in text
    assert "H200" not in text  # whose targets are no other card's
    if importlib.util.find_spec("matplotlib"):
        assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / "dry-predicted.png").exists()

    before = out.read_text()
    told = gpu(out, "--contestants", SOME, "--section", "env,tests,check,timings,report")
    assert "already" in told
    assert out.read_text() == before


def test_what_does_not_fit_into_the_budget_is_said_and_run_the_next_time(tmp_path):
    out = tmp_path / "dry.csv"
    sections = ("--contestants", "bapo_kernels,plain", "--section", "tests,check,timings")
    told = gpu(out, *sections, "--budget", "1")
    assert {r["result"] for r in rows(out)} == {"not run"} and len(rows(out)) == 3
    for what in ("not run: tests pytest", "not run: check bapo-kernels check", "not run: timings all contestants"):
        assert what in told
    gpu(out, *sections[:2], "--section", "timings")
    of = {r["section"]: r["result"] for r in rows(out)}
    assert of == {"tests": "not run", "check": "not run", "timings": "done"}


def test_a_contestant_that_takes_its_process_down_costs_only_itself(tmp_path):
    out = tmp_path / "dry.csv"
    killer = f"""
import os, runpy, sys
sys.path.insert(0, {str(FOLDER)!r})
import timings
run = timings.Entry.run
timings.Entry.run = lambda e: os._exit(7) if e.name == "bapo_kernels one-pass" else run(e)
sys.exit(timings.main())
"""
    command = ["--sizes", "48x32x2000", "--device", "cpu", "--patterns", "full", "--repeats", "1", "--out", str(out)]
    command += ["--contestants", "bapo_kernels,bapo_kernels one-pass,plain", "--commit", "abc"]
    died = subprocess.run([sys.executable, "-c", killer, *command])
    assert died.returncode == 7
    assert [(r["contestant"], r["result"]) for r in rows(out)][-1] == ("bapo_kernels one-pass", "failed")
    assert subprocess.run([sys.executable, "-c", killer, *command]).returncode == 0
    of = {r["contestant"]: r for r in rows(out)}
    assert {n: r["result"] for n, r in of.items()} == {
        "bapo_kernels one-pass": "failed",
        "bapo_kernels": "done",
        "plain": "done",
    }
    assert "died" in of["bapo_kernels one-pass"]["reason"]


@pytest.mark.parametrize("verdict", ["clean", "error"])
def test_sanitizer_is_run_where_it_is_installed(tmp_path, verdict):
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    ends = 'exec "$@"' if verdict == "clean" else 'echo "========= Invalid __global__ read"; exit 9'
    tool.write_text(f"#!/bin/sh\necho $1 $2 $3 $4\nshift 4\n{ends}\n")
    tool.chmod(0o755)
    out = tmp_path / "dry.csv"
    gpu(out, "--section", "sanitizer", code=verdict == "error", path=str(tool.parent))
    assert [r["result"] for r in rows(out)] == ["done" if verdict == "clean" else "failed"] * 2
    log = (tmp_path / "dry-memcheck.log").read_text()
    assert log.startswith("--tool memcheck --error-exitcode 9")
    if verdict == "clean":
        assert "bapo_kernels one-pass tile" in log
    else:
        assert "Invalid __global__ read" in rows(out)[0]["reason"]


def test_meter_reads_events_and_the_allocator(batch, monkeypatch):
    """With a device that only counts: what is before the call, the gradients left by it, and the cold cache do not count."""
    device = importlib.import_module("device")
    clock, memory, log = [0.0], {"now": 1000, "peak": 5000}, []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock[0]

        def synchronize(self):
            log.append("waited")

        def elapsed_time(self, other):
            return other.at - self.at

    fakes = {
        "Event": Event,
        "synchronize": lambda: log.append("synchronized"),
        "reset_peak_memory_stats": lambda: memory.update(peak=memory["now"]),
        "memory_allocated": lambda: memory["now"],
        "max_memory_allocated": lambda: memory["peak"],
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    meter = device.Meter(torch.device("cpu"))
    meter.cuda = True
    meter.cold = SimpleNamespace(zero_=lambda: clock.__setitem__(0, clock[0] + 100.0))

    def call():
        clock[0] += 3.0
        memory.update(now=1400, peak=2500)

    assert meter.seconds(call) == 3e-3
    memory["now"] = 1000
    assert meter.extra_bytes(call, lambda: 400) == 2500 - 1000 - 400
    assert log == ["waited", "synchronized", "synchronized"]


def test_memory_is_counted_from_inputs_without_gradients(batch, tmp_path):
    timings = importlib.import_module("timings")
    a = SimpleNamespace(
        out=tmp_path / "x.csv", device="cpu", section="timings", dtype="bfloat16", repeats=1, again=False
    )
    a.contestants = ["bapo_kernels", "plain"]
    race = timings.Race(a, batch.Size(40, 32, 500), "full", {"card": "cpu", "commit": "x"}, float("inf"))
    held = []

    def extra_bytes(call, gradients):
        held.append(gradients())
        call()
        held.append(gradients())
        return 2**20

    race.meter.extra_bytes = extra_bytes
    race.run(None)
    trained = 2 * (40 + 500) * 32
    assert held == [0, trained] * 2
    assert {r["contestant"]: r["extra_mib"] for r in rows(a.out)} == {"bapo_kernels": "1", "plain": "1"}


def test_facts_of_a_card(batch, monkeypatch, tmp_path):
    device = importlib.import_module("device")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 570.1, 1980 MHz, 1980 MHz, 3201 MHz, 700.00 W, 41'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    found = device.facts(torch.device("cuda"), "abc")
    assert (found["card"], found["driver"], found["commit"]) == ("NVIDIA H200", "570.1", "abc")
    properties = SimpleNamespace(total_memory=139 * 2**30, major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    module = importlib.import_module("gpu")
    text = module.described(torch.device("cuda"))
    assert "132 multiprocessors, 139 GiB, clocks.sm 1980 MHz" in text
    assert module.slug("NVIDIA H200", SimpleNamespace(device="cuda")) == "h200"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert device.smi() == {}


def test_contestants_have_their_design_and_leave_the_environment_as_it_was(batch, monkeypatch):
    design_of = importlib.import_module("contestants").design_of
    monkeypatch.setenv("BAPO_KERNELS_DESIGN", "auto")
    for name, design in (("bapo_kernels recompute tile", "tile"), ("bapo_kernels", "auto"), ("plain tile", "auto")):
        with design_of(name):
            assert os.environ["BAPO_KERNELS_DESIGN"] == design
        assert os.environ["BAPO_KERNELS_DESIGN"] == "auto"


@pytest.mark.parametrize("text", ["8192x4096", "8192x4096x151936x1", "8192x0x151936", "8192xax151936", ""])
def test_what_is_no_size(batch, text):
    assert str(batch.Size.parse("8192x4096x151936")) == "8192x4096x151936"
    with pytest.raises((ValueError, TypeError)):  # which argparse reports
        batch.Size.parse(text)


def test_dtypes_stand_apart_and_only_16_bits_beside_the_gemms_and_the_model(batch, tmp_path):
    timings, report = importlib.import_module("timings"), importlib.import_module("gpu_report")
    a = SimpleNamespace(out=tmp_path / "x.csv", device="cpu", section="timings", repeats=1, again=False)
    a.contestants, known = ["plain"], {"card": "cpu", "commit": "x"}
    timings.report.save(a.out, [report.GpuRow("rates", "head: logits to fp32", tflops=1e-3, **known)])
    for dtype in ("bfloat16", "float32"):
        a.dtype = dtype
        timings.Race(a, batch.Size(40, 32, 500), "full", known, float("inf")).run(None)
    of = {r["dtype"]: r for r in rows(a.out)}
    assert float(of["bfloat16"]["gemm_share"]) > 0 and of["bfloat16"]["model"] == "plain"
    assert not of["float32"]["gemm_share"] and not of["float32"]["model"]
    text = report.markdown(timings.report.read(a.out, report.GpuRow))
    for dtype in ("bfloat16", "float32"):
        assert f"timings: 40 tokens, hidden size 32, vocabulary 500, {dtype} |" in text


def test_targets_stand_beside_what_an_h200_did_and_nobody_else(batch):
    report = importlib.import_module("gpu_report")
    row = report.GpuRow(
        "timings", "bapo_kernels recompute gemm", "full", 8192, 4096, 151936, "bfloat16", seconds=0.0605
    )
    slow = replace(row, contestant="bapo_kernels recompute tile", seconds=0.0705)
    late = replace(row, contestant="bapo_kernels one-pass", seconds=0.0501)
    other = replace(row, dtype="float16", seconds=0.01)
    mine = [replace(r, card="NVIDIA H200") for r in (row, slow, late, other)]
    assert report.targets(mine) in report.markdown(mine)
    lines = report.targets(mine).splitlines()
    assert "| forward and backward, recompute | 4096 | 62 ms (good: 58) | 60.5 ms | reached |" in lines
    assert "| separable loss, one pass | 4096 | 49 ms (good: 46) | 50.1 ms | missed |" in lines
    assert "at most" not in report.markdown([replace(r, card="NVIDIA H100") for r in mine])


@pytest.mark.parametrize(("flag", "script"), [([], "run.py"), (["--gpu"], "gpu.py")])
def test_bench_hands_its_arguments_on(monkeypatch, flag, script):
    calls = []
    monkeypatch.setattr(bench.subprocess, "run", lambda c: calls.append(c) or SimpleNamespace(returncode=3))
    assert main(["bench", "--section", "a,b", *flag, "--quick"]) == 3
    assert calls == [[sys.executable, str(FOLDER / script), "--section", "a,b", "--quick"]]


def test_bench_says_what_it_needs_where_there_is_no_source_tree(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "benchmarks")
    assert main(["bench", "--gpu"]) == 2
    assert "checkout" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_run_says_how_to_try_it():
    done = subprocess.run([sys.executable, "-m", "bapo_kernels", "bench", "--gpu"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--device cpu --quick" in done.stderr
