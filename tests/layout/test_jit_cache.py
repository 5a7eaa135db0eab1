"""Where nothing can be cached, functions are compiled anew: slower, and no error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

import marlin_convert
from marlin_convert.layout.jit import jit

CHILD = """
import marlin_convert.layout.scales as scales, numpy as np
from marlin_convert.layout.rows import RowView
out = np.zeros(64, np.uint16)
source = RowView.of(np.arange(64, dtype=np.uint16).reshape(64, 1))
scales.pack_scales(source, RowView.of(out.reshape(1, 64)), scales.GROUPED)
print(scales.__file__, type(scales.pack_scales._cache).__name__, out[:9].tolist(), sep="|")
"""


def run_child(folder: Path, **environment: str) -> list[str]:
    clean = {
        key: value for key, value in os.environ.items() if key not in ("NUMBA_CACHE_DIR", "NUMBA_DISABLE_JIT")
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env=clean | {"PYTHONPATH": str(folder)} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    file, kind, values = done.stdout.strip().split("|")
    assert Path(file).is_relative_to(folder)
    return [kind, values]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    """As in a read-only image; here files lie where the cache folders would be, which stops the superuser
    too.
    """
    shutil.copytree(
        Path(marlin_convert.__file__).parent,
        tmp_path / "marlin_convert",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (tmp_path / "marlin_convert/layout/__pycache__").write_text("not a folder")
    (tmp_path / "file").write_text("not a folder")
    nowhere = str(tmp_path / "file" / "cache")
    expected = str([0, 8, 16, 24, 32, 40, 48, 56, 1])
    everywhere = dict.fromkeys(("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"), nowhere)
    assert run_child(tmp_path, **everywhere) == ["NullCache", expected]
    assert run_child(tmp_path, **(everywhere | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")})) == [
        "FunctionCache",
        expected,
    ]


def test_other_errors_than_the_caches_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**options: object) -> object:
        raise TypeError("not the cache")

    monkeypatch.setattr(numba, "njit", broken)
    with pytest.raises(TypeError, match="not the cache"):
        jit(lambda: None)


def test_a_compiled_function_gives_the_lock_back() -> None:
    function: Any = jit(lambda n: n + np.uint64(1))
    assert function.targetoptions["nogil"] is True
    assert function(np.uint64(1)) == 2
