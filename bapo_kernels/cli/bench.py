"""`bapo-kernels bench`: the benchmarks of the source tree, on this machine's CPU or, with `--gpu`, on its GPU."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"
HELP = "time and memory beside other packages (--gpu: everything there is to know on a GPU machine)"
USAGE = """usage: bapo-kernels bench [--gpu] ...

Runs benchmarks/run.py of the source tree, or benchmarks/gpu.py with --gpu; all other arguments are theirs:
"""


def add_parser(commands) -> None:
    """All but `--gpu` is read by the scripts."""
    parser = commands.add_parser("bench", help=HELP, add_help=False, allow_abbrev=False)
    parser.add_argument("--gpu", action="store_true")


def run(gpu: bool, others: Sequence[str]) -> int:
    script = FOLDER / ("gpu.py" if gpu else "run.py")
    if not script.exists():
        print(
            f"bench needs the folder benchmarks/ of the source tree, and {FOLDER} is not there: "
            "run it from a checkout (pip install --editable ., or python benchmarks/gpu.py)",
            file=sys.stderr,
        )
        return 2
    if "-h" in others or "--help" in others:
        print(USAGE, flush=True)
    return subprocess.run([sys.executable, str(script), *others]).returncode
