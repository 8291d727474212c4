"""What a step of the LM head should cost on a GPU: operations, bytes and a predicted time for each path, as arithmetic and not measured.

    python benchmarks/cost.py --chip h200 --tokens 8192 --hidden 4096 --vocab 151936
    python benchmarks/cost.py --chip h200 --unmasked 0.7 --active 0.25 --markdown
    python benchmarks/cost.py --results benchmarks/results/h200.csv     # rates and times measured on that card, beside the prediction

The head is held in 16 bits, logits and sums are fp32. Terms of a time, which add up:

  products in the vendor's GEMM, at the rate of the chip's GEMMs
  products in a fused Triton tile, at its lower rate; what each logit costs in the tile's epilogue where nothing overlaps it
  logits that kernels of their own read and write (fold, gradient of the logits), at the bandwidth
  sums of gradients, read and written beside the GEMM that makes them: half of their traffic is taken to be hidden
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import report
from batch import ALL_PATTERNS
from contestants import DESIGNS
from gpu_report import GpuRow, gemm_rate, of_run

from bapo_kernels.head.chunked import slice_edges

POOL = 4096  # tokens whose products the one-pass engine keeps
# Instructions of the epilogue of a 128 x 256 tile: so many cycles, on 132 multiprocessors at 1.75 GHz.
EPILOGUE = 4500 / (128 * 256) / 132 / 1.75e9
TILE_SHARE = 0.87  # of a GEMM's rate that a Triton tile reaches where nothing is known of the chip


@dataclass(frozen=True)
class Chip:
    name: str
    gemm: float  # FLOP/s of the vendor's 16-bit GEMMs at the head's shapes
    tile: float  # of a fused Triton tile's main loop
    bandwidth: float  # bytes/s of a copy, read and written
    epilogue: float = EPILOGUE  # seconds for each logit, beside the main loop of a tile
    measured: tuple[str, ...] = ()  # of these rates; the others are assumed

    @classmethod
    def of_rows(cls, rows: list[GpuRow]) -> "Chip | None":
        """Rates as `gpu.py` measured them. No measurement says what a tile's main loop does: its share of the GEMM's rate is assumed."""
        rates = [r for r in rows if r.section == "rates"]
        gemm, copies = gemm_rate(rates), [r.gbs * 1e9 for r in rates if r.gbs]
        if gemm is None or not copies:
            return None
        known = find(rates[-1].card)
        share = known.tile / known.gemm if known else TILE_SHARE
        epilogue = known.epilogue if known else EPILOGUE
        return cls(rates[-1].card, gemm, share * gemm, max(copies), epilogue, measured=("gemm", "bandwidth"))

    def origin(self, rate: str) -> str:
        return "measured" if rate in self.measured else "assumed"


# Assumed rates are implied by published times of other packages. On an H200, 790 TFLOP/s are measured for an 8192^3 GEMM, of which the
# products of a head reach less: 745, implied by 17.33 ms for three passes at 4096 x 4096 x 128256. The others follow in the same way.
# B200's tiles overlap their epilogue with the next tile, the others do not.
CHIPS = {
    "h100": Chip("H100", 715e12, 620e12, 2.9e12),
    "h200": Chip("H200", 745e12, 650e12, 4.3e12, measured=("bandwidth",)),
    "b200": Chip("B200", 1630e12, 1300e12, 7e12, epilogue=0.0),
    "a100": Chip("A100", 250e12, 217e12, 1.7e12),
}


def find(card: str) -> Chip | None:
    """The chip of the table that a card's full name speaks of."""
    return next((chip for name, chip in CHIPS.items() if name in card.lower()), None)


@dataclass(frozen=True)
class Step:
    """One step of the head; `unmasked` and `active` are shares of all tokens: those that count, those that have a gradient."""

    tokens: int
    hidden: int
    vocab: int
    unmasked: float = 1.0
    active: float = 1.0
    frozen: bool = False

    @property
    def a_pass(self) -> float:
        """Operations of one product of all tokens with the weight."""
        return 2.0 * self.tokens * self.hidden * self.vocab

    @property
    def logits(self) -> float:
        return float(self.tokens) * self.vocab

    @property
    def weight(self) -> float:
        """Its elements."""
        return float(self.vocab) * self.hidden

    @property
    def products(self) -> int:
        """For the gradient of a row: with the weight for d_hidden, with the hidden states for d_weight."""
        return 1 if self.frozen else 2


