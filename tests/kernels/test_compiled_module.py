"""A compiled module that was cut short is named before it is loaded, which would end the process."""

from __future__ import annotations

import re
import shutil
from importlib import import_module
from pathlib import Path

import pytest

from marlin_convert.errors import MachineError
from marlin_convert.kernels.compiled_module import needed_size, refuse_cut_modules

#: a shared object as a linker writes them
WHOLE = Path(str(import_module("numpy._core._multiarray_umath").__file__))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in a cache, whole."""
    monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "sgl_kernel_jit_moe_wna16_marlin_bf16_0__arch_9.0a"
    folder.mkdir()
    return Path(shutil.copy(WHOLE, folder / "sgl_kernel_jit_moe_wna16_marlin_bf16_0.so"))


def test_a_whole_module_is_let_through(module: Path) -> None:
    assert 64 < needed_size(module) <= module.stat().st_size
    refuse_cut_modules()


@pytest.mark.parametrize("left", [0, 40, 64, 4096, 0.5, 0.999])
def test_a_cut_one_is_named(module: Path, left: float) -> None:
    whole = needed_size(module)
    size = int(left if left > 1 or not left else whole * left)
    with module.open("r+b") as file:
        file.truncate(size)
    with pytest.raises(MachineError, match=re.escape(f"{module} has {size} bytes, ")) as caught:
        refuse_cut_modules()
    assert f"remove the folder {module.parent}" in str(caught.value)


def test_other_bytes_are_no_module(module: Path) -> None:
    module.write_bytes(bytes(module.stat().st_size))
    with pytest.raises(MachineError, match="cut short"):
        refuse_cut_modules()


def test_modules_of_others_and_no_cache_are_no_matter(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "somebodys" / "other.so"
    other.parent.mkdir()
    other.write_bytes(b"")
    refuse_cut_modules()
    monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(tmp_path / "none"))
    refuse_cut_modules()
