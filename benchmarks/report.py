"""Rows of results: on the terminal as they come, in a CSV, as Markdown."""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from batch import PATTERNS

TOLERANCE = 1e-5  # of an fp32 contestant's error; rounding leaves about 1e-6


@dataclass
class Row:
    section: str
    pattern: str
    contestant: str
    tokens: int
    hidden: int
    vocab: int
    seconds: float | None = None  # median of the turns
    fastest: float | None = None
    slowest: float | None = None
    ratio: float | None = None  # to the plain path, or the section's own base, in this run
    gflops: float | None = None  # of the passes that are needed: whoever does more, or does it slower, has fewer
    gemm_gflops: float | None = None  # bare matrix products in the same run
    gemm_share: float | None = None
    extra_mib: float | None = None
    error: float | None = None  # largest relative error of loss and gradients against fp64
    reason: str = ""  # why there are no numbers
    repeats: int = 0
    cpu: str = ""
    cores: int = 0
    threads: int = 0
    torch: str = ""
    liger: str = ""
    trl: str = ""
    verl: str = ""
    bapo_kernels: str = ""

    @property
    def key(self) -> tuple:
        return self.section, self.tokens, self.hidden, self.vocab, self.pattern, self.contestant, self.threads, self.cpu

    @property
    def wrong(self) -> bool:
        return self.error is not None and not self.error <= TOLERANCE


def read(path: Path, kind: type = Row) -> list:
    """Rows of `kind`, a dataclass with a `key`."""
    kinds = {f.name: f.type for f in fields(kind)}

    def value(name: str, text: str):
        if kinds[name] is str:
            return text
        return (int if kinds[name] is int else float)(text) if text else None

    with path.open(newline="") as file:
        return [kind(**{name: value(name, text) for name, text in r.items()}) for r in csv.DictReader(file)]


def save(path: Path, rows: list) -> None:
    """Rows of other sections, sizes and machines stay as they are in the file."""
    if not rows:
        return
    kind, new = type(rows[0]), {r.key for r in rows}
    kept = [r for r in read(path, kind) if r.key not in new] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")  # whoever is stopped while writing loses nothing
    with unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(kind)], lineterminator="\n")
        writer.writeheader()
        for row in kept + rows:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in asdict(row).items()})
    unfinished.replace(path)


def number(value: float | None, pattern: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value * scale, pattern)


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def header(base: str) -> str:
    return f"{'':<29}{'time':>9}{'x ' + base:>9}{'GFLOP/s':>9}{'of GEMM':>9}{'extra MiB':>11}{'error':>10}"


def line(row: Row) -> str:
    if row.reason:
        return f"  {row.contestant:<27}{'-':>9}  {row.reason}"
    numbers = (
        f"{duration(row.seconds):>9}{number(row.ratio, '.2f'):>9}{number(row.gflops, '.0f'):>9}"
        f"{number(row.gemm_share, '.0%'):>9}{number(row.extra_mib, '.0f'):>11}{number(row.error, '.0e'):>10}"
    )
    return f"  {row.contestant:<27}{numbers}{'  WRONG' if row.wrong else ''}"


def errors(cases: list[list[Row]]) -> str:
    """Contestants down, cases across."""
    lines = ["error" + " " * 24 + "".join(f"{rows[0].pattern:>20}" for rows in cases)]
    for mine in zip(*cases, strict=True):
        cells = "".join(f"{number(r.error, '.0e') + (' WRONG' if r.wrong else ''):>20}" for r in mine)
        reasons = dict.fromkeys(r.reason for r in mine if r.reason)
        lines.append(f"  {mine[0].contestant:<27}{cells}{''.join(f'  {r}' for r in reasons)}")
    return "\n".join(lines)


def of_one_machine(rows: list[Row]) -> list[Row]:
    """Those of the machine and versions of the last one."""

    def facts(row: Row) -> tuple:
        return row.cpu, row.cores, row.threads, row.torch, row.liger, row.trl, row.verl, row.bapo_kernels

    return [row for row in rows if facts(row) == facts(rows[-1])]


def markdown(rows: list[Row]) -> str:
    """What the README shows, a table for each section and size."""
    rows, parts = of_one_machine(rows), []
    for (section, hidden, vocab), group in groups(rows, lambda r: (r.section, r.hidden, r.vocab)):
        if section in ("peers", "options"):
            for tokens, of_size in groups(group, lambda r: r.tokens):
                parts.append(
                    _by_pattern(f"{section}: {tokens} tokens, hidden size {hidden}, vocabulary {vocab}", of_size)
                )
        elif section == "small":
            parts.append(
                _by_pattern(f"small: {group[0].tokens} tokens, hidden size {hidden}, vocabulary {vocab}", group)
            )
        elif section == "scaling":
            parts.append(_by_tokens(f"scaling: hidden size {hidden}, vocabulary {vocab}", group))
    if rows:
        parts.append(provenance(rows[-1]))
    return "\n\n".join(parts) + "\n"


def provenance(row: Row) -> str:
    packages = {"torch": row.torch, "Liger": row.liger, "TRL": row.trl, "verl": row.verl}
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    return f"{row.cpu}, {row.threads} of {row.cores} cores; {versions}, bapo_kernels {row.bapo_kernels}."


def _by_pattern(title: str, rows: list[Row]) -> str:
    patterns = [p for p in PATTERNS if any(r.pattern == p for r in rows)]
    memory = next((p for p in patterns if any(r.extra_mib is not None for r in rows if r.pattern == p)), None)
    head = [title, *patterns, *([f"extra MiB, {memory}"] if memory else [])]
    body = []
    for contestant, mine in groups(rows, lambda r: r.contestant):
        of = {r.pattern: r for r in mine}
        cells = [_time(of.get(p)) for p in patterns]
        if memory:
            cells.append(number(of[memory].extra_mib if memory in of else None, ",.0f"))
        body.append([name_of(contestant), *cells])
    return table(head, body)


def _by_tokens(title: str, rows: list[Row]) -> str:
    tokens = sorted({r.tokens for r in rows})
    body = []
    for (contestant, pattern), mine in groups(rows, lambda r: (r.contestant, r.pattern)):
        of = {r.tokens: r for r in mine}
        cells = [
            f"{of[n].seconds / n * 1e6:.0f} us, {number(of[n].extra_mib, ',.0f')} MiB"
            if n in of and of[n].seconds is not None
            else "-"
            for n in tokens
        ]
        body.append([f"{name_of(contestant)}, {pattern}", *cells])
    return table([f"{title}: time per token, extra memory", *(f"{n:,} tokens" for n in tokens)], body)


def _time(row: Row | None) -> str:
    if row is None or row.seconds is None:
        return "-"
    return f"{duration(row.seconds)} ({number(row.ratio, '.2f')})"


def name_of(contestant: str) -> str:
    return f"**{contestant}**" if contestant.startswith("bapo_kernels") else contestant


def table(head: list[str], body: list[list[str]]) -> str:
    """Markdown."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def aligned(head: list[str], body: list[list[str]]) -> str:
    """For a terminal."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = []
    for first, *others in [head, *body]:
        rest = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *rest]).rstrip())
    return "\n".join(lines)


def groups(rows: Iterable, key) -> Iterator[tuple]:
    """Like itertools.groupby, in the order of first appearance and whatever lies between."""
    groups: dict = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    yield from groups.items()
