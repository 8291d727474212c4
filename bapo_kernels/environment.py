"""What this machine offers: versions, devices, and which backends can be used."""

import importlib.metadata
import os
import platform

import torch

from bapo_kernels.head import backends

_PACKAGES = ("bapo-kernels", "torch", "triton", "transformers", "trl", "verl", "liger-kernel")


def env_report() -> dict[str, str]:
    """Versions, hardware and usable backends, for a bug report. Also printed by `bapo-kernels env`."""
    report = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            report[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            report[package] = "not installed"
    report["cpu"] = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(i)
            report[f"cuda:{i}"] = f"{torch.cuda.get_device_name(i)}, compute capability {major}.{minor}"
        devices.append(torch.device("cuda"))
    for device in devices:
        for name in ("triton", "cpu", "torch", "reference"):
            report[f"backend {name} on {device.type}"] = backends.unavailable(name, device) or "usable"
        report[f"backend auto on {device.type}"] = backends.resolve("auto", device)
    try:
        report["memory budget"] = f"{backends.resolve_budget(None, devices[-1]) / 2**20:g} MiB"
    except ValueError as error:
        report["memory budget"] = f"invalid: {error}"
    report["design on GPUs"] = os.environ.get("BAPO_KERNELS_DESIGN") or "auto"
    return report
