"""Every kernel, with the launch configs that ship, compiles ahead of time for every family of chips: no spills, tensor cores used.

No GPU is needed, and nothing is run. A process of its own compiles, so that an assertion in the compiler fails one test."""

import importlib
import itertools
import multiprocessing
import re
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)
triton = importlib.import_module("triton")
backend = importlib.import_module("bapo_kernels.head.triton.backend")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from bapo_kernels.head.triton.configs import find_config  # noqa: E402

pytestmark = pytest.mark.skipif(backend.INTERPRETED, reason="the interpreter compiles nothing")

KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        backend.fold_tile,
        backend.merge_partials,
        backend.gather_logits,
        backend.dlogits_tile,
        backend.scatter_grad,
    )
}
TILES = ("fold_tile", "dlogits_tile")

# Target, family in the table, bytes of shared memory that every chip of the family gives a block, the tensor cores' instruction
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), "sm80", 101376, "mma.sync"),  # 86 and 89 have the least
    "sm_90": (GPUTarget("cuda", 90, 32), "sm90", 232448, "wgmma.mma_async"),
    "sm_100": (GPUTarget("cuda", 100, 32), "sm100", 232448, "tcgen05.mma"),
    "sm_120": (GPUTarget("cuda", 120, 32), "sm120", 101376, "mma.sync"),
    "gfx942": (GPUTarget("hip", "gfx942", 64), "gfx9", 65536, "v_mfma"),
}
DTYPES = {"bf16": (tl.bfloat16, "half"), "fp32": (tl.float32, "float"), "fp64": (tl.float64, "double")}
# Arguments that are None without the feature. "ragged": a hidden size that is no multiple of 16, "even": columns fill their blocks.
FEATURES = {
    "bias": ("bias",),
    "scale": ("scale",),
    "softcap": ("softcap",),
    "temperature": ("inv_temperature",),
    "entropy": ("part_spread", "spread", "entropy", "entropy_coef"),
}
VARIANTS = {"plain": (), "all": tuple(FEATURES), "ragged": (*FEATURES, "ragged"), "even": (*FEATURES, "even")}


def cases():
    for target in TARGETS:
        for kernel, dtype, variant in itertools.product((*TILES, "gather_logits"), ("bf16", "fp32"), ("plain", "all")):
            yield target, kernel, dtype, variant
        # These two read what others left in fp32.
        yield from ((target, "merge_partials", "fp32", "plain"), (target, "merge_partials", "fp32", "all"))
        yield target, "scatter_grad", "fp32", "plain"
    for target, kernel in itertools.product(("sm_90", "sm_100"), TILES):
        yield from ((target, kernel, "bf16", "ragged"), (target, kernel, "bf16", "even"))
    for kernel in TILES:
        yield "sm_90", kernel, "fp64", "all"


CASES = list(cases())


def source_and_options(target: str, kernel: str, dtype: str, variant: str):
    """What a launch of the backend would compile, for row-major tensors whose pointers and rows are aligned."""
    features = set(VARIANTS[variant])
    dot, dtype_class = DTYPES[dtype]
    config = find_config(kernel, TARGETS[target][1], dtype_class, frozenset(features - {"even", "entropy"}))
    absent = {name for feature, names in FEATURES.items() if feature not in features for name in names}
    constants = backend.kernel_options(config)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    constants |= {"DOT": dot, "EVEN_D": "ragged" not in features, "EVEN_W": "even" in features}
    constants |= dict.fromkeys(absent) | dict.fromkeys(
        ("stride_hd", "stride_wd", "stride_ip", "stride_pp", "stride_gp"), 1
    )
    multiples_of_16 = set() if "ragged" in features else {"D", "stride_hn", "stride_wv", "stride_on"}

    fn = KERNELS[kernel]
    signature, attributes = {}, {}
    for i, parameter in enumerate(fn.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("scale", "softcap"):
            signature[name] = "fp32"
        elif name in ("n", "w", "D", "P", "first", "tiles") or name.startswith("stride_"):
            signature[name] = "i32"
        else:
            acc = "fp64" if dtype == "fp64" else "fp32"
            signature[name] = "*" + {"ids": "i64", "hidden": dtype, "weight": dtype}.get(name, acc)
        if signature[name].startswith("*") or name in multiples_of_16:
            attributes[(i,)] = [["tt.divisibility", 16]]
    constants = {name: value for name, value in constants.items() if name in signature}
    return ASTSource(fn, signature, constants, attributes), options


def compile_and_read(*case) -> tuple[int, int, int, set[str]] | str:
    """In the worker: registers, bytes spilled, bytes of shared memory and the instructions found; or why there is no binary."""
    source, options = source_and_options(*case)
    try:
        compiled = triton.compile(source, target=TARGETS[case[0]][0], options=options)
    except Exception:
        return traceback.format_exc()
    if "cubin" in compiled.asm:
        text, (registers, spilled) = compiled.asm["ptx"], read_cubin(compiled.asm["cubin"])
    else:
        text, (registers, spilled) = compiled.asm["amdgcn"], read_amdgcn(compiled.asm["amdgcn"])
    found = {
        name for name in ("mma.sync", "wgmma.mma_async", "tcgen05.mma", "v_mfma", "cp.async", "max.NaN") if name in text
    }
    return registers, spilled, compiled.metadata.shared, found


def read_amdgcn(text: str) -> tuple[int, int]:
    number = {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")}
    scratch = int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)[1])
    return number["vgpr_count"], number["vgpr_spill_count"] + scratch


def read_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its memory that are not registers."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    number = {name: int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL")}
    return number["REG"], number["STACK"] + number["LOCAL"]


class Worker:
    """A process that compiles. One that a compiler took down is replaced, and its last words are in the test's captured stderr."""

    def __init__(self):
        self.start()

    def start(self):
        self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def __call__(self, *case):
        try:
            return self.pool.submit(compile_and_read, *case).result(timeout=120)
        except BrokenProcessPool:
            self.start()
            return "the compiler crashed"


@pytest.fixture(scope="module")
def worker():
    worker = Worker()
    yield worker
    worker.pool.shutdown()


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_compiles_without_spills(case, worker):
    result = worker(*case)
    if isinstance(result, str):
        pytest.fail(result, pytrace=False)
    registers, spilled, shared, found = result
    target, kernel, dtype, variant = case
    _, _, shared_limit, tensor_cores = TARGETS[target]
    print(f"{registers} registers, {shared} bytes of shared memory")
    assert spilled == 0, f"{spilled} bytes of spilled registers"
    assert shared <= shared_limit
    if kernel in TILES and dtype == "bf16":
        assert tensor_cores in found
        if target != "gfx942" and variant != "ragged":
            assert "cp.async" in found, "loads are not asynchronous"
    if kernel in ("fold_tile", "merge_partials") and target != "gfx942" and dtype != "fp64":
        assert "max.NaN" in found, "the maximum with FLOOR would hide a NaN (the interpreter cannot show that)"
    if kernel in TILES and dtype == "fp32":
        assert not found & {"mma.sync", "wgmma.mma_async", "tcgen05.mma"}, "fp32 must not be multiplied as tf32"
