"""Run the golden cases (*.json next to this file, or in --dir) against the installed `bapo_kernels`.

    python run_cases.py [--dir DIR] [--backend torch,cpu,triton,reference] [--dtype float64,float32] [--filter TEXT] [-v]

Every case holds its inputs, its options and the expected loss, gradients, tokens and metrics; this file holds no numbers.
Calls without a backend (`policy_loss`, `bapo_bounds`, ...) run once per dtype. Triton runs interpreted where there is no GPU.
The last line is 'N passed, M failed'; the exit status is 1 if anything failed.
"""

import argparse
import json
import os
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
INT_INPUTS = {"targets", "cu_seqlens", "topk_ids", "rollout_topk_ids", "group_ids"}
GRAD_INPUTS = {
    "linear_logprobs": ("hidden", "weight", "bias"),
    "linear_policy_loss": ("hidden", "weight", "bias"),
    "policy_loss": ("logprobs", "entropy", "topk_logprobs"),
    "linear_kl": ("hidden", "weight"),
    "exact_bpo_loss": ("logprobs", "kl"),
    "bapo_bounds": (),
    "group_advantages": (),
}
POSITIONAL = {
    "linear_logprobs": ("hidden", "weight", "targets"),
    "linear_policy_loss": ("hidden", "weight", "targets", "advantages"),
    "policy_loss": ("logprobs", "advantages"),
    "linear_kl": ("hidden", "weight", "rollout_hidden", "rollout_weight"),
    "exact_bpo_loss": ("logprobs", "rollout_logprobs", "kl", "rewards", "values"),
    "bapo_bounds": ("logprobs", "advantages"),
    "group_advantages": ("rewards",),
}
WITH_BACKEND = ("linear_logprobs", "linear_policy_loss")


def np_flat(x):
    return [v for i in x for v in np_flat(i)] if isinstance(x, list) else [x]


def number(x):
    return [number(v) for v in x] if isinstance(x, list) else float(x)


def tensor(key, value, dtype, device):
    import torch

    shape = None
    if isinstance(value, dict):
        shape, value = value["shape"], value["data"]
    if key in INT_INPUTS:
        t = torch.tensor(value, dtype=torch.int64, device=device)
    elif key == "mask":
        t = torch.tensor(value, dtype=torch.bool, device=device)
    else:
        t = torch.tensor(number(value), dtype=torch.float64, device=device).to(dtype)
    return t if shape is None else t.reshape(shape)


def find(bk, name):
    for place in (bk, getattr(bk, "losses", None), getattr(bk, "corrections", None)):
        if hasattr(place, name):
            return getattr(place, name)
    raise AttributeError(f"bapo_kernels has no {name}")


def build_loss(bk, spec, as_object=False):
    if isinstance(spec, str):
        return bk.losses.get(spec) if as_object else spec
    spec = {k: tuple(v) if isinstance(v, list) else v for k, v in spec.items()}
    name = spec.pop("name")
    if name == "bapo-fixed":
        return find(bk, "BAPO").fixed(spec["c_low"], spec["c_high"])
    return bk.losses.get(name, **spec)


def build_options(bk, options, dtype, device, as_object=False):
    out = {}
    for k, v in options.items():
        if k == "loss":
            v = build_loss(bk, v, as_object)
        elif k == "correction" and v is not None:
            v = dict(v)
            v = find(bk, v.pop("object"))(**v)
        elif k == "temperature" and isinstance(v, list):
            v = tensor(k, v, dtype, device)
        out[k] = v
    return out


