"""doctor: right about the machine it runs on, and about machines it is told of."""

from __future__ import annotations

import importlib.machinery
import json
import os
import resource
import stat
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import torch
from msgspec.structs import replace

from any_document import plain
from marlin_convert import doctor
from marlin_convert.doctor import examine
from marlin_convert.doctor.gpu import advice, find_torch
from marlin_convert.documents.doctor import Answer, Driver, DriverGpu, ProviderReport, Torch, TorchGpu
from marlin_convert.extras import installed
from marlin_convert.storage import disk_rate

SCHEMA = json.loads((Path(__file__).parents[2] / "schemas" / "doctor.schema.json").read_text())
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
NO_TORCH = Torch(None, None, (), "torch is not installed")
H200 = TorchGpu("NVIDIA H200", "9.0", 150 * 10**9, 132)

Command = Callable[..., tuple[int, str, str]]

SMI = """#!/bin/sh
if [ $# -gt 0 ]; then
  echo "NVIDIA H200, 580.159.04, 143771, 9.0"
else
  echo "| Driver Version: 580.159.04     CUDA Version: 13.0  |"
fi
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose driver sees an H200."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(SMI)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


@NO_GPU
def test_without_a_gpu(command: Command, tmp_path: Path) -> None:
    code, said, _ = command("doctor", tmp_path)
    assert code == 0
    last = said.splitlines()[-3:]
    assert last[0].startswith("conversion: yes")
    assert last[1] == "verification: yes"
    assert last[2].startswith(f"kernel check: no: torch {torch.__version__} sees no CUDA GPU")
    assert "sgl_kernel        does not load: " in said
    assert command("doctor", tmp_path, "--kernel")[0] == 4
    assert list(tmp_path.iterdir()) == []


def test_json(command: Command, tmp_path: Path) -> None:
    code, said, _ = command("doctor", tmp_path / "not" / "there", "--json")
    found = json.loads(said)
    jsonschema.validate(found, SCHEMA)
    assert code == 0
    assert found["place"]["probed"] == str(tmp_path)
    assert found["place"]["writable"]
    assert found["packages"]["torch"] == torch.__version__
    assert found["machine"]["python"].endswith(".".join(map(str, sys.version_info[:3])))
    assert len(found["providers"]) == 3


def test_a_place_that_cannot_be_written(command: Command) -> None:
    code, said, _ = command("doctor", "/proc/marlin")
    assert code == 4
    assert "conversion: no: /proc: no file can be made there" in said
    assert "verification: yes" in said


def test_no_direct_io(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk_rate, "open_direct", lambda path, flags: None)
    found = examine(tmp_path)
    assert not found.place.direct_io
    assert found.conversion.ok
    assert "the file system has no direct I/O" in found.conversion.reason


def test_few_open_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    found = examine(tmp_path)
    assert not found.conversion.ok
    assert "ulimit -n 512" in found.conversion.reason
    assert found.verification.ok


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "installed", lambda module: module != "xxhash" and installed(module))
    found = examine(tmp_path)
    for answer in (found.conversion, found.verification, found.kernel):
        assert not answer.ok
        assert "the package xxhash is not installed" in answer.reason


def test_no_place_for_compiled_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = types.SimpleNamespace(
        pack_qweight=types.SimpleNamespace(stats=types.SimpleNamespace(cache_path=None))
    )

    def find(name: str) -> object:
        return fake if name == "marlin_convert.layout.qweight" else importlib.import_module(name)

    # of doctor's own module alone: what it then imports is found as ever
    monkeypatch.setattr(doctor, "importlib", types.SimpleNamespace(import_module=find))
    found = examine(tmp_path)
    assert not found.numba_cache.writable
    assert "NUMBA_CACHE_DIR" in found.numba_cache.reason
    assert found.conversion.ok


def test_torch_is_not_imported_unless_installed() -> None:
    code = (
        "import sys, importlib.util as u; real = u.find_spec;u.find_spec = lambda name, *a: None if name =="
        " 'torch' else real(name, *a);from marlin_convert.cli import run; code = run(['doctor', '--json']);"
        " sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    jsonschema.validate(found, SCHEMA)
    assert found["torch"] == {"version": None, "cuda": None, "gpus": [], "problem": "torch is not installed"}
    assert found["conversion"]["ok"]
    assert not found["kernel"]["ok"]
    assert "torch is not installed" in found["kernel"]["reason"]


def test_a_torch_with_files_missing_is_no_build_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that is left imports as a package without anything in it."""
    left = types.ModuleType("torch")
    left.__spec__ = importlib.machinery.ModuleSpec("torch", None)
    monkeypatch.setitem(sys.modules, "torch", left)
    found = find_torch()
    assert (found.cuda, found.gpus) == (None, ())
    assert found.problem == "torch is broken: files are missing; install it anew"


