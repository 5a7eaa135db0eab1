"""Who may write in OUT: one run alone, or several that make a share each.

Two locks, since neither does everything. That of the folder itself cannot go stale and needs nothing written,
but a network file system keeps the locks of folders to one machine. That of a file in OUT/.work holds for all
machines on NFS, and on Lustre where it is mounted with `flock`: their clients ask the server.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from marlin_convert.documents.records import LOCK, TURN, WORK
from marlin_convert.errors import MachineError, MachineWarning
from marlin_convert.storage.files import UNSUPPORTED, machine_error, make_folder

#: how file systems say that they lock nothing, or no folders
NO_LOCKS = UNSUPPORTED | {errno.ENOLCK, errno.EBADF, errno.EISDIR}
#: how they say that a file cannot be made
NO_FILES = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
#: seconds for which the turn of another process is waited for, and between two looks
TURN_ENDS, LOOK = 1800.0, 0.2


class State(Enum):
    """What came of a lock that was asked for."""

    HELD = "held"
    BUSY = "another process has it"
    NONE = "the file system has no such lock"


@dataclass(frozen=True)
class Lock:
    """One that was asked for; to be closed."""

    state: State
    descriptor: int | None = None
    why: str = ""

    def close(self) -> None:
        """Let it go."""
        if self.descriptor is not None:
            os.close(self.descriptor)


@contextmanager
def locked(out: Path, shared: bool = False) -> Iterator[None]:
    """Hold OUT for this process, or, `shared`, for one of several that make a share each. Raises MachineError
    where another one holds it in another way.

    On a file system that has no locks it is done without, which is said.
    """
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    folder = _lock(os.open(out, os.O_RDONLY | os.O_DIRECTORY), out, how)
    file = Lock(State.NONE)
    try:
        if folder.state is not State.BUSY:
            file = _lock_file(out, LOCK, how)
        if State.BUSY in (folder.state, file.state):
            raise MachineError(f"{out} is being written by another process; wait for it, or stop it")
        if folder.state is file.state is State.NONE:
            warnings.warn(
                f"{out} cannot be locked on this file system ({folder.why}): see to it yourself that only one"
                " process converts there",
                MachineWarning,
                stacklevel=2,
            )
        yield
    finally:
        if file.state is State.HELD and not shared:
            _remove(out)
        file.close()
        folder.close()


@contextmanager
def turn(out: Path) -> Iterator[None]:
    """Of the processes that hold OUT together, be the only one for a moment. Raises MachineError where
    another one does not end its own.
    """
    begin = time.monotonic()
    while (lock := _lock_file(out, TURN, fcntl.LOCK_EX)).state is State.BUSY:
        lock.close()
        if time.monotonic() - begin > TURN_ENDS:
            raise MachineError(
                f"another process has been holding {out / WORK / TURN} for half an hour; see whether it still"
                " runs, then run the same command again"
            )
        time.sleep(LOOK)
    try:
        yield
    finally:
        lock.close()


def _lock(descriptor: int, path: Path, how: int) -> Lock:
    """Ask for a lock on what is open. Raises MachineError."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock(State.BUSY, descriptor)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return Lock(State.NONE, descriptor, str(error.strerror))
        os.close(descriptor)
        raise machine_error(f"locking {path}", error) from error
    return Lock(State.HELD, descriptor)


def _lock_file(out: Path, name: str, how: int) -> Lock:
    """Ask for the lock of a file in the work folder, which is made for it; none where that cannot be, since
    nothing else could be written either. Raises MachineError, and UsageError where the work folder is none.
    """
    path = out / WORK / name
    while True:
        try:
            make_folder(out / WORK)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            continue  # who has had it before has just removed the folder
        except OSError as error:
            if error.errno in NO_FILES:
                return Lock(State.NONE, why=str(error.strerror))
            raise machine_error(f"locking {path}", error) from error
        lock = _lock(descriptor, path, how)
        if lock.state is not State.HELD or _is_still(descriptor, path):
            return lock
        lock.close()  # it was removed while this process asked for it


def _is_still(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _remove(out: Path) -> None:
    """Leave no lock behind, and no work folder that was made for it alone."""
    with suppress(OSError):
        (out / WORK / LOCK).unlink()
        (out / WORK).rmdir()
