"""Time and memory of heads on a GPU, every contestant in turns. `gpu.py` starts this as a process of its own, and again where it died, so
that a kernel that takes the device down with it costs one contestant and not the run.

python benchmarks/timings.py --sizes 8192x4096x151936 --device cuda --seconds 120 --out benchmarks/results/h200.csv
"""

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import contestants
import cost
import report
import torch
from arguments import sizes, some_of
from batch import ALL_PATTERNS, Answer, Batch, Size, step
from contestants import ON_GPU, OURS, SCORING_ON_GPU
from device import Meter, facts
from gpu_report import FAILED, HEADER, NOT_RUN, REFUSED, SETTLED, TOLERANCES, GpuRow, gemm_rate, line, of_run
from torch import Tensor

import bapo_kernels as bk

GIB = 2**30
PLAIN_BYTES = 20  # of a logit alive at once on the plain path: 16 bits and four times fp32, with some room
PLAIN_SCORE_BYTES = 12


def contestants_of(pattern: str) -> list[str]:
    """Who takes part, the worthiest first."""
    p = ALL_PATTERNS[pattern]
    if pattern == "score":
        return list(SCORING_ON_GPU)
    names = [n for n in ON_GPU if p.frozen or n != f"{OURS} frozen"]
    if pattern == "busy":  # for our own engines only
        return [n for n in names if n.startswith(OURS)]
    return [n for n in names if p.counted < 1 or not n.endswith(" compact")]


@dataclass
class Entry:
    """A contestant with its batch, as it is called."""

    name: str
    batch: Batch
    scored: bool
    call: Callable[[Batch], Tensor] = field(init=False)
    times: list[float] = field(default_factory=list)
    extra: int | None = None
    error: float | None = None

    @property
    def ours(self) -> bool:
        return self.name.startswith(OURS)

    def prepare(self) -> None:
        """Raises where it cannot take part."""
        if self.name.startswith("plain") and self.batch.hidden.is_cuda:
            each = PLAIN_SCORE_BYTES if self.scored else PLAIN_BYTES
            needed, free = each * self.batch.size.tokens * self.batch.size.vocab, torch.cuda.mem_get_info()[0]
            if needed > free:
                raise ValueError(f"its logits do not fit: {needed / GIB:.0f} GiB, {free / GIB:.0f} free")
        if self.scored:
            self.call = partial(_score, contestants.scorer(self.name))
        elif self.name == f"{OURS} one-pass":
            self.call = partial(contestants.get(self.name), memory_budget=one_pass_budget(self.batch))
        else:
            self.call = contestants.get(self.name)

    def run(self) -> Tensor:
        self.batch.clear()
        with contestants.design_of(self.name):
            return self.call(self.batch) if self.scored else step(self.call, self.batch)

    def gradients(self) -> int:
        return sum(t.grad.nbytes for t in (self.batch.hidden, self.batch.weight) if t.grad is not None)

    @property
    def engine(self) -> str:
        """That one of ours takes, by its own account."""
        if self.scored or not self.ours:
            return ""
        options = contestants.options_of(self.name)
        if "engine" in options:
            return options["engine"]
        return bk.plan(*self.batch.size, loss="dapo", **options, **shares(self.batch)).engine

    @property
    def model(self) -> str:
        """The path of the cost model that this is; empty: it has none, as nothing has that is not in 16 bits."""
        if self.batch.hidden.itemsize != 2:
            return ""
        if not self.ours:
            return "plain" if self.name == "plain" else ""
        design = "tile" if self.name.endswith(" tile") else "gemm"
        return f"log-probs, {design}" if self.scored else f"{self.engine}, {design}"

    def predicted(self, chip: cost.Chip | None) -> float | None:
        p = self.batch.pattern
        s = cost.Step(*self.batch.size, p.counted, p.counted if self.scored else p.with_gradient, p.frozen)
        path = dict(cost.scoring(s) if self.scored else cost.paths(s)).get(self.model)
        return None if path is None or chip is None else path.seconds(chip)


