"""What is installed is whole: with a compiler and without one, outside the checkout, beside torch."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command, cwd=None, **env) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def python(code, **env) -> str:
    return run(sys.executable, "-c", code, **env)


def test_instruction_set_can_be_forced():
    epilogues = pytest.importorskip("bapo_kernels._epilogues")
    show = "import bapo_kernels._epilogues as e; print(e.isa())"
    assert python(show, BAPO_KERNELS_ISA="baseline") == "baseline"
    assert python(show, BAPO_KERNELS_ISA="") == epilogues.available_isas()[0]
    why = python("from bapo_kernels.head.cpu import unavailable; print(unavailable())", BAPO_KERNELS_ISA="mmx")
    assert "'mmx'" in why
    assert "baseline" in why


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_one_openmp_runtime():
    pytest.importorskip("bapo_kernels._epilogues")
    code = """
import torch, bapo_kernels._epilogues
torch.randn(300, 300) @ torch.randn(300, 300)
files = {line.split()[-1] for line in open("/proc/self/maps")}
print(*[f for f in files if "omp" in f.rsplit("/", 1)[-1] and ".so" in f], sep="\\n")
"""
    assert len(python(code).splitlines()) == 1


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The unpacked sdist: a wheel built from it shows that the sdist is complete."""
    pytest.importorskip("scikit_build_core")
    folder = tmp_path_factory.mktemp("sdist")
    build = "import sys; from scikit_build_core import build; print(build.build_sdist(sys.argv[1]))"
    name = run(sys.executable, "-c", build, folder, cwd=ROOT).splitlines()[-1]
    with tarfile.open(folder / name) as archive:
        archive.extractall(folder, filter="data")
    return folder / name.removesuffix(".tar.gz")


def build_wheel(source: Path, out: Path, **env) -> tuple[Path, str]:
    build = "import sys; from scikit_build_core import build; print(build.build_wheel(sys.argv[1]))"
    log = run(sys.executable, "-c", build, out, cwd=source, **env)
    return out / log.splitlines()[-1], log


def use_elsewhere(wheel: Path, folder: Path, code: str) -> str:
    """Run code in a fresh environment with the wheel and, borrowed through a .pth file, the packages of this one."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    check = f"import bapo_kernels; assert bapo_kernels.__file__.startswith({str(site)!r}), bapo_kernels.__file__"
    return run(python, "-W", "ignore", "-c", f"{check}\n{code}", cwd=folder)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_wheel(source, tmp_path):
    wheel, _ = build_wheel(source, tmp_path)
    names = zipfile.ZipFile(wheel).namelist()
    assert "bapo_kernels/py.typed" in names
    assert any(n.startswith("bapo_kernels/_epilogues.") for n in names)
    assert {n.split("/")[0] for n in names} == {"bapo_kernels", "bapo_kernels-0.1.0.dist-info"}
    code = """
import torch
from bapo_kernels.head.backends import resolve
h, w = torch.randn(4, 8), torch.randn(32, 8)
target = torch.arange(4)
got = bapo_kernels.linear_logprobs(h, w, target, backend="cpu").logprobs
print(resolve("auto", h.device), torch.allclose(got, (h @ w.T).log_softmax(1)[target, target], atol=1e-5))
"""
    assert use_elsewhere(wheel, tmp_path / "venv", code) == "cpu True"


@pytest.mark.slow
def test_wheel_without_a_compiler(source, tmp_path):
    """The installation succeeds, says what is missing, and works."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("cmake", "ninja"):
        if found := shutil.which(tool, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"):
            (tools / tool).symlink_to(found)
    wheel, log = build_wheel(
        source, tmp_path, PATH=str(tools), CXX="/nonexistent", SKBUILD_BUILD_DIR=str(tmp_path / "build")
    )
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "WITHOUT its compiled CPU epilogues" in " ".join(log.split())
    code = """
import torch
from bapo_kernels.head.backends import resolve, unavailable
print(resolve("auto", torch.device("cpu")), "|", unavailable("cpu", torch.device("cpu")))
"""
    used, reason = use_elsewhere(wheel, tmp_path / "venv", code).split(" | ")
    assert used == "torch"
    assert "_epilogues" in reason
