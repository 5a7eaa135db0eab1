"""Whatever is wrong with the cache of compiled code, functions are compiled anew: slower, and no error."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

import marlin_convert
import trees
from checkpoints import Checkpoint
from marlin_convert.errors import MachineWarning
from marlin_convert.layout import jit as jit_module
from marlin_convert.layout.jit import CodeFiles, jit

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
        "CodeCache",
        expected,
    ]


@pytest.fixture(scope="module")
def full_cache(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with all that a small conversion compiles. Not to be changed."""
    folder = tmp_path_factory.mktemp("cache")
    done = convert_with(folder, tiny, tmp_path_factory.mktemp("filled") / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(kept(folder)) >= 4
    return folder


def kept(folder: Path) -> list[Path]:
    """The files of a cache."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def convert_with(cache: Path, source: Checkpoint, out: Path) -> subprocess.CompletedProcess[str]:
    """A conversion with a cache folder of its own."""
    command = [sys.executable, "-m", "marlin_convert", "convert", str(source.folder), str(out), "--tp", "2"]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
    environment.pop("NUMBA_DISABLE_JIT", None)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def assert_one_note(stderr: str, *said: str) -> None:
    """One line, which says this."""
    assert len(stderr.splitlines()) == 1
    assert stderr.startswith("note: compiled code ")
    for part in said:
        assert part in stderr


def test_what_was_compiled_is_not_compiled_again(full_cache: Path, tiny: Checkpoint, tmp_path: Path) -> None:
    before = {path: path.stat().st_ino for path in kept(full_cache)}
    done = convert_with(full_cache, tiny, tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert {path: path.stat().st_ino for path in kept(full_cache)} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: content[:20], id="cut in its head"),
        pytest.param(lambda content: content[: len(content) // 2], id="cut"),
        pytest.param(lambda content: bytes(range(256)) * 256, id="something else"),
        pytest.param(lambda content: content[:-300] + b"\0" * 300, id="zeros at the end"),
        pytest.param(lambda content: content[:9000] + b"?" + content[9001:], id="one byte"),
    ],
)
def test_damaged_code_is_made_anew_and_mended(
    full_cache: Path, tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    cache = Path(shutil.copytree(full_cache, tmp_path / "cache"))
    whole = kept(cache)
    for path in whole:
        path.write_bytes(damage(path.read_bytes()))
    done = convert_with(cache, tiny, tmp_path / "out")
    assert done.returncode == 0
    assert_one_note(done.stderr, f"kept in {cache}", "is damaged): it is made anew")
    assert trees.tree(tmp_path / "out") == trees.tree(tiny_tp2)
    assert kept(cache) == whole
    done = convert_with(cache, tiny, tmp_path / "again")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_folder_in_the_place_of_code(
    full_cache: Path, tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path
) -> None:
    cache = Path(shutil.copytree(full_cache, tmp_path / "cache"))
    for path in kept(cache):
        path.unlink()
        path.mkdir()
    done = convert_with(cache, tiny, tmp_path / "out")
    assert done.returncode == 0
    assert_one_note(done.stderr, "Is a directory")
    assert trees.tree(tmp_path / "out") == trees.tree(tiny_tp2)


def test_code_of_another_source_is_not_used_and_replaced(tmp_path: Path) -> None:
    old, new = CodeFiles(tmp_path / "f", "old source"), CodeFiles(tmp_path / "f", "new source")
    old.save(("key",), 1)
    assert (old.load(("key",)), new.load(("key",)), old.load(("other",))) == (1, None, None)
    new.save(("key",), 2)
    assert (old.load(("key",)), new.load(("key",))) == (None, 2)
    assert len(kept(tmp_path)) == 1


def test_a_pipe_in_place_of_kept_code_is_not_waited_for(tmp_path: Path) -> None:
    files = CodeFiles(tmp_path / "f", "source")
    files.save(("key",), 1)
    (path,) = kept(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="it is not a regular file"):
        files.load(("key",))
    files.save(("key",), 2)
    assert files.load(("key",)) == 2


def test_code_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    files = CodeFiles(tmp_path / "f", "source")
    files.save(("key",), 1)
    os.truncate(kept(tmp_path)[0], 1 << 40)
    with pytest.raises(OSError, match=f"it has {1 << 40} bytes, at most {jit_module.MAX_CODE} are expected"):
        files.load(("key",))


@pytest.fixture
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has said nothing yet."""
    monkeypatch.setattr(jit_module, "_said", [])


@pytest.mark.usefixtures("unsaid")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_code_that_cannot_be_kept_is_said_once(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fails(self: Path, data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", fails)
    first: Any = jit(lambda n: n + np.uint64(1))
    second: Any = jit(lambda n: n + np.uint64(2))
    with pytest.warns(MachineWarning) as said:
        assert (first(np.uint64(1)), second(np.uint64(1))) == (2, 3)
    assert len(said) == 1
    assert os.strerror(number) in str(said[0].message)
    assert "NUMBA_CACHE_DIR can name another folder" in str(said[0].message)


@pytest.mark.usefixtures("unsaid")
@pytest.mark.parametrize("error", [pickle.PicklingError("no"), MemoryError(), EOFError(), TypeError("no")])
def test_neither_are_code_and_pickles_at_odds(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(*arguments: object) -> bytes:
        raise error

    monkeypatch.setattr(jit_module, "_pickled", fails)
    compiled: Any = jit(lambda n: n + np.uint64(3))
    with pytest.warns(MachineWarning, match="compiled code cannot be kept in .*: (no|MemoryError|EOFError)"):
        assert compiled(np.uint64(1)) == 4


@pytest.mark.usefixtures("unsaid")
def test_code_that_cannot_be_unpickled_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(content: bytes) -> object:
        raise AttributeError("Can't get attribute 'gone'")

    def function(n: Any) -> Any:
        return n + np.uint64(4)

    first: Any = jit(function)
    assert first(np.uint64(1)) == 5
    monkeypatch.setattr(pickle, "loads", fails)
    second: Any = jit(function)
    with pytest.warns(MachineWarning, match=r"is of no use \(Can't get attribute 'gone'\): it is made anew"):
        assert second(np.uint64(1)) == 5


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
