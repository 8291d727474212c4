"""The golden cases: small inputs whose right results were worked out independently, in cases/*.json."""

import json
from pathlib import Path

import pytest
import torch
from cases import run_cases
from helpers import BACKENDS

import bapo_kernels as bk

# What the cases already cover and the package does not have yet. A name that comes to exist has to be taken out here.
LATER: set[str] = set()

FILES = sorted((Path(__file__).parent / "cases").glob("*.json"))
CASES = {f"{file.stem}/{case['name']}": case for file in FILES for case in json.loads(file.read_text())}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


def _parts(case: dict) -> list[dict]:
    return case.get("parts", [{}])


def functions(case: dict) -> set[str]:
    return {part.get("call", case["call"]) for part in _parts(case)}


def needs(case: dict) -> set[str]:
    """The names that a case uses: functions, losses, corrections."""
    found = functions(case)
    for part in _parts(case):
        options = {**case.get("options", {}), **part.get("options", {})}
        if "loss" in options:
            loss = options["loss"] if isinstance(options["loss"], str) else options["loss"]["name"]
            found.add("bapo" if loss == "bapo-fixed" else loss)
        if options.get("correction"):
            found.add(options["correction"]["object"])
    return found


def runnable(case: dict) -> bool:
    return not needs(case) & LATER


def in_dtype(case: dict, dtype: torch.dtype) -> bool:
    return str(dtype).split(".")[1] in case.get("dtypes", ["float64", "float32"])


def _selection():
    for name, case in CASES.items():
        if not runnable(case):
            continue
        for label, dtype in DTYPES.items():
            if in_dtype(case, dtype):
                for backend in BACKENDS if functions(case) & set(run_cases.WITH_BACKEND) else ("none",):
                    yield pytest.param(case, backend, dtype, id=f"{name}-{backend}-{label}")


@pytest.mark.parametrize(("case", "backend", "dtype"), list(_selection()))
def test_case(case, backend, dtype):
    errors = run_cases.run_case(bk, case, backend, dtype, "cpu")
    assert not errors, "\n".join([case.get("note", ""), *errors])


def test_what_is_left_out_does_not_exist():
    for name in LATER:
        assert not hasattr(bk, name), f"{name} exists now: run its cases"


def test_every_case_runs_or_is_left_out_by_name():
    exists = set(bk.losses.available()) | {name for case in CASES.values() for name in needs(case) if hasattr(bk, name)}
    for name, case in CASES.items():
        assert runnable(case) == (needs(case) <= exists), f"{name} needs {needs(case) - exists}"
    assert sum(map(runnable, CASES.values())) >= 60
