"""The sections of the benchmark. Each prints as it goes, and yields rows as soon as they are complete."""

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator

import contestants
import memory
import report
from batch import PATTERNS, Answer, Batch, Size, batch_with_answer, step
from contestants import Contestant
from measure import Floor, mean_rate, seconds
from options import BASE, OPTIONS
from report import Row

SMALL = Size(64, 128, 1000)
AGREEMENT = Size(96, 64, 3000)
SCALING_TOKENS = (1024, 4096, 16384, 65536)
SCALING_HEAD = (256, 16384)
SCALED = ("plain", contestants.OURS, f"{contestants.OURS} recompute")
PLAIN_LIMIT = 2**29  # logits; the plain path takes 12 bytes for each

Entry = tuple[Callable[[], Contestant], Batch]


def agreement(a: argparse.Namespace) -> Iterator[list[Row]]:
    size = Size(*map(min, AGREEMENT, (a.tokens, a.hidden, a.vocab)))
    cases = []
    for pattern in a.patterns:
        for stale in (0.0, 0.3):
            batch, answer = batch_with_answer(size, PATTERNS[pattern], stale)
            race = Race(entries(a.contestants, batch), answer=answer)
            race.run(turns=0, label=f"agreement, {pattern}")
            name = pattern + (" clipped" if stale else "")
            cases.append([race.row("agreement", name, contestant) for contestant in race.field])
    print(f"\nagreement with fp64: {size.tokens} tokens, hidden size {size.hidden}, vocabulary {size.vocab}")
    print(report.errors(cases), flush=True)
    yield [row for rows in cases for row in rows]


def peers(a: argparse.Namespace) -> Iterator[list[Row]]:
    size = Size(a.tokens, a.hidden, a.vocab)
    for pattern in a.patterns:
        batch, answer = batch_with_answer(size, PATTERNS[pattern])
        # Dropping masked rows by hand is the plain path where there are none.
        names = [n for n in a.contestants if PATTERNS[pattern].counted < 1 or not n.endswith(" compact")]
        yield compete(a, "peers", pattern, entries(names, batch), answer=answer)


def options(a: argparse.Namespace) -> Iterator[list[Row]]:
    size = Size(a.tokens, a.hidden, a.vocab)
    for pattern in trained(a.patterns):
        batches: dict[tuple, Batch] = {}
        field: dict[str, Entry] = {}
        for name, option in OPTIONS.items():
            kind = (option.stale, option.dtype)
            if kind not in batches:
                batches[kind] = option.batch(size, PATTERNS[pattern])
            made = option.contestant(batches[kind])
            field[name] = (lambda made=made: made, batches[kind])
        yield compete(a, "options", pattern, field, base=BASE)


def scaling(a: argparse.Namespace) -> Iterator[list[Row]]:
    hidden, vocab = SCALING_HEAD
    for tokens in a.scaling_tokens:
        names = [n for n in SCALED if n != "plain" or tokens * vocab < PLAIN_LIMIT]
        for pattern in trained(a.patterns):
            batch = Batch(Size(tokens, hidden, vocab), PATTERNS[pattern])
            yield compete(a, "scaling", pattern, entries(names, batch))


def small(a: argparse.Namespace) -> Iterator[list[Row]]:
    for pattern in trained(a.patterns):
        field = entries(("plain", contestants.OURS), Batch(SMALL, PATTERNS[pattern]))
        yield compete(a, "small", pattern, field, turns=5 * a.repeats, calls=10 if a.quick else 100)


def floor(a: argparse.Namespace) -> Iterator[list[Row]]:
    size = Size(a.tokens, a.hidden, a.vocab)
    bare = Floor(size)
    turns = [bare.rates() for _ in range(3 * a.repeats)]
    print(f"\nfloor: products on a tile of {' x '.join(map(str, bare.dz.shape))}, hidden size {size.hidden}")
    rows = []
    for name in turns[0]:
        rate = statistics.median(t[name] for t in turns)
        print(f"  {name:<27}{rate:>9.0f} GFLOP/s", flush=True)
        rows.append(Row("floor", "", name, *size, gflops=rate, repeats=len(turns)))
    yield rows