def call_once(bk, case, part, shared, backend, dtype, device):
    """Returns (scalar to differentiate, dict of what was returned)."""
    import torch

    call = part.get("call", case["call"])
    grad_in = [k for k in GRAD_INPUTS[call] if k not in case.get("frozen", [])]
    args = {}
    for k, v in {**case.get("inputs", {}), **part.get("inputs", {})}.items():
        if v is None:
            continue
        if k in shared:
            args[k] = shared[k]
            continue
        args[k] = tensor(k, v, dtype, device)
        if k in grad_in:
            args[k].requires_grad_(True)
        if k in case.get("inputs", {}):
            shared[k] = args[k]
    leaves = {k: args[k] for k in GRAD_INPUTS[call] if k in args}
    options = build_options(
        bk, {**case.get("options", {}), **part.get("options", {})}, dtype, device, call == "bapo_bounds"
    )
    if call in WITH_BACKEND:
        options["backend"] = backend
    if call in ("linear_policy_loss", "policy_loss"):
        options["return_tokens"] = True
    positional = [args.pop(k) for k in POSITIONAL[call] if k in args]
    out = getattr(bk, call)(*positional, **args, **options)
    got = {"leaves": leaves}
    if call in ("linear_logprobs", "linear_kl"):
        values = (
            {"kl": out}
            if call == "linear_kl"
            else {k: getattr(out, k) for k in ("logprobs", "entropy", "topk_logprobs")}
        )
        got["outputs"] = values
        up = {**case.get("upstream", {}), **part.get("upstream", {})}
        scalar = sum((values[k] * tensor(k, u, dtype, device)).sum() for k, u in up.items()) if up else None
    elif call == "bapo_bounds":
        scalar, got["outputs"] = (
            None,
            {k: getattr(out, k) for k in ("c_low", "c_high", "contribution", "positive", "negative")},
        )
    elif call == "group_advantages":
        scalar, got["outputs"] = None, {"advantages": out}
    else:
        scalar = out if torch.is_tensor(out) else out.loss
        got["loss"] = scalar
        if call != "exact_bpo_loss":
            got["metrics"] = out.metrics
            got["tokens"] = (
                {k: getattr(out.tokens, k) for k in ("logprobs", "entropy", "ratio", "loss", "coef", "clipped")}
                if out.tokens is not None
                else {}
            )
    return scalar, got


def compare(what, got, want, atol, rtol, dtype, errors):
    import torch

    if want is None:
        if got is not None:
            errors.append(f"{what}: expected None, got {got}")
        return
    if got is None:
        errors.append(f"{what}: expected {want}, got None")
        return
    w = (
        tensor("", want, torch.float64, "cpu")
        if not isinstance(want, (int, float, str))
        else torch.tensor(float(want), dtype=torch.float64)
    )
    g = (got.detach() if torch.is_tensor(got) else torch.tensor(float(got))).to("cpu", torch.float64)
    if g.shape != w.shape:
        errors.append(f"{what}: expected shape {tuple(w.shape)}, got {tuple(g.shape)}")
        return
    if g.numel() == 0:
        return
    finite = w[torch.isfinite(w)].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    if not torch.allclose(g, w, rtol=rtol, atol=atol * scale, equal_nan=True):
        worst = float((g - w).abs().nan_to_num(float("inf")).max())
        errors.append(
            f"{what}: max error {worst:.3e} (atol {atol:g}, rtol {rtol:g})\n      expected {w.tolist()}\n      got      {g.tolist()}"
        )