@torch.no_grad()
def _score(logprobs_of: contestants.Logprobs, batch: Batch) -> Tensor:
    return logprobs_of(batch.hidden, batch.weight, batch.targets)


def shares(batch: Batch) -> dict:
    """What `bk.plan` has to be told of a batch."""
    return {
        "unmasked": batch.pattern.counted,
        "active": batch.pattern.with_gradient,
        "dtype": batch.hidden.dtype,
        "device": batch.hidden.device,
        "weight_grad": not batch.pattern.frozen,
    }


def one_pass_budget(batch: Batch) -> int:
    """What the engine needs to keep the products of `cost.POOL` tokens."""
    most = min(cost.POOL / batch.size.tokens, batch.pattern.counted)
    given = {**shares(batch), "unmasked": most, "active": min(most, batch.pattern.with_gradient)}
    return bk.plan(*batch.size, loss="dapo", memory_budget=2**50, engine="one-pass", **given).memory_bytes


class Race:
    """All contestants of a pattern. Rows are saved as soon as something is known, so that a process that dies has not run for nothing."""

    def __init__(self, a: argparse.Namespace, size: Size, pattern: str, known: dict[str, str], deadline: float):
        self.a, self.size, self.pattern, self.known, self.deadline = a, size, pattern, known, deadline
        rows = report.read(a.out, GpuRow) if a.out.exists() else []
        self.here = of_run(rows, known["card"], known["commit"])
        self.rate = gemm_rate(self.here)
        self.chip = cost.Chip.of_rows(self.here) or cost.find(known["card"])
        self.meter = Meter(torch.device(a.device))

    def run(self, logprobs: Tensor | None) -> Tensor | None:
        """Log-probs of the batch's targets, which all patterns of a size have alike, come from the pattern before and go to the next."""
        settled = {r.key for r in self.here if r.result in SETTLED}
        wanted = [n for n in contestants_of(self.pattern) if not self.a.contestants or n in self.a.contestants]
        if not wanted:
            return logprobs
        names = [n for n in wanted if self.a.again or self.row(n).key not in settled]
        print(f"\n{self.a.section}, {self.pattern}: {self.size}, {self.a.dtype}")
        if len(names) < len(wanted):
            print(f"  {len(wanted) - len(names)} of {len(wanted)} are in {self.a.out} already")
        if not names:
            return logprobs
        if time.monotonic() > self.deadline:
            rows = [self.row(n, result=NOT_RUN, reason="no time left") for n in names]
            print(f"  {len(rows)} contestants: {NOT_RUN}, no time left", flush=True)
            report.save(self.a.out, rows)
            return logprobs
        print(HEADER, flush=True)
        pattern, dtype = ALL_PATTERNS[self.pattern], getattr(torch, self.a.dtype)
        batch = Batch(self.size, pattern, dtype=dtype, device=self.a.device, logprobs=logprobs)
        answer = Answer.of(batch) if self.a.section == "agreement" else None
        entries = [e for n in names if self.warm_up(e := Entry(n, batch, self.pattern == "score"), answer)]
        gc.collect()
        gc.disable()
        for _ in range(0 if answer else self.a.repeats):
            for entry in entries:
                if time.monotonic() < self.deadline or not entry.times:
                    entry.times.append(self.meter.seconds(entry.run))
                batch.clear()
        gc.enable()
        self.save([self.measured(e) for e in entries])
        return batch.logprobs

    def warm_up(self, entry: Entry, answer: Answer | None) -> bool:
        """A first call, which compiles, and a second one, whose memory counts. False: no numbers, and a row that says why."""
        if time.monotonic() > self.deadline:
            self.save([self.row(entry.name, result=NOT_RUN, reason="no time left")])
            return False
        row = self.row(entry.name, result=FAILED, reason="its process died in the first call")
        report.save(self.a.out, [row])  # stays if it does
        try:
            entry.prepare()
            loss = entry.run()
            if answer is not None:
                entry.error = answer.error(loss, entry.batch)
            del loss
            entry.batch.clear()  # gradients of the first call would hide as much of the second one's memory
            entry.extra = self.meter.extra_bytes(entry.run, entry.gradients)
            row.result, row.reason = NOT_RUN, "its process died before its turns"
            report.save(self.a.out, [row])
        except Exception as e:  # of other packages anything may come; the others go on
            row.reason = (str(e).splitlines() or [""])[0][:200] or type(e).__name__
            if not entry.ours or isinstance(e, ValueError):  # which is how ours refuses
                row.result = REFUSED
            self.save([row])
            if "CUDA error" in str(e):
                raise  # nothing works on this device from here on; a new process goes on
            return False
        finally:
            entry.batch.clear()
            if self.meter.cuda:
                torch.cuda.empty_cache()
        return True

    def measured(self, entry: Entry) -> GpuRow:
        row = self.row(entry.name, engine=entry.engine, repeats=len(entry.times), error=entry.error)
        row.extra_mib = None if entry.extra is None else entry.extra / 2**20
        if entry.times:
            row.seconds, row.fastest, row.slowest = statistics.median(entry.times), min(entry.times), max(entry.times)
            row.model, row.predicted = entry.model, entry.predicted(self.chip)
            flop = entry.batch.pattern.passes * 2 * self.size.tokens * self.size.hidden * self.size.vocab
            row.tflops = flop / row.seconds / 1e12
            row.gbs = needed_bytes(entry.batch, entry.scored) / row.seconds / 1e9
            if self.rate and entry.batch.hidden.itemsize == 2:  # as the GEMMs were
                row.gemm_share = row.tflops * 1e12 / self.rate
        if row.bad:
            row.result, row.reason = FAILED, "it does not compute the same"
        return row

    def row(self, name: str, **values) -> GpuRow:
        return GpuRow(self.a.section, name, self.pattern, *self.size, self.a.dtype, **values, **self.known)

    def save(self, rows: list[GpuRow]) -> None:
        for row in rows:
            print(line(row), flush=True)
        report.save(self.a.out, rows)


