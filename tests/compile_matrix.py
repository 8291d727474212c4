"""Every Triton kernel, with the launch configs that ship, compiled ahead of time for every family of chips. Nothing runs, no GPU is needed.

    python tests/compile_matrix.py --all --table tests/compile_matrix.csv      (make matrix)

What is compiled is what a launch compiles: the package's own launchers are called with small tensors, in a process in which Triton takes
the machine for the target. Types, alignment, constants and configs are therefore not written down here a second time, only the calls.
"""

import argparse
import csv
import math
import multiprocessing
import os
import queue
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError

from bapo_kernels import launching, losses
from bapo_kernels.head.chunked import Coefficients, LogitSpec, Rows, Slice, State
from bapo_kernels.head.precision import accumulation_dtype
from bapo_kernels.head.products import gradient_dtype
from bapo_kernels.head.triton.epilogues import TritonEpilogues
from bapo_kernels.head.triton.tiles import TileBackend
from bapo_kernels.losses.base import Tokens
from bapo_kernels.losses.triton import launch

TABLE = Path(__file__).with_suffix(".csv")
COLUMNS = (
    "target",
    "kernel",
    "dtype",
    "variant",
    "blocks",
    "warps",
    "stages",
    "registers",
    "spilled",
    "shared",
    "tmem",
)


class Target(NamedTuple):
    gpu: GPUTarget
    capability: tuple[int, int]  # as PyTorch reports it
    shared: int  # bytes that a block may have on every chip that runs this
    mma: str  # the tensor cores' instruction for 16-bit operands


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), (8, 0), 101376, "mma.sync"),  # 86 shares its configs, and has the least
    "sm_89": Target(GPUTarget("cuda", 89, 32), (8, 9), 101376, "mma.sync"),
    "sm_90": Target(GPUTarget("cuda", 90, 32), (9, 0), 232448, "wgmma.mma_async"),
    "sm_100": Target(GPUTarget("cuda", 100, 32), (10, 0), 232448, "tcgen05.mma"),
    "sm_120": Target(GPUTarget("cuda", 120, 32), (12, 0), 101376, "mma.sync"),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), (9, 4), 65536, "v_mfma"),
}
TMEM_COLUMNS = 512


class Case(NamedTuple):
    target: str
    kernel: str
    dtype: str
    variant: str  # features joined by "+", or a name of a loss

    def __str__(self):
        return "-".join(self)


class Facts(NamedTuple):
    """What was read from a binary and its intermediate forms."""

    blocks: str
    warps: int
    stages: int
    registers: int
    spilled: int  # bytes of memory that stand for registers
    shared: int  # bytes
    tmem: int  # columns
    found: frozenset[str]  # keys of FOUND; "async dot"
    narrow: tuple[str, ...]  # 32-bit products of two numbers that only the launch knows


# ---------------------------------------------------------------- the matrix

# Left of the bar: what `make test` compiles, where a change would show first.
SOME = "bias scale softcap temperature entropy ids entropy+temperature"
TILE = {
    "bf16": f"plain plain+even all all+ragged | {SOME} all+even all+tail all+by8 plain+ragged plain+pointers all+pointers plain+strided",
    "fp16": "| plain all",
    "fp32": "all | plain all+even all+ragged",
    "fp64": "| all",
}
ROWS = {
    "bf16": f"plain all | {SOME} all+even all+odd untargeted",
    "fp32": "| plain all",
    "fp64": "| all",
}
MATRIX = {
    "fold_tile": TILE,
    "dlogits_tile": TILE,
    "fold_rows": ROWS,
    "dlogits_rows": ROWS,
    "merge_partials": {"fp32": "plain entropy |", "fp64": "| entropy"},
    "gather_logits": {"bf16": "all | plain all+ragged", "fp16": "| all", "fp32": "all | plain", "fp64": "| all"},
    "scatter_grad": {"fp32": "plain |", "fp64": "| plain"},
    "token_losses": {"fp32": "bapo dcpo bpo dppo-kl | clip sapo dro reinforce cispo topr dppo-tv"},
    "fold_means": {"fp32": "clip |"},
    "bapo_sums": {"fp32": "surrogate gradient | surrogate+none gradient+none defaults tensors"},
    "bapo_pick": {"fp32": "share share+low-first | signed ratio ratio+low-first defaults tensors"},
}
TILES = ("fold_tile", "dlogits_tile")
EPILOGUES = ("fold_rows", "dlogits_rows")
KEEPS_NAN = ("fold_tile", "fold_rows", "merge_partials", "token_losses")
FEATURES = ("bias", "scale", "softcap", "temperature", "entropy", "ids")
MMA = {"mma.sync", "wgmma.mma_async", "tcgen05.mma", "v_mfma"}


