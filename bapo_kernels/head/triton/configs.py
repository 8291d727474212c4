"""Block sizes, warps and pipeline stages of every launch, as rules: what launchers and the ahead-of-time compile test read."""

from typing import NamedTuple


class Config(NamedTuple):
    blocks: dict[str, int]
    warps: int = 4
    stages: int = 1


class Rule(NamedTuple):
    kernels: str  # names, separated by spaces
    families: str  # "" for all. "sm80" (also 86, 89), "sm90", "sm100", "sm120", "gfx9", "interpreter"
    dtypes: str  # "" for all. "half" (bf16, fp16), "float" (fp32, and mixtures with it), "double"
    features: str  # "" or some of: bias scale softcap temperature ragged; the rule is for launches that have them all
    config: Config
    reason: str


def _tile(rows: int, columns: int, depth: int, warps: int, stages: int) -> Config:
    return Config({"BN": rows, "BV": columns, "BD": depth}, warps, stages)


TILES = "fold_tile dlogits_tile"

# The first rule that fits is taken. `entropy` is no feature here, and must not be: it would let the forward of a training step sum
# in another order than no-grad scoring, which asks for no entropy, and the two have to agree bit for bit.
RULES = (
    Rule(TILES, "interpreter", "", "", _tile(16, 32, 32, 4, 1), "programs are costly, shapes small"),
    Rule(TILES, "", "double", "", _tile(32, 32, 16, 4, 2), "for checks of gradients, where speed is no matter"),
    Rule(TILES, "", "float", "", _tile(64, 128, 16, 8, 2), "plain FMA; 128 registers: two blocks on an SM"),
    Rule(TILES, "", "half", "ragged", _tile(64, 64, 64, 8, 2), "D % 16 != 0: loads pass registers; larger ones spill"),
    Rule(TILES, "sm80 sm120", "half", "", _tile(128, 128, 64, 8, 3), "64 KB: fits the 99 KB of consumer chips too"),
    Rule(TILES, "gfx9", "half", "", _tile(128, 128, 64, 8, 2), "32 KB of the 64 KB of LDS"),
    Rule(TILES, "", "half", "", _tile(128, 128, 64, 8, 3), "no epilogue spills; 128 divides most vocabularies"),
    Rule("merge_partials", "interpreter", "", "", Config({"BN": 16}), "small shapes"),
    Rule("merge_partials", "", "", "", Config({"BN": 128}), "a row a thread; the loads of a warp are adjacent"),
    Rule("gather_logits", "interpreter", "", "", Config({"BK": 4, "BD": 64}), "small shapes"),
    Rule("gather_logits", "", "", "", Config({"BK": 8, "BD": 256}), "512 bytes of each row of the weight at a time"),
    Rule("scatter_grad", "interpreter", "", "", Config({"BK": 4}), "small shapes"),
    Rule("scatter_grad", "", "", "", Config({"BK": 64}, warps=1), "few ids a row"),
)


def find_config(kernel: str, family: str, dtype: str, features: frozenset[str] = frozenset()) -> Config:
    for rule in RULES:
        if (
            kernel in rule.kernels.split()
            and (not rule.families or family in rule.families.split())
            and (not rule.dtypes or dtype in rule.dtypes.split())
            and features.issuperset(rule.features.split())
        ):
            return rule.config
    raise LookupError(f"no launch config for {kernel} on {family} in {dtype}")
