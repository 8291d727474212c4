"""The device that is measured: what it is, what its GEMMs and copies reach, and a meter for time and memory.

A CPU stands in for it in dry runs."""

import hashlib
import importlib.util
import statistics
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from batch import Size
from measure import cpu_model, seconds, versions
from torch import Tensor

ROOT = Path(__file__).parents[1]
COLD = 256 * 2**20  # bytes written between measurements: more than any L2 cache holds
QUERIES = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")


class Meter:
    """Time by the device's own events, from a cold cache; memory by its allocator."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.cold = torch.empty(COLD if self.cuda else 0, dtype=torch.int8, device=device)

    def seconds(self, call: Callable[[], object]) -> float:
        if not self.cuda:
            return seconds(call)
        self.cold.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3

    def extra_bytes(self, call: Callable[[], object], gradients: Callable[[], int]) -> int | None:
        """Peak beyond what is there before, and beyond the `gradients` that are left. None on a CPU, whose allocator does not say."""
        if not self.cuda:
            call()
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - gradients()


def facts(device: torch.device, commit: str = "") -> dict[str, str]:
    """What each row says of where it was measured. The card of a dry run is the CPU, and is called so."""
    card, driver = f"cpu: {cpu_model()}", ""
    if device.type == "cuda":
        card, driver = torch.cuda.get_device_name(device), smi().get("driver_version", "")
    return {"card": card, "driver": driver, "commit": commit or revision(), **versions()}


def smi() -> dict[str, str]:
    """Clocks, power and temperature as nvidia-smi says them now; empty without it."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERIES)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = done.stdout.strip().split(", ")
    return dict(zip(QUERIES, values, strict=True)) if len(values) == len(QUERIES) else {}


def revision() -> str:
    """The commit of the checkout; what was changed since, or what it is where there is no git, as a digest of the package's sources."""

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    sources = ("bapo_kernels", "csrc")
    commit = git("rev-parse", "--short", "HEAD")
    if commit and not git("status", "--porcelain", "--", *sources):
        return commit
    digest = hashlib.sha256()
    for path in sorted(p for s in sources for p in (ROOT / s).rglob("*") if p.suffix in (".py", ".cpp", ".h")):
        digest.update(path.read_bytes())
    return "+".join(part for part in (commit, digest.hexdigest()[:7]) if part)


def gemms(device: torch.device, size: Size, columns: int, square: int) -> Iterator[tuple[str, float]]:
    """FLOP/s of bare bf16 products, the best that this card's library does with the operands of a head; logits and sums in fp32."""

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    def wide(a: Tensor, b: Tensor) -> Tensor:
        if device.type == "cuda":
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.mm(a, b).float()  # a CPU has no such product

    a, b = matrix(square, square), matrix(square, square)
    yield f"mm {square}", 2 * square**3 / repeated(device, lambda: a @ b)
    n, d, v = size.tokens, size.hidden, min(columns, size.vocab)
    h, wt, dz, w = matrix(n, d), matrix(d, v), matrix(n, v), matrix(v, d)
    flop = 2 * n * d * v
    yield "head: logits to fp32", flop / repeated(device, lambda: wide(h, wt))
    yield "head: d_hidden to fp32", flop / repeated(device, lambda: wide(dz, w))
    yield "head: d_weight to fp32", flop / repeated(device, lambda: wide(dz.t(), h))


def copy_rate(device: torch.device, size: int) -> float:
    """Bytes per second, read and written."""
    source = torch.zeros(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * size / repeated(device, lambda: target.copy_(source))


def repeated(device: torch.device, call: Callable[[], object], times: int = 10) -> float:
    """Seconds of one of several calls in a row, so that what a launch costs is not counted; median of three."""
    meter = Meter(device)
    call()

    def several() -> None:
        for _ in range(times):
            call()

    return statistics.median(meter.seconds(several) for _ in range(3)) / times


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
