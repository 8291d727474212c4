"""The golden cases on the Triton kernels. Without a GPU they run in Triton's interpreter, which has to be chosen before import: in a
process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only")


@pytest.mark.parametrize("design", ["gemm", "tile"])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_cases_in_the_interpreter(dtype, design):
    env = {**os.environ, "TRITON_INTERPRET": "1", "BAPO_KERNELS_DESIGN": design}
    done = subprocess.run(
        [sys.executable, "-P", __file__, dtype], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert int(done.stdout.split()[-2]) >= 45, done.stdout[-2000:]


def main(label: str) -> int:
    sys.path.insert(0, str(Path(__file__).parent))
    from cases import run_cases
    from test_cases import CASES, DTYPES, functions, in_dtype, runnable

    import bapo_kernels as bk

    torch.set_num_threads(1)
    dtype, failed, ran = DTYPES[label], 0, 0
    for name, case in CASES.items():
        if not (runnable(case) and in_dtype(case, dtype) and functions(case) & set(run_cases.WITH_BACKEND)):
            continue
        ran += 1
        if errors := run_cases.run_case(bk, case, "triton", dtype, "cpu"):
            failed += 1
            print(f"FAIL {name}", *errors, sep="\n  ")
    print(f"{failed} failed of {ran} cases")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
