"""Seconds in turns, this machine's own GEMM rate beside them, and what the machine is."""

import gc
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from batch import Size

PACKAGES = {"torch": "torch", "triton": "triton", "liger": "liger-kernel", "trl": "trl", "verl": "verl"}
TILE = (1024, 4096)  # tokens x vocabulary rows: large enough for the full rate, small enough for a cache
WORK = 3e9  # FLOP of one look at the rate of a product, at least


class Floor:
    """The three products of a head's step on one tile, with outputs that are there already: no head can be faster per FLOP."""

    def __init__(self, size: Size):
        n, v, d = min(size.tokens, TILE[0]), min(size.vocab, TILE[1]), size.hidden
        self.h, self.w, self.dz = torch.randn(n, d), torch.randn(v, d), torch.randn(n, v)
        self.products: dict[str, Callable[[], object]] = {
            "h @ w.T": lambda: torch.mm(self.h, self.w.t(), out=self.z),
            "dz @ w": lambda: torch.mm(self.dz, self.w, out=self.dh),
            "dz.T @ h": lambda: torch.mm(self.dz.t(), self.h, out=self.dw),
        }
        self.z, self.dh, self.dw = torch.empty(n, v), torch.empty(n, d), torch.empty(v, d)
        self.flop = 2 * n * v * d
        self.times = max(1, round(WORK / self.flop))

    def rate(self, name: str) -> float:
        """GFLOP/s."""
        self.products[name]()
        start = time.perf_counter()
        for _ in range(self.times):
            self.products[name]()
        return self.times * self.flop / (time.perf_counter() - start) / 1e9

    def rates(self) -> dict[str, float]:
        return {name: self.rate(name) for name in self.products}


def mean_rate(rates: list[dict[str, float]]) -> float:
    """Of equal amounts of work on the three products, by their medians over the turns."""
    medians = [statistics.median(r[name] for r in rates) for name in rates[0]]
    return statistics.harmonic_mean(medians)


def seconds(call: Callable[[], object]) -> float:
    gc.collect()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def machine() -> dict[str, str | int]:
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        **versions(),
        "bapo_kernels": version("bapo-kernels"),
    }


def versions() -> dict[str, str]:
    return {name: version(package) for name, package in PACKAGES.items()}


def version(package: str) -> str:
    """Empty: not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}"