@dataclass(frozen=True)
class Cost:
    gemm: float = 0.0  # operations in the vendor's GEMM
    tile: float = 0.0  # operations in a fused tile
    epilogue: float = 0.0  # logits that pass through a fused tile's epilogue
    streamed: float = 0.0  # bytes moved by kernels of their own
    summed: float = 0.0  # bytes of sums beside a GEMM

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Cost)))

    def times(self, share: float) -> "Cost":
        return Cost(*(share * getattr(self, f.name) for f in fields(Cost)))

    @property
    def flop(self) -> float:
        return self.gemm + self.tile

    @property
    def bytes(self) -> float:
        return self.streamed + self.summed

    def seconds(self, chip: Chip) -> float:
        return (
            self.gemm / chip.gemm
            + self.tile / chip.tile
            + self.epilogue * chip.epilogue
            + (self.streamed + self.summed / 2) / chip.bandwidth
        )


def logits(s: Step, design: str) -> Cost:
    """A product of all tokens with the weight, folded into statistics: in the tile, or from an fp32 tile in memory."""
    if design == "tile":
        return Cost(tile=s.a_pass, epilogue=s.logits)
    return Cost(gemm=s.a_pass, streamed=4 * s.logits)


def score(s: Step, design: str = "gemm") -> Cost:
    """Log-probs and entropy without a gradient."""
    return logits(s, design).times(s.unmasked)


def recompute(s: Step, design: str = "gemm") -> Cost:
    """Logits of what counts; of what has a gradient again, as 16-bit gradients of the logits, which are multiplied into the sums."""
    if design == "tile":
        again = Cost(tile=s.a_pass, epilogue=s.logits)  # its stores hide behind the main loop
    else:
        again = Cost(gemm=s.a_pass, streamed=6 * s.logits)  # fp32 read, 16 bits written
    slices = len(slice_edges(s.vocab, s.hidden, gpu=True)) - 1  # each reads and writes d_hidden
    again += Cost(gemm=s.products * s.a_pass, summed=8 * s.tokens * s.hidden * slices)
    return score(s, design) + again.times(s.active) + Cost(summed=0 if s.frozen else 2 * s.weight)


