"""What a file system does not do is done without: the result is the same bytes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import trees
from checkpoints import Checkpoint
from forks import EVERY, Done, Forks
from marlin_convert.errors import MachineError
from marlin_convert.pipeline.run import convert
from marlin_convert.storage.files import advise, sync_folder
from marlin_convert.threads import Workers


def convert_without(forks: Forks, source: Path, out: Path, call: str, error: str) -> Done:
    """Convert where the first two calls of a name fail."""
    fault = {"call": call, "number": EVERY, "action": error}
    fault["then"] = dict(fault)
    return forks.run("convert", source, out, "--tp", 2, "--threads", 2, fault=fault)


@pytest.mark.parametrize("error", ["ENOSYS", "ENOLCK", "EOPNOTSUPP", "EINVAL", "EBADF"])
def test_without_locks_it_is_said_once_and_converted(
    forks: Forks, tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, error: str
) -> None:
    out = tmp_path / "out"
    done = convert_without(forks, tiny.folder, out, "flock", error)
    assert done.code == 0
    assert done.stderr.startswith(f"note: {out} cannot be locked on this file system (")
    assert done.stderr.endswith("): see to it yourself that only one process converts there\n")
    assert len(done.stderr.splitlines()) == 1
    assert trees.tree(out) == trees.tree(tiny_tp2)


@pytest.mark.parametrize("error", ["ENOSYS", "EBADF"])
def test_where_no_folder_can_be_locked_a_file_can(
    forks: Forks, tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, error: str
) -> None:
    out = tmp_path / "out"
    fault = {"call": "flock", "number": 0, "action": error}
    done = forks.run("convert", tiny.folder, out, "--tp", 2, fault=fault)
    assert (done.code, done.stderr) == (0, "")
    assert trees.tree(out) == trees.tree(tiny_tp2)


def test_a_lock_that_fails_otherwise_is_a_failure(forks: Forks, tiny: Checkpoint, tmp_path: Path) -> None:
    done = convert_without(forks, tiny.folder, tmp_path / "out", "flock", "EIO")
    assert done.code == 4
    assert f"locking {tmp_path / 'out'}: Input/output error" in done.stderr


@pytest.mark.parametrize("error", ["EINVAL", "ENOSYS", "EPERM", "EIO", "ESPIPE"])
def test_without_advice_to_the_page_cache(
    forks: Forks, tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, error: str
) -> None:
    done = convert_without(forks, tiny.folder, tmp_path / "out", "posix_fadvise", error)
    assert (done.code, done.stderr) == (0, "")
    assert done.counts["posix_fadvise"] > 0
    assert trees.tree(tmp_path / "out") == trees.tree(tiny_tp2)


@pytest.mark.parametrize("error", ["EOPNOTSUPP", "EINVAL", "ENOSYS"])
def test_without_reserved_space(
    forks: Forks, tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, error: str
) -> None:
    done = convert_without(forks, tiny.folder, tmp_path / "out", "posix_fallocate", error)
    assert (done.code, done.stderr) == (0, "")
    assert trees.tree(tmp_path / "out") == trees.tree(tiny_tp2)


#: a command line, with the error of every fsync of a folder behind it
FOLDERS = """
import errno, os, stat, sys
fsync, number = os.fsync, getattr(errno, sys.argv.pop())
def sync(descriptor):
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        raise OSError(number, os.strerror(number))
    fsync(descriptor)
os.fsync = sync
from marlin_convert.cli import main
main()
"""


def test_where_folders_cannot_be_made_durable(tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path) -> None:
    for error in ("EINVAL", "ENOTSUP"):
        out = tmp_path / error
        command = [sys.executable, "-c", FOLDERS, "convert", str(tiny.folder), str(out), "--tp=2", error]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert trees.tree(out) == trees.tree(tiny_tp2)


def test_a_folder_that_fails_otherwise_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(descriptor: int) -> None:
        assert stat.S_ISDIR(os.fstat(descriptor).st_mode)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)


def test_advice_is_given_where_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: given.append(arguments))
    advise(7, 4096, 8192, "DONTNEED")
    advise(7, 0, 0, "RANDOM")
    assert given == [(7, 4096, 8192, os.POSIX_FADV_DONTNEED), (7, 0, 0, os.POSIX_FADV_RANDOM)]


class Scarce:
    """Lets so many more threads start, of those whose name begins so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prefix: str, count: int) -> None:
        self.left, real = count, threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if thread.name.startswith(prefix):
                if not self.left:
                    raise RuntimeError("can't start new thread")
                self.left -= 1
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)


def test_fewer_threads_than_wanted_convert_all(
    tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Scarce(monkeypatch, "convert-", 2)
    with pytest.warns(UserWarning, match="only 2 of 9 threads could be started, and they go on alone"):
        convert(str(tiny.folder), tmp_path / "out", tp=2, threads=9)
    assert trees.tree(tmp_path / "out") == trees.tree(tiny_tp2)


@pytest.mark.parametrize("prefix", ["convert-", ""])
def test_no_thread_at_all_is_a_failure_of_the_machine(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    Scarce(monkeypatch, prefix, 0)
    with pytest.raises(MachineError, match=r"no thread could be started; raise the limit of processes"):
        convert(str(tiny.folder), tmp_path / "out", tp=2, threads=3)
    monkeypatch.undo()
    convert(str(tiny.folder), tmp_path / "out", tp=2, threads=3)


def test_a_pool_makes_do_with_the_threads_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    Scarce(monkeypatch, "", 1)
    with Workers(8) as workers:
        assert list(workers.map(lambda i: i * i, range(20))) == [i * i for i in range(20)]
        assert len(workers._threads) == 1
    with pytest.raises(MachineError, match="no thread could be started"), Workers(8) as workers:
        workers.submit(print)
