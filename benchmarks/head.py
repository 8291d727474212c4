"""The head's step (forward and backward of a DAPO loss) beside the plain path on full logits: time and memory, in one run.

    python benchmarks/head.py                       # the head of a 0.5 B model, on CPU: about 5 minutes on two cores
    python benchmarks/head.py --vocab 20000         # smaller

Patterns: "full": every token counts and has a gradient; "rl": 70 % of the tokens count, 25 % have a gradient (the rest is masked, clipped,
or has no advantage); "frozen": every token, and the weight needs no gradient. Contestants take turns, so that the machine's mood is
shared; times are medians. Extra memory is the peak beyond the inputs and the gradients, each in a process of its own (Linux).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import bapo_kernels as bk

PATTERNS = ("full", "rl", "frozen")


def main() -> None:
    arguments = parse()
    if arguments.memory_of:
        contestant, pattern = arguments.memory_of.split(":")
        print(json.dumps(extra_memory(arguments, contestant, pattern)))
        return
    print(f"{arguments.tokens} tokens, hidden size {arguments.hidden}, vocabulary {arguments.vocab}, fp32")
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads\n")
    print(f"{'pattern':<9}{'path':<24}{'seconds':>9}{'x plain':>9}{'extra MiB':>11}")
    contestants = ["plain", *(f"bapo_kernels {b}" for b in arguments.backends.split(","))]
    for pattern in arguments.patterns.split(","):
        times: dict[str, list[float]] = {c: [] for c in contestants}
        batch = Batch(arguments, pattern)
        for turn in range(arguments.repeats + 1):
            for c in contestants:
                seconds = step(c, batch)
                if turn:  # the first turn warms up
                    times[c].append(seconds)
        plain = statistics.median(times["plain"])
        for c in contestants:
            median = statistics.median(times[c])
            memory = memory_in_a_process(arguments, c, pattern)
            print(f"{pattern:<9}{c:<24}{median:>9.2f}{median / plain:>9.2f}{memory / 2**20:>11.0f}", flush=True)
    print("\nplain: log_softmax of the full logits, gather, the same loss, autograd")


class Batch:
    def __init__(self, arguments: argparse.Namespace, pattern: str):
        g = torch.Generator().manual_seed(0)
        n, d, v = arguments.tokens, arguments.hidden, arguments.vocab
        self.hidden = torch.randn(n, d, generator=g).requires_grad_()
        self.weight = (torch.randn(v, d, generator=g) / d**0.5).requires_grad_(pattern != "frozen")
        self.targets = torch.randint(0, v, (n,), generator=g)
        share = torch.rand(n, generator=g)
        rl = pattern == "rl"
        self.mask = share < 0.7 if rl else torch.ones(n, dtype=torch.bool)
        self.advantages = torch.where(share < 0.25, 1.0, 0.0) if rl else torch.ones(n)
        with torch.no_grad():  # on-policy, so that no token is clipped and the pattern is exact
            self.old = bk.linear_logprobs(self.hidden, self.weight, self.targets).logprobs

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None


def step(contestant: str, batch: Batch) -> float:
    batch.clear()
    start = time.perf_counter()
    if contestant == "plain":
        logits = batch.hidden @ batch.weight.t()
        logprobs = torch.log_softmax(logits, -1).gather(1, batch.targets[:, None]).squeeze(1)
        ratio = (logprobs - batch.old).exp()
        loss = -torch.min(ratio * batch.advantages, ratio.clamp(0.8, 1.28) * batch.advantages)
        loss = (loss * batch.mask).sum() / batch.mask.sum()
    else:
        loss = bk.linear_policy_loss(
            batch.hidden,
            batch.weight,
            batch.targets,
            batch.advantages,
            loss="dapo",
            mask=batch.mask,
            old_logprobs=batch.old,
            backend=contestant.split()[-1],
        ).loss
    loss.backward()
    return time.perf_counter() - start


def memory_in_a_process(arguments: argparse.Namespace, contestant: str, pattern: str) -> float:
    sizes = [f"--{k}={getattr(arguments, k)}" for k in ("tokens", "hidden", "vocab")]
    command = [sys.executable, __file__, *sizes, f"--memory-of={contestant}:{pattern}"]
    # Freed memory goes back at once, so that what an earlier call left cannot be taken for free.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def extra_memory(arguments: argparse.Namespace, contestant: str, pattern: str) -> int:
    small = argparse.Namespace(**{**vars(arguments), "vocab": 5000})
    step(contestant, Batch(small, pattern))  # libraries set up their own buffers
    batch = Batch(arguments, pattern)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _status("VmRSS")
    step(contestant, batch)
    gradients = sum(t.grad.nbytes for t in (batch.hidden, batch.weight) if t.grad is not None)
    return _status("VmHWM") - before - gradients


def _status(key: str) -> int:
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(key))
    return int(line.split()[1]) * 1024


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--backends", default="cpu,torch")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
