"""The kernels' default cases of the compile matrix: no spills, tensor cores used, and numbers as in the table. Nothing is run."""

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)

import compile_matrix as matrix
import triton
from compile_matrix import Case

from bapo_kernels.launching import INTERPRETED, RULES

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

CASES = list(matrix.cases(everything=False))
VERSION, TABLE = matrix.read_table()


@pytest.fixture(scope="module")
def worker():
    worker = matrix.Worker()
    yield worker
    worker.stop()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles_well(case, worker):
    result = worker(case)
    if isinstance(result, str):
        pytest.fail(result, pytrace=False)
    assert not [*matrix.problems(case, result)]
    if triton.__version__ == VERSION:
        line = matrix.table_line(case, result)
        assert line == TABLE.get(case), f"`make matrix` writes {matrix.TABLE.name} anew; look at what has changed in it"


def test_table_has_every_case():
    assert [*TABLE] == sorted(matrix.cases(everything=True)), "`make matrix` writes it anew"


def test_matrix_has_every_kernel_and_config():
    """Kernels are launched with configs of the one table: what no case has, nothing has compiled."""
    compiled = [(case.kernel, *line[len(case) :][:3]) for case, line in TABLE.items()]
    for rule in RULES:
        for kernel in rule.kernels.split():
            assert kernel in matrix.MATRIX
            blocks = {f"{name}={size}" for name, size in rule.config.blocks.items()}
            rest = (str(rule.config.warps), str(rule.config.stages))
            used = any(k == kernel and blocks <= {*b.split()} and rest == (w, s) for k, b, w, s in compiled)
            assert used or rule.families == "interpreter", f"{kernel} is compiled with {rule.config} in no case"


def test_worker_that_crashed_is_replaced(worker):
    case = Case("sm_90", "fold_means", "fp32", "clip")
    worker.process.kill()
    assert "crashed" in worker(case)
    assert isinstance(worker(case), matrix.Facts)


def test_offsets_in_32_bits_are_found():
    ttir = """
        %block = arith.constant 64 : i32
        %o = tt.make_range {end = 8 : i32, start = 0 : i32} : tensor<8xi32>
        %first = arith.muli %i, %block : i32
        %strided = arith.muli %o, %stride : tensor<8xi32>
        %row = arith.muli %o_n, %stride : tensor<8xi64>
        %narrow = arith.muli %o_n, %stride : tensor<8xi32>"""
    assert [*matrix.narrow_products(ttir)] == ["%narrow = arith.muli %o_n, %stride : tensor<8xi32>"]
