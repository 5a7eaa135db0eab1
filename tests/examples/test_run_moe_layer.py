"""The example for engine writers runs, agrees with float32, and notices a wrong layout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from checkpoints import Checkpoint
from marlin_convert.errors import UsageError
from marlin_convert.kernels.providers import KernelUnavailableError
from marlin_convert.pipeline.run import convert
from mistakes import plant
from run_moe_layer import main


def run(*arguments: object) -> tuple[int, str]:
    torch.set_num_threads(1)
    done = CliRunner().invoke(main, [*map(str, arguments), "--device", "cpu"])
    return done.exit_code, done.output


@pytest.mark.parametrize("rank", [0, 1])
def test_tensor_parallel(tiny_tp2: Path, rank: int) -> None:
    code, said = run(tiny_tp2, "--rank", rank)
    assert code == 0, said
    assert "language_model.model.layers.1.mlp.experts.w13_weight_packed  I32 [4, 16, 512]" in said
    assert "reference: 9 tokens -> [9, 256], norm " in said
    assert "relative error" in said


def test_expert_parallel(tiny: Checkpoint, tmp_path: Path) -> None:
    convert(str(tiny.folder), tmp_path / "out", tp=2, ep=2, threads=2)
    code, said = run(tmp_path / "out", "--rank", 1, "--layer", 2, "--tokens", 5)
    assert code == 0, said
    assert "[2, 16, 1024]" in said


def test_a_layer_without_experts(tiny_tp2: Path) -> None:
    code, said = run(tiny_tp2, "--layer", 0)
    assert code == 2
    assert "layer 0 has no routed experts here" in said


def test_the_kernel_and_the_inverse_layout_disagree_where_one_is_wrong(
    tiny_tp2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain shard cannot show it, since both sides read the same bytes; a wrong inverse can."""
    out = shutil.copytree(tiny_tp2, tmp_path / "out")
    plant(out, "scales not permuted", 1, 0, 1)
    assert run(out)[0] == 0
    monkeypatch.setattr("run_moe_layer.unpack_scale", lambda scale, group, size_k: scale.T.copy())
    assert run(out)[0] == 1


def test_without_a_kernel_one_sentence_says_what_to_install(
    tiny_tp2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(name: str | None) -> None:
        raise KernelUnavailableError("of many\nlines")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("run_moe_layer.load", none)
    error = CliRunner().invoke(main, [str(tiny_tp2)]).exception
    assert isinstance(error, UsageError)
    assert error.exit_code == 2
    assert str(error).startswith("no package with the kernel loads here: pip install '.[sglang]' for CUDA 13")
    assert "\n" not in str(error)


WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_without_torch_there_is_no_traceback() -> None:
    example = Path(__file__).parents[2] / "examples" / "run_moe_layer.py"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(example)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: this needs torch: pip install '.[torch]', or '.[sglang]' with the kernel\n"