SECTIONS = {f.__name__: f for f in (agreement, peers, options, scaling, small, floor)}


def trained(patterns: list[str]) -> list[str]:
    return [p for p in patterns if not PATTERNS[p].frozen]


def entries(names: Iterable[str], batch: Batch) -> dict[str, Entry]:
    return {n: (lambda n=n: contestants.get(n), batch) for n in names}


class Race:
    """Contestants in turns. What refuses a pattern or is not installed gets a reason instead of numbers."""

    def __init__(self, field: dict[str, Entry], *, answer: Answer | None = None, floor: Floor | None = None):
        self.field, self.answer, self.floor = field, answer, floor
        self.times: dict[str, list[float]] = {name: [] for name in field}
        self.errors: dict[str, float] = {}
        self.reasons: dict[str, str] = {}
        self.rates: list[dict[str, float]] = []

    def run(self, *, turns: int, label: str, calls: int = 1) -> None:
        for turn in range(turns + 1):
            for name in self.field:
                if name in self.reasons:
                    continue
                progress(f"{label}: turn {turn} of {turns}, {name}")
                try:
                    self.warm_up(name) if turn == 0 else self.time(name, calls)
                except (ImportError, ValueError, RuntimeError) as e:
                    self.reasons[name] = (str(e).splitlines() or [type(e).__name__])[0]
                self.field[name][1].clear()
            if turn == 0:
                gc.freeze()  # what the imports left makes a collection slow, and one goes before each measurement
            elif self.floor is not None:
                self.rates.append(self.floor.rates())
        progress("")

    def warm_up(self, name: str) -> None:
        get, batch = self.field[name]
        loss = step(get(), batch)
        if self.answer is not None:
            self.errors[name] = self.answer.error(loss, batch)

    def time(self, name: str, calls: int) -> None:
        get, batch = self.field[name]
        loss_of = get()

        def repeated() -> None:
            for _ in range(calls):
                batch.clear()
                step(loss_of, batch)

        self.times[name].append(seconds(repeated) / calls)

    def row(self, section: str, pattern: str, name: str, base: str = "") -> Row:
        """GFLOP/s only where the pattern says what is needed: an entropy bonus or a clip gives gradients to more or fewer rows."""
        size, times = self.field[name][1].size, self.times[name]
        row = Row(section, pattern, name, *size, error=self.errors.get(name))
        row.reason, row.repeats = self.reasons.get(name, ""), len(times)
        if times and not row.reason:
            row.seconds, row.fastest, row.slowest = statistics.median(times), min(times), max(times)
            row.ratio = row.seconds / statistics.median(self.times[base]) if self.times.get(base) else None
            row.gemm_gflops = mean_rate(self.rates)
            if section != "options":
                flop = PATTERNS[pattern].passes * 2 * size.tokens * size.hidden * size.vocab
                row.gflops = flop / row.seconds / 1e9
                row.gemm_share = row.gflops / row.gemm_gflops
        return row


def compete(
    a: argparse.Namespace,
    section: str,
    pattern: str,
    field: dict[str, Entry],
    *,
    base: str = "plain",
    answer: Answer | None = None,
    turns: int | None = None,
    calls: int = 1,
) -> list[Row]:
    size = next(iter(field.values()))[1].size
    race = Race(field, answer=answer, floor=Floor(size))
    race.run(turns=turns or a.repeats, label=f"{section}, {pattern}", calls=calls)
    print(f"\n{section}, {pattern}: {size.tokens} tokens, hidden size {size.hidden}, vocabulary {size.vocab}")
    print(report.header(base))
    rows = []
    for name in field:
        row = race.row(section, pattern, name, base)
        if row.seconds and section != "small" and memory.AVAILABLE and (a.memory is None or name in a.memory):
            progress(f"{section}, {pattern}: memory of {name}")
            try:
                row.extra_mib = memory.extra_memory(section, name, pattern, size) / 2**20
            except RuntimeError as e:  # killed for its memory, perhaps: no reason to lose the others' numbers
                print(e, file=sys.stderr)
            progress("")
        print(report.line(row), flush=True)
        rows.append(row)
    return rows


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
