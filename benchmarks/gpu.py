"""Everything there is to know on a GPU machine, within 450 s of measuring (--budget): is it right, and how fast beside what it should be?

    python benchmarks/gpu.py                             # or: bapo-kernels bench --gpu, or: make gpu
    python benchmarks/gpu.py --section env,timings       # some of it
    python benchmarks/gpu.py --budget 200                # in less time
    python benchmarks/gpu.py --device cpu --quick        # a dry run: the same code, tiny, on this machine's CPU

Sections, the worthiest first
  env        card, driver, clocks, versions; what its GEMMs and copies reach, which every share and prediction rests on
  tests      pytest -m gpu
  sanitizer  compute-sanitizer (memcheck, racecheck) over small odd shapes, where it is installed
  check      bapo-kernels check --quick
  agreement  every contestant's loss and gradients against fp64 on a small head
  timings    time, memory, TFLOP/s and GB/s of every contestant, in turns, beside the time that cost.py predicts
  autotune   fused tiles again, with the fastest configuration found on this card (only with --autotune)
  full       bapo-kernels check, whole
  report     Markdown and figure beside the CSV (also of an earlier run)

What is in the CSV for this card and commit is not measured again (--again does); what does not fit into the budget is reported as not
run. Failing tests do not stop the timings; the exit code is 1 if anything of ours failed.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))  # where the package is not installed

import gpu_report  # noqa: E402
import report  # noqa: E402
import torch  # noqa: E402
from arguments import parser_of, sizes, some_of  # noqa: E402
from batch import Size  # noqa: E402
from contestants import ON_GPU, OURS, SCORING_ON_GPU  # noqa: E402
from device import copy_rate, facts, gemms, installed, smi  # noqa: E402
from gpu_report import ABSENT, DONE, FAILED, NOT_RUN, SETTLED, TOLERANCES, GpuRow, of_run  # noqa: E402

from bapo_kernels.head.chunked import MAX_COLUMNS_GPU  # noqa: E402

SIZES = [Size(8192, hidden, vocab) for vocab in (151936, 131072) for hidden in (4096, 2048, 8192)]
QUICK_SIZES = [Size(48, 32, 2000), Size(40, 64, 1000)]
AGREEMENT, QUICK_AGREEMENT = Size(512, 256, 8000), Size(40, 32, 1500)
# Seconds that a section may take, of a budget of BUDGET; the timings take what is left.
BUDGET = 450
LIMITS = {"tests": 120, "sanitizer": 45, "check": 60, "agreement": 45}
LEAST = 8  # seconds, below which nothing is started
RESTARTS = 3  # of a process of timings that died


class Run:
    """The arguments, the rows so far, and the time that is left."""

    def __init__(self, a: argparse.Namespace):
        self.a, self.device = a, torch.device(a.device)
        self.stop = time.monotonic() + a.budget
        self.known = facts(self.device)
        self.out: Path = a.out or HERE / "results" / f"{slug(self.known['card'], a)}.csv"
        # What was not run shall be now.
        sections = [*a.section, *(["rates"] if "env" in a.section else [])]
        if missing := [r for r in self.rows if r.result == NOT_RUN and r.section in sections]:
            kept = [r for r in report.read(self.out, GpuRow) if r not in missing]
            self.out.unlink()
            report.save(self.out, kept)

    @property
    def rows(self) -> list[GpuRow]:
        rows = report.read(self.out, GpuRow) if self.out.exists() else []
        return of_run(rows, self.known["card"], self.known["commit"])

    @property
    def left(self) -> float:
        return self.stop - time.monotonic()

    def limit(self, section: str) -> float:
        """Seconds for a section: its share, if so much is left."""
        share = LIMITS[section] * self.a.budget / BUDGET if section in LIMITS else self.left
        return min(share, self.left)

    def row(self, section: str, what: str, **values) -> GpuRow:
        return GpuRow(section, what, **values, **self.known)

    def save(self, row: GpuRow) -> None:
        took = f" in {row.seconds:.0f} s" if row.seconds and row.section not in ("rates", "timings") else ""
        rate = "".join(f" {v:,.0f} {u}" for v, u in ((row.tflops, "TFLOP/s"), (row.gbs, "GB/s")) if v is not None)
        print(f"  {row.contestant}: {row.result}{took}{rate}{'; ' * bool(row.reason)}{row.reason}", flush=True)
        report.save(self.out, [row])

    def settled(self, row: GpuRow) -> bool:
        """Known from an earlier run. Nothing is known where it is to be done again."""
        found = next((r for r in self.rows if r.key == row.key and r.result in SETTLED), None)
        if found is None or self.a.again:
            return False
        print(f"  {found.contestant}: {found.result}, in {self.out.name} already")
        return True

    def command(self, section: str, what: str, command: list[str], limit: float) -> GpuRow | None:
        """Run it with its output in a file beside the CSV; a row of how it went. None: known already."""
        row = self.row(section, what)
        if self.settled(row):
            return None
        if limit < LEAST:
            row.result, row.reason = NOT_RUN, "no time left"
            return row
        log = self.out.with_name(f"{self.out.stem}-{re.sub('[^a-z0-9]+', '-', what.lower()).strip('-')}.log")
        start = time.monotonic()
        code = logged(command, log, limit)
        row.seconds = time.monotonic() - start
        last = [text for text in log.read_text(errors="replace").splitlines() if text.strip()]
        row.reason = last[-1].strip("= ")[:200] if last else "no output"
        if code is None:
            row.result, row.reason = NOT_RUN, f"stopped after {limit:.0f} s, see {log.name}"
        elif code:
            row.result, row.reason = FAILED, f"exit code {code}, see {log.name}: {row.reason}"
        return row


def logged(command: list[str], log: Path, limit: float) -> int | None:
    """Exit code; None: it took too long, and was stopped with its children."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment(), start_new_session=True
        )
        return finished(process, limit)


