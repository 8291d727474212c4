"""Peak memory of one step beyond its inputs and gradients, measured in a process of its own (Linux).

python benchmarks/memory.py SECTION PATTERN TOKENS HIDDEN VOCAB THREADS CONTESTANT
"""

import os
import subprocess
import sys
from pathlib import Path

import contestants
import torch
from batch import PATTERNS, Batch, Size, step
from options import OPTIONS

AVAILABLE = Path("/proc/self/clear_refs").exists()


def extra_memory(section: str, contestant: str, pattern: str, size: Size) -> float:
    """Bytes, from a new process."""
    words = [section, pattern, size.tokens, size.hidden, size.vocab, torch.get_num_threads(), contestant]
    # Freed memory goes back at once, so that what an earlier call left cannot be taken for free.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, __file__, *map(str, words)], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"the memory of {contestant} could not be measured:\n{done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def main(section: str, pattern: str, tokens: str, hidden: str, vocab: str, threads: str, contestant: str) -> None:
    torch.set_num_threads(int(threads))
    size = Size(int(tokens), int(hidden), int(vocab))
    # Libraries set up their own buffers; a compiler has to see the shapes that it will be measured with.
    warm = size if "compiled" in contestant else Size(size.tokens, size.hidden, min(size.vocab, 5000))
    batch, loss_of = prepared(section, contestant, pattern, warm)
    step(loss_of, batch)
    if warm != size:
        batch, loss_of = prepared(section, contestant, pattern, size)
    batch.clear()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _status("VmRSS")
    step(loss_of, batch)
    gradients = sum(t.grad.nbytes for t in (batch.hidden, batch.weight) if t.grad is not None)
    print(_status("VmHWM") - before - gradients)


def prepared(section: str, contestant: str, pattern: str, size: Size) -> tuple[Batch, contestants.Contestant]:
    if section == "options":
        option = OPTIONS[contestant]
        batch = option.batch(size, PATTERNS[pattern])
        return batch, option.contestant(batch)
    return Batch(size, PATTERNS[pattern]), contestants.get(contestant)


def _status(key: str) -> int:
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(key))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
