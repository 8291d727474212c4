"""The command line: `bapo-kernels check`, `bapo-kernels bench` and `bapo-kernels env`."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from bapo_kernels.cli import bench, check
from bapo_kernels.environment import env_report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bapo-kernels", description="Fused LM head and policy losses: is this machine computing them right?"
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True)
    check.add_parser(commands)
    bench.add_parser(commands)
    commands.add_parser("env", help="versions, devices and usable backends, for a bug report")
    arguments, others = parser.parse_known_args(argv)
    if arguments.command == "bench":
        return bench.run(arguments.gpu, others)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        if arguments.command == "check":
            return check.run(arguments)
        for key, value in env_report().items():
            print(f"{key:<26}{value}")
        return 0
    except (
        BrokenPipeError
    ):  # `bapo-kernels env | head -1`; the interpreter would complain once more while it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _version() -> str:
    try:
        return version("bapo-kernels")
    except PackageNotFoundError:  # run from the source tree
        return "not installed"