def finished(process: subprocess.Popen, limit: float) -> int | None:
    try:
        return process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def slug(card: str, a: argparse.Namespace) -> str:
    if a.device == "cpu":
        return "gpu-dry-run"
    return re.sub("[^a-z0-9]+", "-", card.lower().removeprefix("nvidia")).strip("-")


# The sections


def env(run: Run) -> None:
    print(", ".join(f"{name} {value or 'missing'}" for name, value in run.known.items()))
    card = run.row("env", "clocks before")
    if not run.settled(card):
        card.reason = described(run.device)
        run.save(card)
    if run.settled(run.row("rates", "copy")):
        return
    first, quick = run.a.sizes[0], run.a.quick
    columns, square = (512, 64) if quick else (MAX_COLUMNS_GPU, 8192)
    for what, rate in gemms(run.device, first, columns, square):
        run.save(run.row("rates", what, tflops=rate / 1e12, dtype="bfloat16"))
    run.save(run.row("env", "clocks under load", reason=described(run.device)))
    run.save(run.row("rates", "copy", gbs=copy_rate(run.device, 2**20 if quick else 2**31) / 1e9))
    if run.device.type == "cuda":
        torch.cuda.empty_cache()  # for the processes that follow


def described(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    now = "".join(f", {k} {v}" for k, v in smi().items() if k not in ("name", "driver_version"))
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    chip = (
        f"compute capability {properties.major}.{properties.minor}, {properties.multi_processor_count} multiprocessors"
    )
    return f"{chip}, {memory}{now}"


def tests(run: Run) -> None:
    if not installed("pytest"):
        row = run.row("tests", "pytest -m gpu", result=ABSENT, reason="pytest is not installed")
        save_if(run, None if run.settled(row) else row)
        return
    workers = ["-n", "4"] if installed("xdist") and run.device.type == "cuda" else []
    # The file is named, since collecting all the others takes a while, and packages that this one has no need of.
    command = [sys.executable, "-m", "pytest", "tests/test_gpu.py", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    save_if(run, run.command("tests", "pytest -m gpu", [*command, *workers], run.limit("tests")))


def sanitizer(run: Run) -> None:
    tool, stop = find_sanitizer(), time.monotonic() + run.limit("sanitizer")
    for kind, share in (("memcheck", 0.6), ("racecheck", 1.0)):
        limit = share * (stop - time.monotonic())
        if tool is None:
            row = run.row("sanitizer", kind, result=ABSENT, reason="no compute-sanitizer on this machine")
            save_if(run, None if run.settled(row) else row)
            continue
        script = [sys.executable, str(HERE / "sanitize.py"), "--device", run.device.type]
        command = [tool, "--tool", kind, "--error-exitcode", "9", *script]
        save_if(run, run.command("sanitizer", kind, command, limit))


def find_sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer")
    places = sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))
    return found or (str(places[-1]) if places else None)


def check(run: Run, *, whole: bool = False) -> None:
    section, flags = ("full", []) if whole else ("check", ["--quick"])
    if run.a.quick:  # one loss, since this is only to see that it runs
        flags = ["--quick", "--filter", "dapo, recompute"]
    command = [sys.executable, "-m", "bapo_kernels", "check", "--device", run.device.type, *flags]
    what = f"bapo-kernels check{' --quick' * (not whole)}"
    save_if(run, run.command(section, what, command, run.limit(section)))


def full(run: Run) -> None:
    check(run, whole=True)


def agreement(run: Run) -> None:
    raced(run, "agreement", [QUICK_AGREEMENT if run.a.quick else AGREEMENT], "full,rl,frozen", run.a.contestants)


