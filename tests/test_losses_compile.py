"""The kernel of the token-local losses compiles ahead of time for every family of chips, without spills. Nothing is run."""

import importlib
import sys

import pytest

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)
triton = importlib.import_module("triton")
launch = importlib.import_module("bapo_kernels.losses.triton.launch")

from test_triton_compile import TARGETS, read_amdgcn, read_cubin  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

pytestmark = pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter compiles nothing")

# Branches of the kernel with the number of their parameters; those that are tensors.
BRANCHES = {"clip": 3, "bapo": 4, "dcpo": 4, "sapo": 2, "dro": 1, "reinforce": 0, "cispo": 2, "topr": 2, "bpo": 4}
BRANCHES |= {"dppo-tv": 3, "dppo-kl": 3}
ON_DEVICE = {"bapo": ("p0", "p1", "p3")}
TYPES = {"mask": "*i1", "clipped": "*i8", "partials": "*fp64", "bounds": "*fp64", "target": "i64"}
TYPES |= dict.fromkeys(("n", "programs", "steps", "n_high", "n_low"), "i32")
TYPES |= {f"{bound}_{what}": "i64" for bound in ("high", "low") for what in ("start", "end", "step")}
ALL = ("bapo", "dcpo", "bpo", "dppo-kl")  # the most registers and functions; the others are compiled for one target
CASES = [*((target, b) for target in TARGETS for b in ALL), *(("sm_90", b) for b in BRANCHES if b not in ALL)]


def compiled(kernel, target: str, branch: str | None = None, types: dict[str, str] = TYPES, **constants):
    constants |= {"BLOCK": launch.BLOCKS[kernel.__name__]}
    if branch is not None:
        constants |= {"LOSS": branch} | {f"p{k}": None for k in range(BRANCHES[branch], 4)}
    signature, attributes = {}, {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("p0", "p1", "p2", "p3") and name not in ON_DEVICE.get(branch, ()):
            signature[name] = "fp32"
        else:
            signature[name] = types.get(name, "*fp32")
        if signature[name].startswith("*") and not name.startswith("p0"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    asm = triton.compile(source, target=TARGETS[target][0], options=launch.OPTIONS).asm
    return asm, *(read_cubin(asm["cubin"]) if "cubin" in asm else read_amdgcn(asm["amdgcn"]))


@pytest.mark.parametrize(("target", "branch"), CASES, ids=["-".join(case) for case in CASES])
def test_rules_compile_without_spills(target, branch):
    asm, registers, spilled = compiled(launch.token_losses, target, branch)
    print(f"{registers} registers")
    assert spilled == 0, f"{spilled} bytes of spilled registers"
    if "ptx" in asm:
        assert "max.NaN" in asm["ptx"], "clamping would hide a NaN (the interpreter cannot show that)"
        assert "div.full" not in asm["ptx"] and "sqrt.approx" not in asm["ptx"], "rounds otherwise than PyTorch"
        assert "ex2.approx.f32" not in asm["ptx"] and "ex2.approx.ftz.f32" not in asm["ptx"]


@pytest.mark.parametrize("target", TARGETS)
def test_fold_compiles_without_spills(target):
    assert compiled(launch.fold_means, target)[2] == 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("measure", ["surrogate", "gradient"])
def test_sums_of_bapo_compile_without_spills(target, measure):
    constants = {"GRADIENT": measure == "gradient", "WEIGHTED": True, "HIGH": launch.GRID, "LOW": launch.GRID}
    _, registers, spilled = compiled(launch.bapo_sums, target, **constants)
    print(f"{registers} registers")
    assert spilled == 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("order", ["high-first", "low-first"])
def test_search_of_bapo_compiles_without_spills(target, order):
    constants = {"KIND": "share", "HIGH_FIRST": order == "high-first", "HIGH": launch.GRID, "LOW": launch.GRID}
    _, registers, spilled = compiled(launch.bapo_pick, target, **constants)
    print(f"{registers} registers")
    assert spilled == 0


def test_bounds_of_bapo_may_be_tensors():
    types = TYPES | {f"{bound}_{end}": "*fp32" for bound in ("high", "low") for end in ("start", "end")}
    grids = {"HIGH": 16, "LOW": 16}
    for kernel, options in (
        (launch.bapo_sums, {"GRADIENT": False, "WEIGHTED": False}),
        (launch.bapo_pick, {"KIND": "signed", "HIGH_FIRST": True}),
    ):
        assert compiled(kernel, "sm_90", types=types, **grids, **options)[2] == 0


def test_every_branch_that_is_served_is_compiled():
    from bapo_kernels import losses

    served = {"bapo"}
    objects = [losses.get(name) for name in losses.available()]
    for loss in (*objects, losses.TOPR(ratio="token")):
        parameters = launch.SERVED.get(type(loss).rule, lambda _: None)(loss)
        if parameters is not None:
            assert BRANCHES[parameters[0]] == len(parameters) - 1
            served.add(parameters[0])
    assert served == set(BRANCHES)
