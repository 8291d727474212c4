"""Runs `interpreted_*.py` in a process of its own: the interpreter has to be chosen before Triton is imported, for good."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)


@pytest.mark.parametrize("file", ["interpreted_triton.py", "interpreted_losses.py", "interpreted_engines.py"])
def test_in_interpreter(file):
    cases = Path(__file__).with_name(file)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(cases),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        command, env=environment | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600
    )
    # No test, or one that was skipped, is a failure as well.
    if run.returncode != 0 or not re.fullmatch(
        r"\d+ passed( in .*|, \d+ warnings? in .*)", run.stdout.splitlines()[-1]
    ):
        pytest.fail(run.stdout + run.stderr, pytrace=False)
