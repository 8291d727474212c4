"""Rows of a run on a GPU, and what is made of them: tables, and what one H200 is meant to reach beside what it did."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import harmonic_mean

import report
from batch import ALL_PATTERNS, Size
from contestants import ON_GPU, OURS, SCORING_ON_GPU
from report import duration, number

DONE, FAILED, NOT_RUN, REFUSED, ABSENT = "done", "failed", "not run", "refused", "not present"
SETTLED = (DONE, FAILED, REFUSED, ABSENT)  # not looked at again on the same card and commit
# The largest relative error of loss and gradients: of plain 16-bit inputs, gradients are rounded to 3 digits.
TOLERANCES = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 5e-3}


@dataclass
class GpuRow:
    section: str
    contestant: str  # or what was run or measured
    pattern: str = ""
    tokens: int = 0
    hidden: int = 0
    vocab: int = 0
    dtype: str = ""
    result: str = DONE
    seconds: float | None = None  # median of the turns; for tests and checks, what they took
    fastest: float | None = None
    slowest: float | None = None
    repeats: int = 0
    predicted: float | None = None  # seconds, by cost.py: arithmetic, not a measurement
    model: str = ""  # the path of cost.py that it is a prediction for
    engine: str = ""  # that ours took
    tflops: float | None = None  # of the passes that are needed: whoever does more, or does it slower, has fewer
    gbs: float | None = None  # of inputs and gradients, which have to be read and written once
    gemm_share: float | None = None  # of the rate of the chip's own GEMMs at this head
    extra_mib: float | None = None  # peak beyond inputs and gradients
    error: float | None = None  # largest relative error of loss and gradients against fp64
    reason: str = ""  # why there are no numbers; otherwise what is to be known of them
    card: str = ""
    driver: str = ""
    commit: str = ""
    torch: str = ""
    triton: str = ""
    liger: str = ""
    trl: str = ""
    verl: str = ""

    @property
    def key(self) -> tuple:
        of_run = self.card, self.commit, self.section, self.contestant
        return *of_run, self.pattern, self.tokens, self.hidden, self.vocab, self.dtype

    @property
    def shape(self) -> Size:
        return Size(self.tokens, self.hidden, self.vocab)

    @property
    def milliseconds(self) -> float | None:
        return None if self.seconds is None else self.seconds * 1e3

    @property
    def bad(self) -> bool:
        return self.result == FAILED or (self.error is not None and not self.error <= TOLERANCES[self.dtype])


def of_run(rows: list[GpuRow], card: str, commit: str) -> list[GpuRow]:
    return [r for r in rows if (r.card, r.commit) == (card, commit)]


def gemm_rate(rows: list[GpuRow]) -> float | None:
    """FLOP/s of equal work on the head's three products, as measured; None: not yet."""
    rates = [r.tflops for r in rows if r.section == "rates" and r.contestant.startswith("head:") and r.tflops]
    return harmonic_mean(rates) * 1e12 if rates else None


# On the terminal

HEADER = f"{'':<32}{'time':>9}{'predicted':>11}{'TFLOP/s':>9}{'GB/s':>7}{'of GEMM':>9}{'extra MiB':>11}{'error':>8}"


def line(row: GpuRow) -> str:
    if row.seconds is None and row.error is None:
        return f"  {row.contestant:<30}{row.result:>9}  {row.reason}"
    return (
        f"  {row.contestant:<30}{duration(row.seconds):>9}{duration(row.predicted):>11}{number(row.tflops, '.0f'):>9}"
        f"{number(row.gbs, '.0f'):>7}{number(row.gemm_share, '.0%'):>9}{number(row.extra_mib, ',.0f'):>11}"
        f"{number(row.error, '.0e'):>8}{'  WRONG' if row.bad else ''}"
    )


# In Markdown


def markdown(rows: list[GpuRow]) -> str:
    """Of the rows of one run."""
    first = rows[-1]
    parts = [f"# {first.card}", provenance(first)]
    rates = [[r.contestant, number(r.tflops, ".0f"), number(r.gbs, ",.0f")] for r in rows if r.section == "rates"]
    if rates:
        parts.append(report.table(["measured rates", "TFLOP/s", "GB/s"], rates))
    runs = [
        [r.section, r.contestant, r.result, duration(r.seconds), r.reason]
        for r in rows
        if r.section in ("env", "tests", "sanitizer", "check", "full") or r.contestant.startswith("configuration")
    ]
    if runs:
        parts.append(report.table(["section", "what", "result", "took", ""], runs))
    errors = [r for r in rows if r.section == "agreement"]
    for dtype, group in report.groups(errors, lambda r: r.dtype):
        parts.append(by_pattern(group, f"error against fp64, {dtype}", lambda r: number(r.error, ".1e")))
    for section in ("timings", "autotune"):
        mine = [r for r in rows if r.section == section and r.pattern]
        for ((tokens, hidden, vocab), dtype), group in report.groups(mine, lambda r: (r.shape, r.dtype)):
            title = f"{section}: {tokens:,} tokens, hidden size {hidden:,}, vocabulary {vocab:,}, {dtype}"
            parts.append(by_pattern(group, title, time))
            parts.append(by_pattern(group, "extra MiB", lambda r: number(r.extra_mib, ",.0f")))
    if any(r.predicted for r in rows):
        parts.append("In brackets the prediction of `benchmarks/cost.py`: arithmetic, not a measurement.")
    if "H200" in first.card:  # what another one takes says nothing about them
        parts.append(targets(rows))
    if missing := not_run(rows):
        parts.append(f"Not run: {'; '.join(missing)}.")
    return "\n\n".join(parts) + "\n"