def cases(everything: bool) -> Iterator[Case]:
    for target in TARGETS:
        for kernel, dtypes in MATRIX.items():
            for dtype, variants in dtypes.items():
                default, others = variants.split("|")
                for variant in (default + others if everything else default).split():
                    yield Case(target, kernel, dtype, variant)


def problems(case: Case, facts: Facts) -> Iterator[str]:
    """What is wrong with a binary, in words."""
    target, features = TARGETS[case.target], case.variant.split("+")
    if facts.spilled:
        yield f"{facts.spilled} bytes of spilled registers"
    if facts.shared > target.shared:
        yield f"{facts.shared} bytes of shared memory, {target.shared} are there"
    if facts.tmem > TMEM_COLUMNS:
        yield f"{facts.tmem} columns of tensor memory, {TMEM_COLUMNS} are there"
    for product in facts.narrow:
        yield f"an offset that may pass 2^31 is computed in 32 bits: {product}"
    if "tf32" in facts.found:
        yield "fp32 is multiplied as tf32"
    gemm = case.kernel in TILES
    half = case.dtype in ("bf16", "fp16")
    expected = {target.mma} if gemm and half else set()
    # fp64 has tensor cores on some chips, fp32 on AMD's: both as exact as without.
    if facts.found & MMA != expected and case.dtype != "fp64" and not (gemm and not half and case.target == "gfx942"):
        yield f"multiplies by {' and '.join(facts.found & MMA) or 'plain FMA'}, not by {' '.join(expected) or 'plain FMA'}"
    descriptors = case.target in ("sm_90", "sm_100") and not {"pointers", "ragged", "strided"}.intersection(features)
    vectors = not {"ragged", "strided", "by8"}.intersection(features)  # whole ones, where pointers are aligned
    if gemm and half and (descriptors or vectors) and case.target != "gfx942":
        copies = "cp.async.bulk.tensor" if descriptors else "cp.async"
        if copies not in facts.found:
            yield f"loads are not asynchronous: no {copies}"
        if case.target == "sm_90" and "async dot" not in facts.found:
            yield "a product is waited for before the next one starts"
    if case.kernel in EPILOGUES and "odd" not in features and "16 bytes" not in facts.found:
        yield "products are not loaded 16 bytes at a time"
    if case.target != "gfx942" and case.dtype != "fp64":
        if case.kernel in KEEPS_NAN and "max.NaN" not in facts.found:
            yield "a maximum would hide a NaN (the interpreter cannot show that)"
        if case.kernel == "token_losses" and facts.found & {"div.full", "sqrt.approx", "ex2.approx.f32"}:
            yield "rounds otherwise than PyTorch"


# ---------------------------------------------------------------- the calls

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def call_head(case: Case) -> None:
    features = set(case.variant.split("+"))
    if "all" in features:
        features.update(FEATURES)
    if case.kernel in ("gather_logits", "scatter_grad"):
        features.add("ids")
    n, w = 256, 8192 if "even" in features else 4075 if "odd" in features else 4080
    width = 500 if "ragged" in features else 504 if "by8" in features else 528 if "tail" in features else 512
    operand = DTYPES[case.dtype]
    hidden, weight = torch.empty(n, width, dtype=operand), torch.empty(w, width, dtype=operand)
    if "strided" in features:
        hidden, weight = (t.t().contiguous().t() for t in (hidden, weight))
    acc = accumulation_dtype(hidden, weight)

    def vector(feature: str, size: int = n):
        return torch.zeros(size, dtype=acc) if feature in features else None

    recorded = 0 if "untargeted" in features else 5 if "ids" in features else 1
    rows = Rows(hidden, torch.zeros(n, recorded, dtype=torch.int64), vector("temperature"))
    part = Slice(weight, vector("bias", w), 0)
    spec = LogitSpec(w, 0.5 if "scale" in features else 1.0, 20.0 if "softcap" in features else None)
    state = State.start(rows.ids, "entropy" in features, acc)
    coef = Coefficients.of(torch.zeros(rows.ids.shape, dtype=acc), vector("entropy"))
    tile = torch.empty(n, w, dtype=acc)
    if case.kernel in EPILOGUES:
        epilogues, out = TritonEpilogues(), torch.empty_like(tile, dtype=gradient_dtype(operand, acc))
        epilogues.fold(tile, rows, part, spec, state)
        epilogues.dlogits(tile, rows, part, spec, state.statistics(), coef, out)
    else:
        backend = TileBackend(descriptors=False if "pointers" in features else None)
        backend.fold(rows, part, spec, state)
        backend.dlogits(rows, part, spec, state.statistics(), coef, tile)


def tokens() -> Tokens:
    values = [torch.zeros(1024) for _ in range(4)]
    return Tokens(*values, mask=torch.ones(1024, dtype=torch.bool), layout=None)


