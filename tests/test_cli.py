"""The command line: `check` passes here, fails where a kernel is wrong, and says so in its exit code."""

import pytest
import torch

from bapo_kernels.cli import main
from bapo_kernels.head.eager import TorchEpilogues


def test_check_passes(capsys):
    assert main(["check", "--quick", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out
    assert int(out.splitlines()[-1].split()[0]) > 200
    for loss in ("bapo", "gspo", "score-centering", "kl-cov"):
        assert f"  {loss}, on-policy" in out


@pytest.mark.parametrize("part", ["fold", "dlogits"])
def test_check_fails_where_a_kernel_is_wrong(monkeypatch, capsys, part):
    right = getattr(TorchEpilogues, part)

    def wrong(self, z, *others):
        z.mul_(1.0 + 1e-4)
        right(self, z, *others)

    monkeypatch.setattr(TorchEpilogues, part, wrong)
    assert (
        main(["check", "--quick", "--device", "cpu", "--backend", "torch", "--dtype", "float32", "--filter", "dapo"])
        == 1
    )
    assert "FAIL torch" in capsys.readouterr().out


def test_arguments_that_select_nothing(capsys):
    assert main(["check", "--filter", "no such case"]) == 2
    assert "no such case" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["check", "--device", "cuda"]) == 2
    with pytest.raises(SystemExit):
        main(["check", "--dtype", "int8"])


def test_env_and_version(capsys):
    assert main(["env"]) == 0
    assert "backend auto on cpu" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
