"""Autotuning of the fused tile kernels, only where BAPO_KERNELS_AUTOTUNE=1 asks for it.

The fastest of some configs is found by the first launch of each kind and kept for the process. Another config sums in another order, so
that the last bits of a result then hang on what was measured: runs, and ranks, need not agree in them.
"""

import time
from collections.abc import Callable
from operator import itemgetter

import torch
from triton.runtime.errors import TritonError

from bapo_kernels.checks import is_set
from bapo_kernels.head.chunked import LogitSpec, Rows, Slice
from bapo_kernels.head.rows import is_captured
from bapo_kernels.launching import INTERPRETED, Config

TURNS = 5
# Beside the config of the table. Not all of them fit or are free of spills everywhere: what does not compile is left out.
CANDIDATES: tuple[Config, ...] = (
    Config({"BN": 128, "BV": 128, "BD": 64}, 8, 3),
    Config({"BN": 128, "BV": 128, "BD": 64}, 8, 4),
    Config({"BN": 128, "BV": 128, "BD": 64}, 4, 3),
    Config({"BN": 128, "BV": 256, "BD": 64}, 8, 3),
    Config({"BN": 256, "BV": 128, "BD": 64}, 8, 3),
    Config({"BN": 64, "BV": 256, "BD": 64}, 8, 3),
    Config({"BN": 64, "BV": 128, "BD": 64}, 8, 4),
    Config({"BN": 128, "BV": 128, "BD": 32}, 8, 4),
)
if INTERPRETED:
    CANDIDATES = (Config({"BN": 16, "BV": 64, "BD": 32}),)

found: dict[tuple, Config] = {}  # (kernel, device, dtype, V, D, features) -> config


def tuned(
    kernel: str, config: Config, rows: Rows, part: Slice, spec: LogitSpec, launch: Callable[[Config], object]
) -> Config:
    """`config`, or the fastest one where that is asked for. A launch may be repeated without harm."""
    if not is_set("BAPO_KERNELS_AUTOTUNE"):
        return config
    # Nothing of a row's surroundings: scoring and training, and blocks of any height, have to get the same.
    features = (part.bias is None, spec.scale == 1.0, spec.softcap is None, rows.inv_temperature is None)
    key = (kernel, rows.hidden.device, rows.hidden.dtype, spec.vocab_size, rows.hidden.shape[1], features)
    if key not in found:
        if is_captured(rows.hidden):
            return config  # nothing runs now that could be timed
        times = [(_seconds(launch, config, rows.hidden.device), config)]
        for candidate in CANDIDATES:
            try:
                times.append((_seconds(launch, candidate, rows.hidden.device), candidate))
            except TritonError:  # does not compile, or takes more than there is
                continue
        found[key] = min(times, key=itemgetter(0))[1]
    return found[key]


def _seconds(launch: Callable[[Config], object], config: Config, device: torch.device) -> float:
    launch(config)  # compiles
    times = []
    for _ in range(TURNS):
        _wait(device)
        start = time.perf_counter()
        launch(config)
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