def served_losses() -> dict[str, losses.Loss]:
    """A loss for each branch of the kernel."""
    found = {"bapo": losses.get("bapo")}
    for loss in (*map(losses.get, losses.available()), losses.TOPR(ratio="token")):
        parameters = launch.SERVED.get(type(loss).rule, lambda _: None)(loss)
        if parameters is not None:
            found.setdefault(parameters[0], loss)
    return found


def call_loss(case: Case) -> None:
    launch.evaluate(served_losses()[case.variant], tokens())


def call_bounds(case: Case) -> None:
    options = {"c_low": (0.0, 1.26), "c_high": (1.3, 4.45)}  # 64 points each
    for name in case.variant.split("+"):
        if name == "defaults":
            options = {}
        elif name == "tensors":
            options = {"c_low": (torch.tensor(0.8),) * 2, "c_high": (torch.tensor(1.2),) * 2}
        elif name == "none":
            options["weighting"] = name
        else:
            kinds = {"low-first": "order"} | dict.fromkeys(("surrogate", "gradient"), "measure")
            options[kinds.get(name, "contribution")] = name
    launch.find_bounds(losses.BAPO(**options), tokens())


CALLS: dict[str, Callable[[Case], None]] = {
    **dict.fromkeys((*TILES, *EPILOGUES, "merge_partials", "gather_logits", "scatter_grad"), call_head),
    **dict.fromkeys(("token_losses", "fold_means"), call_loss),
    **dict.fromkeys(("bapo_sums", "bapo_pick"), call_bounds),
}


# ---------------------------------------------------------------- in the worker


class Machine:
    """Stands where Triton has the driver of a GPU, and PyTorch its properties."""

    def __init__(self, name: str):
        self.name, self.target = name, TARGETS[name]
        triton.runtime.driver.set_active(self)
        torch.cuda.get_device_capability = lambda device=None: self.target.capability
        torch.version.hip = "0" if self.target.gpu.backend == "hip" else None
        launching.chip_family.cache_clear()

    def get_current_target(self) -> GPUTarget:
        return self.target.gpu

    def get_current_device(self) -> str:  # a key of Triton's caches
        return self.name

    def get_current_stream(self, device: str) -> int:
        return 0


def compile_case(case: Case) -> Facts:
    launched = []
    run = triton.JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **options):
        if kernel.__name__ == case.kernel:
            launched.append((run(kernel, *args, grid=grid, warmup=True, **options), options))

    Machine(case.target)
    triton.JITFunction.run = compile_only
    try:
        CALLS[case.kernel](case)
    finally:
        triton.JITFunction.run = run
    (compiled, options), *others = launched
    assert all(other is compiled for other, _ in others)
    return read(compiled, options)


FOUND = {
    "mma.sync": r"\bmma\.sync",
    "wgmma.mma_async": r"wgmma\.mma_async",
    "tcgen05.mma": r"tcgen05\.mma",
    "v_mfma": r"v_mfma",
    "tf32": r"tf32|xf32",
    "cp.async": r"cp\.async\.c[ag]",
    "cp.async.bulk.tensor": r"cp\.async\.bulk\.tensor",
    "16 bytes": r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64|_load_dwordx4",
    "max.NaN": r"max\.NaN",
    "div.full": r"div\.full",
    "sqrt.approx": r"sqrt\.approx",
    "ex2.approx.f32": r"ex2\.approx(\.ftz)?\.f32",
}