def one_pass(s: Step) -> Cost:
    """Products are kept, and become gradients in their place; d_weight is summed up in fp32, a pool of tokens at a time, and cast once."""
    kept = Cost(gemm=s.products * s.a_pass, streamed=6 * s.logits)
    pools = -(-round(s.tokens * s.unmasked) // POOL)
    sums = Cost() if s.frozen else Cost(streamed=6 * s.weight, summed=8 * s.weight * pools)
    return score(s) + kept.times(s.active) + sums


def frozen(s: Step) -> Cost:
    """d logprob / d hidden of all that counts, in the forward: exponentials go back as 16 bits."""
    slices = len(slice_edges(s.vocab, s.hidden, gpu=True)) - 1  # each reads and writes d_hidden
    u = Cost(gemm=s.a_pass, streamed=2 * s.logits, summed=8 * s.tokens * s.hidden * slices)
    return score(s) + u.times(s.unmasked)


def plain(s: Step) -> Cost:
    """Full logits, widened to fp32, log_softmax, autograd, for every row. Bytes of a logit: 6 to widen it, 8 for log_softmax, 4 for the
    zeros that gather's gradient fills in, 12 for the gradient of log_softmax, 6 to narrow it."""
    return Cost(gemm=(1 + s.products) * s.a_pass, streamed=36 * s.logits)


def plain_score(s: Step) -> Cost:
    return Cost(gemm=s.a_pass, streamed=14 * s.logits)


def paths(s: Step) -> Iterator[tuple[str, Cost]]:
    yield "plain", plain(s)
    for design in DESIGNS:
        yield f"recompute, {design}", recompute(s, design)
    yield "one-pass, gemm", one_pass(s)
    if s.frozen:
        yield "frozen, gemm", frozen(s)


def scoring(s: Step) -> Iterator[tuple[str, Cost]]:
    yield "plain", plain_score(s)
    for design in DESIGNS:
        yield f"log-probs, {design}", score(s, design)


def break_even(chip: Chip, hidden: int) -> float:
    """FLOP/s that a fused tile has to sustain, epilogue included, to beat a GEMM that leaves its tile to a fold."""
    return chip.gemm / (1 + 2 * chip.gemm / (hidden * chip.bandwidth))


def table(chip: Chip, s: Step, measured: dict[tuple[str, str], float]) -> tuple[list[str], list[list[str]]]:
    """`measured`: seconds by part ("trained", "frozen", "scoring") and path."""
    head = ["", "passes", "TFLOP", "GB", f"{chip.name}, predicted", *(["measured"] if measured else [])]
    body = []
    parts = (
        ("trained", paths(replace(s, frozen=False))),
        ("frozen", paths(replace(s, frozen=True))),
        ("scoring", scoring(s)),
    )
    for part, found in parts:
        for name, cost in found:
            cells = [f"{part}: {name}", f"{cost.flop / s.a_pass:.2f}", f"{cost.flop / 1e12:.1f}"]
            cells += [f"{cost.bytes / 1e9:.1f}", f"{cost.seconds(chip) * 1e3:.1f} ms"]
            if measured:
                seconds = measured.get((part, name))
                cells.append(report.duration(seconds) if seconds else "-")
            body.append(cells)
    return head, body


def measured_times(rows: list[GpuRow], s: Step) -> dict[tuple[str, str], float]:
    """Of this shape, and of patterns with these shares; a score does not hang on how many have a gradient."""
    found: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.section != "timings" or not row.seconds or not row.model or row.shape != (s.tokens, s.hidden, s.vocab):
            continue
        pattern, scored = ALL_PATTERNS[row.pattern], row.pattern == "score"
        if pattern.counted == s.unmasked and (scored or pattern.with_gradient == s.active):
            part = "scoring" if scored else "frozen" if pattern.frozen else "trained"
            found[part, row.model] = min(row.seconds, found.get((part, row.model), row.seconds))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--chip", choices=CHIPS, help="default: h200")
    add("--results", type=Path, help="CSV of gpu.py: rates of its card, and measured times beside the predicted ones")
    add("--tokens", type=int, default=8192)
    add("--hidden", type=int, default=4096)
    add("--vocab", type=int, default=151936)
    add("--unmasked", type=float, default=1.0, help="share of the tokens that count")
    add("--active", type=float, help="share of the tokens that have a gradient; default: all that count")
    add("--markdown", action="store_true")
    a = parser.parse_args()
    active = a.unmasked if a.active is None else a.active
    if min(a.tokens, a.hidden, a.vocab) < 1 or not 0 <= active <= a.unmasked <= 1:
        parser.error("sizes are at least 1, and 0 <= active <= unmasked <= 1")
    if a.results and a.chip:
        parser.error("--chip and --results both name a chip")
    s = Step(a.tokens, a.hidden, a.vocab, a.unmasked, active)
    rows = report.read(a.results, GpuRow) if a.results else []
    rows = rows and of_run(rows, rows[-1].card, rows[-1].commit)
    chip = Chip.of_rows(rows) if a.results else CHIPS[a.chip or "h200"]
    if chip is None:
        parser.error(f"{a.results} holds no measured rates: run the section env of benchmarks/gpu.py")
    head, body = table(chip, s, measured_times(rows, s))
    print(f"{s.tokens} tokens, hidden size {s.hidden}, vocabulary {s.vocab}, 16 bits; {s.unmasked:.0%} count, ", end="")
    print(f"{s.active:.0%} have a gradient. A prediction, not a measurement.\n")
    print(report.table(head, body) if a.markdown else report.aligned(head, body))
    print(
        f"\nRates of {chip.name}: GEMM {chip.gemm / 1e12:.0f} TFLOP/s ({chip.origin('gemm')}), Triton tile "
        f"{chip.tile / 1e12:.0f} TFLOP/s ({chip.origin('tile')}), {chip.bandwidth / 1e12:.1f} TB/s "
        f"({chip.origin('bandwidth')}). A tile wins above {break_even(chip, s.hidden) / 1e12:.0f} TFLOP/s."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
