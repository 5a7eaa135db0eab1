"""One decorator for all compiled functions: releases the GIL, and keeps the machine code on the disk where
that is possible.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast
from uuid import uuid4

import llvmlite
import numba
import xxhash
from numba.core import serialize
from numba.core.caching import FunctionCache

from marlin_convert.errors import MachineWarning
from marlin_convert.progress import compiling
from marlin_convert.storage.files import read_small

F = TypeVar("F", bound=Callable[..., Any])

#: bytes of the machine code of one function; the largest has some hundred thousand
MAX_CODE = 16 << 20

_said: list[str] = []


def jit(function: F) -> F:
    """Compile `function` with numba, without the GIL and with a disk cache.

    Whatever is wrong with the cache (a read-only image, a full disk, a damaged file), the function is
    compiled anew, which takes seconds and is no error; the first trouble of a process is said.
    """
    compiled: Any = numba.njit(nogil=True)(function)
    try:
        compiled._cache = CodeCache(function)
    except Exception as error:
        _not_kept(f"compiled code cannot be kept: {error}")
    return cast(F, compiled)


def inline(function: F) -> F:
    """Like `jit`, for a small function that other compiled functions call: always inlined by LLVM, cached
    with its caller.
    """
    return cast(F, numba.njit(nogil=True, forceinline=True)(function))


class CodeCache:
    """numba's cache of one function, with files of our own, and in which nothing that goes wrong is an error.

    numba trusts its files: one that was cut off or emptied by a crash is an error in each later run, and one
    with other bytes in it may be anything.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._numba = cast(Any, FunctionCache(function))
        self.cache_path: str = self._numba.cache_path
        named = Path(self.cache_path) / self._numba._impl.filename_base
        self._numba._cache_file = CodeFiles(named, self._numba._impl.locator.get_source_stamp())

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The kept machine code, or None: then numba compiles, and hands the code to `save_overload`."""
        kept = None
        try:
            kept = self._numba.load_overload(signature, target)
        except Exception as error:
            _say(
                f"compiled code kept in {self.cache_path} is of no use ({_reason(error)}): it is made anew,"
                " which takes some seconds"
            )
        if kept is None:
            compiling.tell(begun=True)
        return kept

    def save_overload(self, signature: Any, code: Any) -> None:
        """Keep machine code, if that can be done."""
        compiling.tell(begun=False)
        try:
            self._numba.save_overload(signature, code)
        except Exception as error:
            _not_kept(f"compiled code cannot be kept in {self.cache_path}: {_reason(error)}")


class CodeFiles:
    """A file for each signature of a function: the digest of what follows, of what it was made from and by,
    and the machine code. It appears whole or not at all, so processes do not disturb each other.
    """

    def __init__(self, named: Path, source: Any) -> None:
        self._named = named
        self._made_of = _digest(repr((numba.__version__, llvmlite.__version__, source)).encode())

    def _path(self, key: Any) -> Path:
        """For a signature and a processor."""
        return self._named.with_name(f"{self._named.name}.{_digest(repr(key).encode()).hex()}.code")

    def load(self, key: Any) -> Any:
        """What was saved for this source, or None. Raises ValueError where it is not whole any more."""
        path = self._path(key)
        try:
            kept = read_small(path, MAX_CODE)
        except FileNotFoundError:
            return None
        if len(kept) < 32 or _digest(kept[16:]) != kept[:16]:
            raise ValueError(f"{path.name} is damaged")
        return pickle.loads(kept[32:]) if kept[16:32] == self._made_of else None

    def save(self, key: Any, data: Any) -> None:
        """Save it in place of what is there."""
        path, content = self._path(key), self._made_of + _pickled(data)
        temporary = path.with_name(f"{path.name}.{uuid4().hex}")
        try:
            temporary.write_bytes(_digest(content) + content)
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def _pickled(data: Any) -> bytes:
    return cast(bytes, serialize.dumps(data))


def _digest(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _not_kept(why: str) -> None:
    _say(f"{why}; each run compiles again, which takes some seconds; NUMBA_CACHE_DIR can name another folder")


def _say(what: str) -> None:
    """Say the first trouble of a process; others have the same cause, most likely."""
    if not _said:
        _said.append(what)
        warnings.warn(what, MachineWarning, stacklevel=2)