def read(compiled, options: dict) -> Facts:
    assembly = compiled.asm["ptx" if "cubin" in compiled.asm else "amdgcn"]
    found = {name for name, pattern in FOUND.items() if re.search(pattern, assembly)}
    if dots_overlap(compiled.asm["ttgir"]):
        found.add("async dot")
    registers, spilled = read_cubin(compiled.asm["cubin"]) if "cubin" in compiled.asm else read_amdgcn(assembly)
    sizes = {name: v for name, v in options.items() if (name.isupper() or name == "maxnreg") and type(v) is int}
    blocks = " ".join(f"{name}={v}" for name, v in sizes.items())
    metadata = compiled.metadata
    return Facts(
        *(blocks, metadata.num_warps, metadata.num_stages, registers, spilled),
        *(metadata.shared, getattr(metadata, "tmem_size", 0)),
        *(frozenset(found), tuple(narrow_products(compiled.asm["ttir"]))),
    )


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
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    number = {name: int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL")}
    return number["REG"], number["STACK"] + number["LOCAL"]


def dots_overlap(ttgir: str) -> bool:
    """Whether every loop of Hopper's asynchronous products leaves one in flight."""
    loops = [body for body in re.findall(r"scf\.for.*?scf\.yield", ttgir, re.DOTALL) if "warp_group_dot " in body]
    return bool(loops) and all("isAsync = true" in body and "pendings = 1 " in body for body in loops)


def narrow_products(ttir: str) -> Iterator[str]:
    """Multiplications in 32 bits of two numbers neither of which is known when compiling: rows by strides, where 2^31 elements are passed.
    (A block size times a block's number is below the number of rows or columns.)"""
    known = set()
    for line in ttir.splitlines():
        if (match := re.match(r"\s*%(\w+)(?::\d+)? = ([\w.]+)(.*)", line)) is None:
            continue
        name, operation, rest = match[1], match[2], match[3].split(" loc(")[0]
        operands = re.findall(r"%(\w+)", rest)
        if operation in ("arith.constant", "tt.make_range") or (operands and known.issuperset(operands)):
            known.add(name)
        elif operation == "arith.muli" and rest.endswith(("i32", "i32>")) and not known.intersection(operands):
            yield f"%{name} = {operation}{rest}"


# ---------------------------------------------------------------- workers, table, command line


class Worker:
    """A process that compiles. One that a compiler took down, or keeps busy, is replaced; its last words become the result."""

    PATIENCE = 120  # seconds

    def __init__(self):
        self.log = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.log.truncate(0)
        self.process = context.Process(target=serve, args=(theirs, self.log.name), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, case: Case) -> Facts | str:
        reason = f"the compiler was not done after {self.PATIENCE} s"
        try:
            self.pipe.send(case)
            if self.pipe.poll(self.PATIENCE):
                return self.pipe.recv()
        except (EOFError, OSError):
            reason = "the compiler crashed"
        self.stop()
        words = Path(self.log.name).read_text(errors="replace")
        said = [
            line for line in words.splitlines() if re.search(r"Assert|error:|LLVM ERROR", line)
        ] or words.splitlines()
        self.start()
        return "\n".join([reason, *said[:3]])

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def serve(pipe, log: str) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), sys.stderr.fileno())
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(compile_case(case))
        except CompilationError as error:  # has the line of the kernel
            pipe.send(str(error))
        except Exception:
            pipe.send(traceback.format_exc())


def compile_all(chosen: list[Case], workers: int = 2) -> Iterator[tuple[Case, Facts | str]]:
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for _ in range(workers):
        idle.put(Worker())

    def one(case: Case) -> Facts | str:
        worker = idle.get()
        try:
            return worker(case)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(workers) as threads:
        yield from zip(chosen, threads.map(one, chosen), strict=True)
    for _ in range(workers):
        idle.get().stop()


def table_line(case: Case, facts: Facts) -> tuple[str, ...]:
    return tuple(map(str, (*case, *facts[: len(COLUMNS) - len(case)])))


def read_table(path: Path = TABLE) -> tuple[str, dict[Case, tuple[str, ...]]]:
    """The version of Triton that wrote it, and its lines."""
    with path.open(newline="") as file:
        version = file.readline().split()[-1]
        lines = [tuple(line) for line in csv.reader(file)][1:]
    return version, {Case(*line[:4]): line for line in lines}


def write_table(path: Path, lines: list[tuple[str, ...]]) -> None:
    with path.open("w", newline="") as file:
        file.write(f"# make matrix, Triton {triton.__version__}\n")
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *sorted(lines)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--default", dest="everything", action="store_false", help="what `make test` compiles")
    extent.add_argument("--all", dest="everything", action="store_true", help="the whole matrix (default)")
    parser.add_argument(
        "--table", type=Path, metavar="PATH", help="write registers, shared memory, ... of each case as CSV"
    )
    parser.add_argument("--check", action="store_true", help=f"compare with {TABLE.name}")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=[*TARGETS])
    parser.add_argument("--kernels", nargs="+", choices=MATRIX, default=[*MATRIX])
    parser.set_defaults(everything=True)
    args = parser.parse_args()

    start, failures, lines = time.monotonic(), 0, []
    chosen = [c for c in cases(args.everything) if c.target in args.targets and c.kernel in args.kernels]
    version, expected = read_table() if args.check else ("", {})
    for case, result in compile_all(chosen):
        wrong = [result] if isinstance(result, str) else [*problems(case, result)]
        if not isinstance(result, str):
            lines.append(line := table_line(case, result))
            if args.check and line != expected.get(case):
                wrong.append(f"{','.join(line)}, with Triton {version}: {','.join(expected.get(case, ('nothing',)))}")
        if wrong:
            failures += 1
            print(case, *wrong, sep="\n    ", flush=True)
    if args.table:
        write_table(args.table, lines)
    seconds = math.ceil(time.monotonic() - start)
    print(f"Triton {triton.__version__}: {len(chosen)} cases, {failures} with problems, {seconds} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
