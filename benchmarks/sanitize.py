"""Small odd shapes through every engine and design, once each: something for compute-sanitizer to watch.

compute-sanitizer --tool memcheck python benchmarks/sanitize.py
"""

import argparse
import sys

import torch
from batch import Batch, Pattern, Size
from contestants import DESIGNS, OURS, design_of, options_of, ours

import bapo_kernels as bk

# With the sanitizer around it a call takes many times as long, so few of them. Strides that fit tensor descriptors and such that do not,
# vocabularies of several slices, none a multiple of a tile.
CASES = ((Size(19, 72, 1000), torch.bfloat16), (Size(37, 65, 4225), torch.bfloat16), (Size(5, 24, 300), torch.float32))
LOSSES = ("dapo", "bapo")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device = parser.parse_args().device
    for size, dtype in CASES:
        for frozen in (False, True):
            engines = ("recompute", "one-pass", "frozen") if frozen else ("recompute", "one-pass")
            for name in (f"{OURS} {engine} {design} 1GiB" for engine in engines for design in DESIGNS):
                batch = Batch(size, Pattern(1.0, 0.7, frozen), stale=0.3, dtype=dtype, device=device)
                print(size, dtype, name, "frozen head" if frozen else "", flush=True)
                try:
                    once(batch, name)
                except ValueError as e:
                    print(f"  refused: {e}")
    return 0


def once(batch: Batch, name: str) -> None:
    with design_of(name):
        for loss in LOSSES:
            ours(batch, loss=loss, **options_of(name)).backward()
        topk = batch.targets[:, None].expand(-1, 3).clone()
        with torch.no_grad():
            bk.linear_logprobs(batch.hidden, batch.weight, batch.targets, topk_ids=topk, return_entropy=True)
    if batch.hidden.is_cuda:
        torch.cuda.synchronize()  # an error is reported beside the call that made it


if __name__ == "__main__":
    sys.exit(main())
