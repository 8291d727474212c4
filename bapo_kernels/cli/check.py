"""`bapo-kernels check`: values and gradients of every backend, loss and option on this machine, against the fp64 reference.

The yardstick is PyTorch itself: plain autograd on materialised logits with the same inputs, whose own error against fp64 stands beside
ours. A case passes if its error is at most twice that, plus a few units in the last place.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bapo_kernels import corrections, losses, reference
from bapo_kernels.head import backends
from bapo_kernels.head.api import linear_logprobs
from bapo_kernels.head.divergence import linear_kl
from bapo_kernels.planning import plan
from bapo_kernels.policy import linear_policy_loss

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Units in the last place that are allowed whatever PyTorch's error. Losses have the log-probs of whole sequences in an exponent, where a
# lucky rounding of PyTorch's is no yardstick; in fp64 PyTorch is the yardstick itself, and its error 0.
UNITS, UNITS_LOSS, UNITS_FP64 = 8, 128, 4096
# Away from every clip bound of the defaults, so that no rounding can turn a token over.
RATIOS = (0.37, 0.73, 0.97, 1.03, 1.13, 1.37, 2.23, 3.7)


@dataclass(frozen=True)
class Shape:
    tokens: int
    hidden: int
    vocab: int


@dataclass(frozen=True)
class Case:
    name: str
    call: Callable  # linear_logprobs, linear_kl or linear_policy_loss
    options: dict  # keyword arguments; a string value starting with "@" is an input of that name
    frozen: tuple[str, ...] = ()


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "check", help="check values and gradients of every backend and loss against the fp64 reference"
    )
    parser.add_argument("--quick", action="store_true", help="one small shape, two dtypes")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: every device here")
    parser.add_argument(
        "--dtype",
        action="append",
        choices=list(DTYPES),
        help="may be repeated; default: all (--quick: float32, bfloat16)",
    )
    parser.add_argument(
        "--backend",
        action="append",
        choices=("triton", "cpu", "torch"),
        help="may be repeated; default: every usable one",
    )
    parser.add_argument("--filter", default="", help="only cases whose name holds this text")


def run(arguments: argparse.Namespace) -> int:
    dtypes = arguments.dtype or (["float32", "bfloat16"] if arguments.quick else list(DTYPES))
    devices = [arguments.device] if arguments.device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 2
    cases = [c for c in all_cases() if arguments.filter in c.name]
    if not cases:
        print(f"no case has {arguments.filter!r} in its name", file=sys.stderr)
        return 2
    tables: dict[tuple[str, str, Shape], list[str]] = {}
    for device in devices:
        for backend in arguments.backend or ("triton", "cpu", "torch"):
            if reason := backends.unavailable(backend, torch.device(device)):
                print(f"backend {backend} on {device}: not checked, {reason}")
                continue
            for dtype in dtypes:
                for shape in _shapes(device, backend, arguments.quick):
                    tables.setdefault((device, dtype, shape), []).append(backend)
    if not tables:
        print("nothing to check", file=sys.stderr)
        return 2

    print("Errors against fp64, relative to the largest value. PyTorch: plain autograd on full logits, the yardstick.")
    done, failed = 0, 0
    total = sum(len(names) for names in tables.values()) * len(cases)
    for (device, dtype, shape), names in tables.items():
        print(f"\n{device}, {dtype}, {shape.tokens} tokens, hidden size {shape.hidden}, vocabulary {shape.vocab}")
        print(f"  {'case':<46}{'worst of':<15}{'PyTorch':>9}" + "".join(f"{n:>9}" for n in names))
        for case in cases:
            _progress(f"  {done}/{total} {case.name} ...")
            results = check(case, device, names, DTYPES[dtype], shape)
            total -= len(names) - len(results)  # what does not serve a case
            if not results:
                continue
            done += len(results)
            errors = {r.backend: r.error for r in results}
            bad = [f"{r.backend}: {r.output}" for r in results if not r.passed]
            failed += len(bad)
            worst = max(results, key=lambda r: r.error / r.allowed)
            _progress("")
            print(
                f"  {case.name:<46}{worst.output:<15}{worst.torch_error:>9.1e}"
                + "".join(f"{errors[n]:>9.1e}" if n in errors else f"{'-':>9}" for n in names)
                + ("  FAIL " + ", ".join(bad) if bad else "")
            )
    print(f"\n{done - failed} passed, {failed} failed")
    return 1 if failed else 0


@dataclass(frozen=True)
class Result:
    """One backend's worst output, against what is allowed."""

    backend: str
    output: str
    error: float
    torch_error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed


def check(case: Case, device: str, names: list[str], dtype: torch.dtype, shape: Shape) -> list[Result]:
    inputs = _inputs(device, dtype, shape, case)
    exact = _evaluate(case, inputs, torch.float64, "reference")
    plain = _evaluate(case, inputs, dtype, "reference")
    results = []
    for backend in names:
        if case.call is linear_kl and backend != "torch" and "torch" in names:
            continue  # its loops are the same PyTorch operations on every backend
        if not _serves(case, device, dtype, backend):
            continue
        ours = _evaluate(case, inputs, dtype, backend)
        rows = []
        for output, want in exact.items():
            scale = want.abs().max() if want.numel() else want.new_zeros(())
            if output == "loss":
                # A sum of terms that may cancel: what they are, not what is left of them, is what rounds.
                terms = exact["token loss"].abs()
                scale = scale.maximum(terms.sum() if "sum" in str(case.options.get("aggregation")) else terms.max())
            error, torch_error = (_error(t[output], want, scale) for t in (ours, plain))
            units = UNITS_LOSS if case.call is linear_policy_loss else UNITS
            units = UNITS_FP64 if dtype == torch.float64 else units
            allowed = 2 * torch_error + units * torch.finfo(ours[output].dtype).eps
            rows.append(Result(backend, output, error, torch_error, allowed))
        results.append(max(rows, key=lambda r: r.error / r.allowed))
    return results


def _serves(case: Case, device: str, dtype: torch.dtype, backend: str) -> bool:
    """Engines that keep products of the head are not for a backend that never has them in memory."""
    chosen = backends.choose(backend, torch.device(device), dtype, [dtype])
    return case.options.get("engine") not in ("one-pass", "frozen") or (chosen is not None and chosen.keeps)


def _error(got: Tensor, want: Tensor, scale: Tensor) -> float:
    if want.numel() == 0:
        return 0.0
    error = float((got.double() - want).abs().max() / scale.clamp(min=1e-30))
    return error if error == error else float("inf")