def timings(run: Run) -> None:
    raced(run, "timings", run.a.sizes, "full,rl,frozen,score,busy", run.a.contestants)


def autotune(run: Run) -> None:
    if run.a.autotune:
        raced(run, "autotune", run.a.sizes, "full,score", [f"{OURS} recompute tile", f"{OURS} tile"])


def raced(run: Run, section: str, sizes: list[Size], patterns: str, contestants: list[str]) -> None:
    """In a process of its own, started again where a contestant took it down."""
    everyone = run.row(section, "all contestants", result=NOT_RUN, reason="no time left")
    stop = time.monotonic() + run.limit(section)
    again = run.a.again
    given = {
        "section": section,
        "sizes": ",".join(map(str, sizes)),
        "patterns": patterns,
        "contestants": ",".join(contestants),
        "out": run.out,
        "commit": run.known["commit"],
        "device": run.device.type,
        "dtype": run.a.dtype,
        "repeats": run.a.repeats,
    }
    for _ in range(RESTARTS):
        left = stop - time.monotonic()
        if left < LEAST:
            run.save(everyone)
            return
        # The last measurement may begin when the time is over, and the process has to start.
        seconds = f"{max(left - 5, 1):.0f}"
        flags = [f"--{name}={value}" for name, value in {**given, "seconds": seconds}.items()]
        command = [sys.executable, str(HERE / "timings.py"), *flags, *(["--again"] if again else [])]
        sys.stdout.flush()
        code = finished(subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True), left + 20)
        if code == 0:
            return
        again = False  # what was measured before it died is new
        print(f"  the process ended with {'no answer' if code is None else code}; what is missing is tried again")
    everyone.result, everyone.reason = FAILED, f"the process died {RESTARTS} times"
    run.save(everyone)


def save_if(run: Run, row: GpuRow | None) -> None:
    if row is not None:
        run.save(row)


def write_report(run: Run) -> None:
    if not run.rows:
        print("  nothing to report")
        return
    text = gpu_report.markdown(run.rows)
    run.out.with_suffix(".md").write_text(text)
    print(text)
    if installed("matplotlib"):
        from gpu_plot import figure

        for path in figure(run.rows, run.out):
            print(f"drawn: {path}")
    else:
        print("not drawn: matplotlib is not installed")


SECTIONS = {f.__name__: f for f in (env, tests, sanitizer, check, agreement, timings, autotune, full)}
SECTIONS["report"] = write_report


def failures(rows: list[GpuRow]) -> Iterator[str]:
    """Of ours: a peer that refuses or computes something else is shown, and is not our failure."""
    for row in rows:
        ours = row.section not in ("timings", "agreement", "autotune") or row.contestant.startswith((OURS, "all"))
        if ours and row.result == FAILED:
            yield f"{gpu_report.describe(row)}: {row.reason}"


def main() -> int:
    a = parse()
    if a.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; a dry run: --device cpu --quick", file=sys.stderr)
        return 2
    run = Run(a)
    for section in a.section:
        print(f"\n== {section} ({max(run.left, 0):.0f} s left)", flush=True)
        SECTIONS[section](run)
    missing = gpu_report.not_run(run.rows)
    failed = list(failures(run.rows))
    print(f"\n{len([r for r in run.rows if r.result == DONE])} rows in {run.out}")
    for title, texts in (("not run", missing), ("FAILED", failed)):
        for text in texts:
            print(f"{title}: {text}")
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, SECTIONS)
    add = parser.add_argument
    add("--budget", type=float, default=BUDGET, help=f"seconds; default: {BUDGET}")
    add("--sizes", type=sizes, help=f"tokens x hidden x vocab; default: {','.join(map(str, SIZES))}")
    add("--dtype", default="bfloat16", choices=TOLERANCES)
    everyone = list(dict.fromkeys(ON_GPU + SCORING_ON_GPU))
    add("--contestants", type=some_of(everyone), default=[], help="of the agreement and the timings; default: all")
    add("--repeats", type=int, help="turns that count; default: 5")
    add("--again", action="store_true", help="measure what is in the CSV too")
    add("--autotune", action="store_true", help="also with the tile configurations searched for on this card")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--quick", action="store_true", help="tiny sizes: does it run?")
    add("--out", type=Path, help="CSV; default: benchmarks/results/<card>.csv")
    a = parser.parse_args()
    a.section = [s for s in SECTIONS if s in a.section]  # in their order
    a.sizes = a.sizes or (QUICK_SIZES if a.quick else SIZES)
    a.repeats = a.repeats or (2 if a.quick else 5)
    return a


if __name__ == "__main__":
    sys.exit(main())