def configurations() -> Iterator[dict]:
    """What the search took, where there was one."""
    tuning = sys.modules.get("bapo_kernels.head.triton.tuning")
    for (kernel, _, dtype, vocab, hidden, _), config in getattr(tuning, "found", {}).items():
        found = {"contestant": f"configuration of {kernel}", "hidden": hidden, "vocab": vocab, "reason": str(config)}
        yield found | {"dtype": str(dtype).removeprefix("torch.")}


def needed_bytes(batch: Batch, scored: bool) -> int:
    """Hidden states and weight read once, their gradients written once."""
    trained = 0 if scored else batch.hidden.nbytes + (0 if batch.pattern.frozen else batch.weight.nbytes)
    return batch.hidden.nbytes + batch.weight.nbytes + trained


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sizes", type=sizes, required=True, help="tokens x hidden x vocab, as 8192x4096x151936; several with commas")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--patterns", type=some_of(ALL_PATTERNS), default="full,rl,frozen,score", help=f"of {','.join(ALL_PATTERNS)}")
    add("--contestants", type=some_of(ON_GPU + SCORING_ON_GPU), default=[], help="default: all")
    add("--dtype", default="bfloat16", choices=TOLERANCES)
    add("--section", default="timings", choices=("timings", "autotune", "agreement"))
    add("--seconds", type=float, default=120.0, help="what does not fit is left out, and said so")
    add("--repeats", type=int, default=5)
    add("--again", action="store_true", help="measure what is in --out too")
    add("--commit", default="", help="default: of the checkout")
    add("--out", type=Path, required=True)
    a = parser.parse_args()
    deadline = time.monotonic() + a.seconds
    if a.section == "autotune":
        os.environ["BAPO_KERNELS_AUTOTUNE"] = "1"
    known = facts(torch.device(a.device), a.commit)
    for size in a.sizes:
        logprobs = None
        for pattern in a.patterns:
            logprobs = Race(a, size, pattern, known, deadline).run(logprobs)
    if a.section == "autotune":
        report.save(a.out, [GpuRow("autotune", **found, **known) for found in configurations()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