def _evaluate(case: Case, inputs: dict, dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    """Outputs and gradients of one call. `inputs` are in the dtype under check; the oracle reads the same values in fp64."""
    head = ("hidden", "weight", "bias", "rollout_hidden")
    with_grad = [n for n in head[:3] if n not in case.frozen]
    given = {k: v.detach().to(dtype) if k in head else v for k, v in inputs.items()}
    for name in with_grad:
        given[name].requires_grad_(True)
    options = _resolve(case.options, given)
    if backend == "reference":
        options.pop("engine", None)
    if options.get("memory_budget") == IN_BLOCKS:
        options["memory_budget"] = None if backend == "reference" else _least_budget(given, dtype, backend)
    if case.call is linear_logprobs:
        stats = linear_logprobs(given["hidden"], given["weight"], given["targets"], **options, backend=backend)
        values = {k: v for k, v in stats._asdict().items() if v is not None}
        scalar = sum((v * given[f"upstream_{k}"].to(v.dtype)).sum() for k, v in values.items())
    elif case.call is linear_kl:
        sides = given["hidden"], given["weight"], given["rollout_hidden"], given["weight"].detach()
        kl = linear_kl(*sides, **options, backend=backend)
        values, scalar = {"kl": kl}, (kl * given["upstream_logprobs"].to(kl.dtype)).sum()
    else:
        out = linear_policy_loss(
            given["hidden"],
            given["weight"],
            given["targets"],
            given["advantages"],
            **options,
            return_tokens=True,
            backend=backend,
        )
        assert out.tokens is not None
        values, scalar = {"loss": out.loss, "token loss": out.tokens.loss, "coefficient": out.tokens.coef}, out.loss
    learned = [n for n in with_grad if n != "bias" or "bias" in options]
    grads = torch.autograd.grad(scalar, [given[n] for n in learned])
    return {
        **{k: v.detach() for k, v in values.items()},
        **{f"grad {n}": g for n, g in zip(learned, grads, strict=True)},
    }


def _least_budget(given: dict, dtype: torch.dtype, backend: str) -> int:
    """What the one-pass engine needs for 16 rows, the fewest that it takes."""
    n, d = given["hidden"].shape
    share = min(16 / n, 1.0)
    needed = plan(
        *(n, d, given["weight"].shape[0]),
        loss="dapo",
        unmasked=share,
        active=share,
        dtype=dtype,
        device=given["hidden"].device,
        weight_grad=given["weight"].requires_grad,
        memory_budget=2**40,
        backend=backend,
        engine="one-pass",
    )
    return needed.memory_bytes


def _inputs(device: str, dtype: torch.dtype, shape: Shape, case: Case) -> dict:
    """Random inputs; what was recorded is fp32, and its ratios to the exact log-probs of the case stay clear of clip bounds."""
    n, d, v = shape.tokens, shape.hidden, shape.vocab
    g = torch.Generator().manual_seed(n * 1_000_003 + d * 1009 + v)
    real = v - v // 8  # the rest stands for padding rows of the head
    t: dict = {
        "hidden": torch.randn(n, d, generator=g).to(dtype),
        "weight": (torch.randn(v, d, generator=g) * (3.0 / d**0.5)).to(dtype),
        "bias": torch.randn(v, generator=g).to(dtype),
        "targets": torch.randint(0, real, (n,), generator=g),
        "mask": torch.rand(n, generator=g) > 0.25,
        "cu_seqlens": torch.tensor([0, n // 3, n // 3, n - 2, n]),  # with an empty sequence
        "temperature": torch.rand(n, generator=g) + 0.5,
        "advantages": torch.randn(n, generator=g),
        "sequence_advantages": torch.randn(4, generator=g),
        "topk_ids": torch.stack([torch.randperm(real, generator=g)[:4] for _ in range(n)]),
        "upstream_logprobs": torch.randn(n, generator=g),
        "upstream_entropy": torch.randn(n, generator=g),
        "upstream_topk_logprobs": torch.randn(n, 4, generator=g),
    }
    t["real"] = real
    t["topk_ids"][::3, 2:] = -1
    t["advantages"][::5] = 0.0
    head = _resolve({k: v for k, v in case.options.items() if k in HEAD_OPTIONS}, t)
    wide = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in head.items()}
    exact = reference.linear_logprobs(t["hidden"].double(), t["weight"].double(), t["targets"], **wide).logprobs
    ratios = torch.tensor(RATIOS, dtype=torch.float64)[torch.randint(0, len(RATIOS), (n,), generator=g)]
    t["old"] = (exact - ratios.log()).float()
    t["rollout"] = t["old"] + 0.2 * torch.randn(n, generator=g)
    t["rollout_hidden"] = (t["hidden"].float() + 0.3 * torch.randn(n, d, generator=g)).to(dtype)
    sampler = (t["rollout_hidden"].double() @ t["weight"].double().T).log_softmax(-1)
    t["rollout_topk_logprobs"] = sampler.gather(1, t["topk_ids"].clamp(min=0)).float()
    t["ref"] = (exact + 0.3 * torch.randn(n, generator=g)).float()
    return {k: x.to(device) if isinstance(x, Tensor) else x for k, x in t.items()}


def _resolve(options: dict, inputs: dict) -> dict:
    return {k: inputs[v[1:]] if isinstance(v, str) and v.startswith("@") else v for k, v in options.items()}


IN_BLOCKS = "in blocks"  # a memory budget that holds few rows
HEAD_OPTIONS = ("bias", "temperature", "logit_scale", "softcap", "vocab_size")


def all_cases() -> Iterator[Case]:
    """Each option alone, each with the others, and each loss with what surrounds it."""
    transforms: dict[str, dict] = {
        "plain": {},
        "bias": {"bias": "@bias"},
        "temperature 0.7": {"temperature": 0.7},
        "temperature per token": {"temperature": "@temperature"},
        "logit_scale": {"logit_scale": 0.5},
        "softcap": {"softcap": 5.0},
        "vocab_size": {"vocab_size": "@real"},
    }
    transforms["every transform"] = {k: v for t in transforms.values() for k, v in t.items()}
    for name, options in transforms.items():
        yield Case(f"logprobs, {name}", linear_logprobs, options)
    everything: dict = {
        **transforms["every transform"],
        "mask": "@mask",
        "topk_ids": "@topk_ids",
        "return_entropy": True,
    }
    yield Case("logprobs, entropy", linear_logprobs, {"return_entropy": True})
    yield Case("logprobs, topk_ids", linear_logprobs, {"topk_ids": "@topk_ids"})
    yield Case("logprobs, everything", linear_logprobs, everything)
    yield Case("logprobs, everything, tiny budget", linear_logprobs, {**everything, "memory_budget": 1})
    for frozen in (("weight",), ("hidden",), ("weight", "bias"), ("hidden", "bias")):
        yield Case(f"logprobs, everything, {', '.join(frozen)} frozen", linear_logprobs, everything, frozen)

    yield Case("KL of two heads", linear_kl, {})
    yield Case("KL of two heads, every transform", linear_kl, {**transforms["every transform"], "mask": "@mask"})

    recorded = {"old_logprobs": "@old", "rollout_logprobs": "@rollout"}
    topk = {"rollout_topk_ids": "@topk_ids", "rollout_topk_logprobs": "@rollout_topk_logprobs"}
    mixed = {**recorded, "mask": "@mask", "cu_seqlens": "@cu_seqlens", "temperature": 0.8}
    added = {"kl_coef": 0.1, "ref_logprobs": "@ref", "entropy_coef": 0.05}
    for loss in losses.available():
        needed = {"loss": loss, **(topk if "rollout_topk_ids" in losses.get(loss).needs else {})}
        yield Case(f"{loss}", linear_policy_loss, {**needed, **recorded})
        yield Case(f"{loss}, on-policy", linear_policy_loss, needed)
        yield Case(f"{loss}, packed, mask, KL, entropy", linear_policy_loss, {**needed, **mixed, **added})
    for name, variant in {
        "bapo, bounds moved": losses.BAPO(target=0.7),
        "bapo, signed, gradient, unweighted, low-first": losses.BAPO(
            target=0.7, contribution="signed", measure="gradient", weighting="none", order="low-first"
        ),
        "bapo, ratio": losses.BAPO(target=2.0, contribution="ratio"),
        "bapo, fixed bounds, dual clip": losses.BAPO.fixed(0.7, 1.5, dual_clip=3.0),
        "grpo, dual clip": losses.GRPO(dual_clip=3.0),
        "gspo, wide": losses.GSPO(clip_low=0.2, clip_high=0.2),
        "dppo, topk-tv": losses.DPPO(divergence="topk-tv"),
        "dppo, topk-kl": losses.DPPO(divergence="topk-kl", delta_low=0.05, delta_high=0.05),
        "topr, token": losses.TOPR(ratio="token", floor=0.1),
        "score-centering, tis": losses.ScoreCentering(weight="tis"),
        "score-centering, mis": losses.ScoreCentering(weight="mis"),
    }.items():
        yield Case(name, linear_policy_loss, {"loss": variant, **mixed, **topk})
    local: dict[str, dict] = {
        "dapo": {"loss": "dapo"},
        "bapo": {"loss": losses.BAPO(target=0.7)},
        "centering": {"loss": "score-centering", **topk},
    }
    for name, chosen in local.items():
        options = {**chosen, **mixed, **added, "bias": "@bias"}
        blocks = {**options, "engine": "one-pass", "memory_budget": IN_BLOCKS}
        yield Case(f"{name}, recompute", linear_policy_loss, {**options, "engine": "recompute"})
        yield Case(f"{name}, one-pass in blocks", linear_policy_loss, blocks)
        yield Case(f"{name}, one-pass in blocks, frozen head", linear_policy_loss, blocks, ("weight", "bias"))
    frozen_head: dict[str, dict] = {"gspo": {"loss": "gspo"}, "dapo, entropy": {"loss": "dapo", **added}}
    for name, chosen in frozen_head.items():
        options = {**chosen, **mixed, **transforms["every transform"], "engine": "frozen"}
        yield Case(f"{name}, engine frozen", linear_policy_loss, options, ("weight", "bias"))
    for correction in (
        corrections.TruncatedIS(1.1),
        corrections.TruncatedIS(1.5, level="sequence"),
        corrections.MaskedIS(0.8, 1.3),
        corrections.IcePop(0.8, 1.3),
        corrections.KPop(0.02),
    ):
        name = f"dapo, {type(correction).__name__}" + (", sequence" if "sequence" in repr(correction) else "")
        yield Case(name, linear_policy_loss, {"loss": "dapo", **mixed, **added, "correction": correction})
    extras: dict[str, dict] = {
        "token-mean": {"aggregation": "token-mean"},
        "seq-mean-token-mean": {"aggregation": "seq-mean-token-mean"},
        "seq-mean-token-sum": {"aggregation": "seq-mean-token-sum"},
        "seq-mean-token-sum-norm": {"aggregation": "seq-mean-token-sum-norm", "max_length": 32},
        "token-sum": {"aggregation": "token-sum"},
        "normalizer": {"normalizer": 100},
        "top_entropy": {"top_entropy": 0.2},
        "kl k1": {**added, "kl_estimator": "k1"},
        "kl k2": {**added, "kl_estimator": "k2"},
        "kl k3+": {**added, "kl_estimator": "k3+"},
    }
    for name, options in extras.items():
        yield Case(f"dapo, {name}", linear_policy_loss, {"loss": "dapo", **mixed, **options})


def _shapes(device: str, backend: str, quick: bool) -> list[Shape]:
    if backend == "triton" and device == "cpu":  # the interpreter: a tenth of a second for each program of a kernel
        return [Shape(7, 20, 150)]
    shapes = [Shape(37, 65, 1000)]
    return shapes if quick else [*shapes, Shape(67, 100, 9001)]  # several slices of the vocabulary


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<79}\r", end="", file=sys.stderr, flush=True)