def not_run(rows: list[GpuRow]) -> list[str]:
    """What was left out, contestants of a pattern together."""
    missing = [r for r in rows if r.result == NOT_RUN]
    texts = []
    for _, group in report.groups(missing, lambda r: (r.section, r.shape, r.pattern, r.reason)):
        what = describe(group[0]) if len(group) == 1 else f"{describe(group[0], named=False)} {len(group)} contestants"
        texts.append(f"{what} ({group[0].reason})")
    return texts


def provenance(row: GpuRow) -> str:
    packages = {"torch": row.torch, "Triton": row.triton, "Liger": row.liger, "TRL": row.trl, "verl": row.verl}
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    return f"{row.card}, driver {row.driver or '-'}; {versions}; bapo_kernels {row.commit}."


def describe(row: GpuRow, named: bool = True) -> str:
    shape = str(row.shape) if row.tokens else ""
    return " ".join(part for part in (row.section, shape, row.pattern, row.contestant if named else "") if part)


def by_pattern(rows: list[GpuRow], title: str, cell: Callable[[GpuRow], str]) -> str:
    patterns = [p for p in ALL_PATTERNS if any(r.pattern == p for r in rows)]
    body = []
    for contestant, mine in report.groups(in_order(rows), lambda r: r.contestant):
        of = {r.pattern: r for r in mine}
        body.append([report.name_of(contestant), *(cell(of[p]) if p in of else "-" for p in patterns)])
    return report.table([title, *patterns], body)


def in_order(rows: list[GpuRow]) -> list[GpuRow]:
    """Ours before the others."""
    order = list(dict.fromkeys(ON_GPU + SCORING_ON_GPU + tuple(r.contestant for r in rows)))
    return sorted(rows, key=lambda r: (not r.contestant.startswith(OURS), order.index(r.contestant)))


def time(row: GpuRow) -> str:
    if row.seconds is None:
        return row.result
    return duration(row.seconds) + (f" ({duration(row.predicted)})" if row.predicted else "")


# What one H200 is meant to reach: bf16, 8192 tokens, vocabulary 151936, entropy on


@dataclass(frozen=True)
class Target:
    what: str
    hidden: int
    milliseconds: float
    pattern: str
    contestants: tuple[str, ...]  # the best of them counts
    good: float | None = None


SCORING = tuple(f"{OURS}{design}" for design in ("", " gemm", " tile"))
RECOMPUTE = tuple(f"{OURS} recompute {design}" for design in ("gemm", "tile"))
ONE_PASS, FROZEN = (f"{OURS} one-pass",), (f"{OURS} frozen",)
TARGETS = (
    Target("log-probs and entropy only", 4096, 16, "score", SCORING),
    Target("forward and backward, recompute", 4096, 62, "full", RECOMPUTE, good=58),
    Target("separable loss, one pass", 4096, 49, "full", ONE_PASS, good=46),
    Target("frozen head", 4096, 31, "frozen", FROZEN),
    Target("70 % count, 70 % of them with a gradient, recompute", 4096, 35, "busy", RECOMPUTE),
    Target("the same, one pass", 4096, 29, "busy", ONE_PASS),
    Target("log-probs and entropy only", 2048, 8.5, "score", SCORING),
    Target("forward and backward, recompute", 2048, 33, "full", RECOMPUTE),
    Target("separable loss, one pass", 2048, 26, "full", ONE_PASS),
    Target("frozen head", 2048, 17, "frozen", FROZEN),
)


def targets(rows: list[GpuRow]) -> str:
    body = []
    for t in TARGETS:
        times = [
            r.seconds * 1e3
            for r in rows
            if r.section == "timings" and r.shape == (8192, t.hidden, 151936) and r.dtype == "bfloat16"
            if r.pattern == t.pattern and r.contestant in t.contestants and r.seconds
        ]
        found = min(times, default=None)
        verdict = "not measured" if found is None else "reached" if found <= t.milliseconds else "missed"
        wanted = f"{t.milliseconds:g} ms" + (f" (good: {t.good:g})" if t.good else "")
        body.append([t.what, f"{t.hidden}", wanted, f"{found:.1f} ms" if found else "-", verdict])
    head = ["on one H200, bf16, 8192 tokens, vocabulary 151936", "hidden size", "at most", "measured", ""]
    return report.table(head, body)
