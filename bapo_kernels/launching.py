"""How Triton kernels are launched: the one table of block sizes, warps and pipeline stages, and who reads it.

Launchers and the ahead-of-time compile matrix both take their configs from `RULES`, by kernel, family of chips, dtype and features.
"""

from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import torch
import triton

INTERPRETED: bool = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1 was set before Triton was imported


class Config(NamedTuple):
    blocks: dict[str, int]
    warps: int = 4
    stages: int = 1
    registers: int | None = None  # of a thread at most

    @property
    def options(self) -> dict:
        """Keyword arguments of a launch."""
        # Without fusion a multiply rounds before the addition after it: sum, maximum and picked logit see the same logit, the backward,
        # another program around the same arithmetic, makes the same bits, and a loss rounds as PyTorch does.
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}
        return self.blocks | options | ({} if self.registers is None else {"maxnreg": self.registers})


class Rule(NamedTuple):
    kernels: str  # names, separated by spaces
    families: str  # "" for all. "sm80" (also 86, 89), "sm90", "sm100", "sm120", "gfx9", "interpreter"
    dtypes: str  # "" for all. "half" (bf16, fp16), "float" (fp32), "double"
    features: str  # "" for all. "ragged": hidden and weight cannot be loaded 16 bytes at a time. "softcap"
    config: Config
    reason: str


def _tile(rows: int, columns: int, depth: int, warps: int, stages: int, registers: int | None = None) -> Config:
    return Config({"BN": rows, "BV": columns, "BD": depth}, warps, stages, registers)


def _rows(rows: int, columns: int, warps: int, **others: int) -> Config:
    return Config({"BN": rows, "BV": columns, **others}, warps)


TILES = "fold_tile dlogits_tile"

# The first rule that fits is taken. Whether an entropy is wanted is no feature, and must not be: it would let the forward of a training
# step sum in another order than no-grad scoring, which asks for none, and the two have to agree bit for bit.
RULES = (
    # products and epilogue in one kernel
    Rule(TILES, "interpreter", "", "", _tile(16, 32, 32, 4, 1), "programs are costly, shapes small"),
    Rule(TILES, "", "double", "", _tile(32, 32, 16, 4, 2), "for checks of gradients, where speed is no matter"),
    Rule(TILES, "", "float", "", _tile(128, 64, 16, 8, 2), "plain FMA, taken only where it is asked for"),
    Rule(TILES, "", "half", "ragged", _tile(64, 64, 64, 8, 2), "loads pass registers; larger ones spill"),
    Rule("fold_tile", "sm90", "half", "softcap", _tile(128, 128, 64, 8, 3), "its epilogue wants more registers"),
    Rule("dlogits_tile", "sm90", "half", "softcap", _tile(64, 128, 64, 8, 3), "its epilogue wants more registers"),
    Rule(
        "fold_tile",
        "sm90",
        "half",
        "",
        _tile(128, 128, 64, 8, 3, 128),
        "two blocks on an SM hide each other's epilogue",
    ),
    Rule(TILES, "gfx9", "half", "", _tile(128, 128, 64, 8, 2), "32 KB of the 64 KB of LDS"),
    Rule(
        TILES,
        "",
        "half",
        "",
        _tile(128, 128, 64, 8, 3),
        "no epilogue spills; 128 divides most vocabularies; fits 99 KB",
    ),
    Rule("merge_partials", "interpreter", "", "", Config({"BN": 16}), "small shapes"),
    Rule("merge_partials", "", "", "", Config({"BN": 128}), "a row a thread; the loads of a warp are adjacent"),
    # epilogues of a tile that a vendor product left in memory
    Rule("fold_rows", "interpreter", "", "", _rows(16, 32, 4, BP=4), "small shapes"),
    Rule("fold_rows", "", "", "", _rows(1, 2048, 4, BP=128), "16 logits a thread: loads of 16 bytes, few registers"),
    Rule("dlogits_rows", "interpreter", "", "", _rows(16, 32, 4), "small shapes"),
    Rule("dlogits_rows", "", "double", "", _rows(1, 2048, 8), "a double takes two registers"),
    Rule("dlogits_rows", "", "", "", _rows(1, 4096, 8), "16 logits a thread"),
    # recorded ids
    Rule("gather_logits", "interpreter", "", "", Config({"BK": 4, "BD": 64}), "small shapes"),
    Rule("gather_logits", "", "", "", Config({"BK": 8, "BD": 256}), "512 bytes of each row of the weight at a time"),
    Rule("scatter_grad", "interpreter", "", "", Config({"BK": 4}), "small shapes"),
    Rule("scatter_grad", "", "", "", Config({"BK": 64}, warps=1), "few ids a row"),
    # losses
    Rule("token_losses", "interpreter", "", "", Config({"BLOCK": 32}), "small shapes"),
    Rule("token_losses", "", "", "", Config({"BLOCK": 128}), "a token a thread: fp64 sums fill registers"),
    Rule("fold_means", "interpreter", "", "", Config({"BLOCK": 4}), "small shapes"),
    Rule("fold_means", "", "", "", Config({"BLOCK": 1024}), "one program: the sums of 260,000 tokens in a step"),
    Rule("bapo_sums", "interpreter", "", "", Config({"BLOCK": 32}), "programs are costly"),
    Rule("bapo_sums", "", "", "", Config({"BLOCK": 16}), "tokens x 64 grid points are in registers, in fp64"),
    Rule("bapo_pick", "interpreter", "", "", Config({"BLOCK": 2}), "small shapes"),
    Rule("bapo_pick", "", "", "", Config({"BLOCK": 32}), "64 grid points x programs are in registers, in fp64"),
)
_DTYPES = {torch.float64: "double", torch.float32: "float", torch.bfloat16: "half", torch.float16: "half"}


def find_config(
    kernel: str, device: torch.device, dtype: torch.dtype = torch.float32, features: frozenset[str] = frozenset()
) -> Config:
    """`dtype`: of hidden states and weight."""
    family = chip_family(device)
    for rule in RULES:
        if (
            kernel in rule.kernels.split()
            and (not rule.families or family in rule.families.split())
            and (not rule.dtypes or _DTYPES[dtype] in rule.dtypes.split())
            and features.issuperset(rule.features.split())
        ):
            return rule.config
    raise LookupError(f"no launch config for {kernel} on {family} in {dtype}")


@cache
def chip_family(device: torch.device) -> str:
    if INTERPRETED:
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx9"
    major = torch.cuda.get_device_capability(device)[0]
    return {8: "sm80", 9: "sm90", 10: "sm100"}.get(major, "sm120")


def on(device: torch.device):
    """Launches go to the current stream of the device that is current inside."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