@NO_GPU
@pytest.mark.usefixtures("smi")
def test_a_driver_but_no_torch_for_it(tmp_path: Path) -> None:
    found = examine(tmp_path)
    assert found.driver == Driver("580.159.04", "13.0", (DriverGpu("NVIDIA H200", 143771, "9.0"),), "")
    jsonschema.validate(plain(found), SCHEMA)
    assert not found.kernel.ok
    if torch.version.cuda is None:
        assert (
            "it is a build without CUDA; in a fresh environment, for CUDA 13: pip install '.[sglang]'"
            in found.kernel.reason
        )


def gpu_machine(monkeypatch: pytest.MonkeyPatch, available: bool, capability: str = "9.0") -> None:
    """A machine with torch for CUDA 13 and a GPU, where a provider loads or not."""
    monkeypatch.setattr(
        doctor,
        "find_torch",
        lambda: Torch("2.13.0+cu130", "13.0", (replace(H200, capability=capability),), ""),
    )
    reason = "" if available else "sglang is not installed"
    provider = ProviderReport("sglang.kernels", available, reason, "x", None)
    monkeypatch.setattr(doctor, "probe", lambda problem: (provider,))
    monkeypatch.setattr(doctor, "find_compiler", lambda: {"nvcc": "/usr/bin/nvcc"})


@pytest.mark.usefixtures("smi")
def test_what_compiles_at_first_use_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu_machine(monkeypatch, True)
    monkeypatch.setattr(doctor, "find_compiler", lambda: {"nvcc": None})
    found = examine(tmp_path).kernel
    assert not found.ok
    assert "compiles the kernel at first use and there is no nvcc" in found.reason
    monkeypatch.setattr(doctor, "run_kernel", lambda: "")
    assert examine(tmp_path, kernel=True).kernel.ok


def test_gpus_that_are_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing to install would help."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = examine(tmp_path)
    assert found.install == ""
    assert found.kernel.reason.endswith("sees no CUDA GPU: CUDA_VISIBLE_DEVICES= hides them; unset it")


def test_nothing_is_said_twice(command: Command, tmp_path: Path) -> None:
    """What torch lacks: with torch, and in the answer."""
    said = command("doctor", tmp_path)[1]
    assert said.count("sees no CUDA GPU") <= 2


@pytest.mark.usefixtures("smi")
def test_with_a_gpu_and_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Command) -> None:
    gpu_machine(monkeypatch, True)
    assert examine(tmp_path).kernel == Answer(True, "sglang.kernels loads; doctor --kernel also runs it")
    monkeypatch.setattr(doctor, "run_kernel", lambda: "")
    code, said, _ = command("doctor", tmp_path, "--kernel")
    assert code == 0
    assert said.splitlines()[-1] == "kernel check: yes: sglang.kernels ran and read every weight back"
    monkeypatch.setattr(doctor, "run_kernel", lambda: "it reads 5 of 9 weights wrongly")
    code, said, _ = command("doctor", tmp_path, "--kernel")
    assert code == 4
    assert (
        said.splitlines()[-1] == "kernel check: no: sglang.kernels loads, but it reads 5 of 9 weights wrongly"
    )


def test_with_a_gpu_that_was_not_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu_machine(monkeypatch, True, "12.0")
    assert "on capability 9.0 only, this is 12.0" in examine(tmp_path).kernel.reason


def test_with_a_gpu_but_no_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu_machine(monkeypatch, False)
    found = examine(tmp_path)
    assert not found.kernel.ok
    assert "sglang.kernels: sglang is not installed" in found.kernel.reason
    assert "in a fresh environment, for CUDA 13: pip install '.[sglang]'" in found.kernel.reason


@pytest.mark.parametrize(
    ("torch_cuda", "driver_cuda", "said"),
    [
        (None, None, ""),
        (
            None,
            "13.0",
            "in a fresh environment, for CUDA 13: pip install '.[sglang]'; it compiles at first use",
        ),
        (None, "12.8", "in a fresh environment, for CUDA 12: pip install '.[sgl-kernel]'"),
        (None, "11.8", "the driver is too old for the kernel's packages: CUDA 12 or newer is needed"),
        ("12.8", "13.0", "in a fresh environment, for CUDA 12: pip install '.[sgl-kernel]'"),
        ("13.0", "13.1", "in a fresh environment, for CUDA 13: pip install '.[sglang]'"),
    ],
)
def test_advice(torch_cuda: str | None, driver_cuda: str | None, said: str) -> None:
    answer = advice(Torch("2.13.0", torch_cuda, (), ""), Driver(None, driver_cuda, (), ""))
    assert answer.startswith(said)
    assert bool(answer) == bool(said)
