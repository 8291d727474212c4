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
    """For the list of commands only: what follows `bench` is read here and by the scripts."""
    commands.add_parser("bench", help=HELP, add_help=False)


def run(arguments: Sequence[str]) -> int:
    script = FOLDER / ("gpu.py" if "--gpu" in arguments else "run.py")
    if not script.exists():
        print(
            f"bench needs the folder benchmarks/ of the source tree, and {FOLDER} is not there: "
            "run it from a checkout (pip install --editable ., or python benchmarks/gpu.py)",
            file=sys.stderr,
        )
        return 2
    rest = [word for word in arguments if word != "--gpu"]
    if "-h" in rest or "--help" in rest:
        print(USAGE, flush=True)
    return subprocess.run([sys.executable, str(script), *rest]).returncode