def run_case(bk, case, backend, dtype, device):
    import torch

    expect, errors = case["expect"], []
    parts = case.get("parts", [{}])
    shared, results, total = {}, [], None
    try:
        for part in parts:
            scalar, got = call_once(bk, case, part, shared, backend, dtype, device)
            results.append(got)
            if scalar is not None:
                total = scalar if total is None else total + scalar
    except Exception as e:
        if expect.get("raises") and type(e).__name__ == expect["raises"]:
            return []
        return [f"raised {type(e).__name__}: {e}\n{traceback.format_exc(limit=-3)}"]
    if expect.get("raises"):
        return [f"expected {expect['raises']}, nothing was raised"]
    low = dtype == torch.float32
    atol, rtol = (
        (case.get("atol32", 3e-5), case.get("rtol32", 3e-4))
        if low
        else (case.get("atol", 1e-9), case.get("rtol", 1e-8))
    )

    def check(what, g, w):
        return compare(what, g, w, atol, rtol, dtype, errors)

    def loose(what, g, w):
        return compare(what, g, w, max(atol, 1e-6), max(rtol, 1e-6), dtype, errors)  # metrics may be fp32

    if "loss" in expect:
        check("loss", total, expect["loss"])
        if total.dtype != dtype:
            errors.append(f"loss: dtype {total.dtype}, expected {dtype}")
    if "grads" in expect and total is not None:
        if not total.requires_grad:
            errors.append("the result has no grad_fn")
        else:
            try:
                total.backward()
            except Exception as e:
                return [*errors, f"backward raised {type(e).__name__}: {e}\n{traceback.format_exc(limit=-3)}"]
    for i, got in enumerate(results):
        want = expect["parts"][i] if "parts" in expect else expect
        tag = f"part {i} " if len(results) > 1 else ""
        for k, w in want.get("outputs", {}).items():
            (loose if "c_low" in got["outputs"] else check)(f"{tag}{k}", got["outputs"][k], w)
        for k, w in want.get("tokens", {}).items():
            check(f"{tag}tokens.{k}", got["tokens"].get(k), w)
        for k, w in want.get("metrics", {}).items():
            loose(f"{tag}metrics[{k}]", got["metrics"].get(k), w)
        for k, w in want.get("grads", {}).items():
            leaf = got["leaves"].get(k)
            g = None if leaf is None else leaf.grad
            if g is None and k in ("entropy", "topk_logprobs") and not any(number(np_flat(w))):
                continue  # an unused optional input may have no gradient
            check(f"{tag}grad {k}", g, w)
    if "parts" in expect:
        for k, w in expect.get("grads", {}).items():
            check(f"grad {k}", shared[k].grad, w)
    return errors


def probe(bk, backend, dtype, device):
    """A reason why a backend cannot run here, or None. `torch` and `reference` are never skipped."""
    import torch

    if backend in ("torch", "reference"):
        return None
    try:
        h = torch.ones(2, 8, dtype=dtype, device=device, requires_grad=True)
        w = torch.ones(16, 8, dtype=dtype, device=device)
        bk.linear_logprobs(
            h, w, torch.zeros(2, dtype=torch.int64, device=device), backend=backend
        ).logprobs.sum().backward()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return None


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--dir", type=Path, default=HERE)
    ap.add_argument("--backend", default="torch,cpu,triton,reference")
    ap.add_argument("--dtype", default="float64,float32")
    ap.add_argument("--filter", default="")
    ap.add_argument("-v", "--verbose", action="store_true")
    a = ap.parse_args()
    import torch

    backends = [b for b in a.backend.split(",") if b]
    cuda = torch.cuda.is_available()
    if "triton" in backends and not cuda:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    import bapo_kernels as bk

    cases = [
        (f.name, c) for f in sorted(a.dir.glob("*.json")) for c in json.loads(f.read_text()) if a.filter in c["name"]
    ]
    if not cases:
        sys.exit(f"no cases in {a.dir}")
    passed, failed = 0, []
    for dtype in [getattr(torch, d) for d in a.dtype.split(",")]:
        done = set()
        for backend in backends:
            device = "cuda" if cuda and backend in ("triton", "torch") else "cpu"
            reason = probe(bk, backend, dtype, device)
            if reason:
                print(f"skipped: backend {backend}, {dtype}: {reason}")
                continue
            for file, case in cases:
                if case.get("dtypes") and str(dtype).split(".")[1] not in case["dtypes"]:
                    continue
                calls = {p.get("call", case["call"]) for p in case.get("parts", [{}])}
                has_backend = bool(calls & set(WITH_BACKEND))
                if not has_backend and case["name"] in done:
                    continue
                done.add(case["name"])
                errors = run_case(bk, case, backend, dtype, device)
                label = f"{file}:{case['name']} [{backend if has_backend else '-'}, {str(dtype).split('.')[1]}]"
                if errors:
                    failed.append(label)
                    print(f"FAIL {label}  ({case.get('note', '')})")
                    for e in errors:
                        print("    " + e)
                else:
                    passed += 1
                    if a.verbose:
                        print(f"ok   {label}")
    print(f"{passed} passed, {len(failed)} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
