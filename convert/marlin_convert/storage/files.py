"""Small file operations that must not be half done, and digests."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from marlin_convert.errors import ConvertError, MachineError, UsageError

if TYPE_CHECKING:
    import numpy.typing as npt

    Buffer = bytes | memoryview | npt.NDArray[Any]

PAGE = 4096
#: stream files in pieces of this size
CHUNK = 8 << 20
#: errors that tell what a path is; any other is the machine's
OF_THE_PATH = frozenset(
    (
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENXIO,
        errno.EACCES,
        errno.EPERM,
        errno.EINVAL,
        errno.EFBIG,
    )
)
#: how file systems say that they do not do what was asked
UNSUPPORTED = frozenset((errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP))


def digest(data: Buffer) -> bytes:
    """xxh3-128 of contiguous bytes, 16 bytes, most significant first."""
    return xxhash.xxh3_128_digest(data if isinstance(data, (bytes, memoryview)) else data.data)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Of what fails while a file is read, an OSError that tells what the path is passes: what that means the
    caller knows. Any other is raised as MachineError: a file is not wrong because a disk fails under it.
    """
    try:
        yield
    except OSError as error:
        if error.errno in OF_THE_PATH:
            raise
        raise machine_error(f"reading {path}", error) from error


def open_regular(path: Path, flags: int = 0) -> int:
    """A descriptor to read a regular file. Raises OSError for anything else: opening a pipe must not wait;
    MachineError.
    """
    with reading(path):
        return _open_regular(path, flags)


def _open_regular(path: Path, flags: int) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def read_small(path: Path, most: int) -> bytes:
    """A file whole. Raises OSError for one that is longer than `most` bytes, of which nothing is read; that
    is no regular file; MachineError where it cannot be read or does not bring as many bytes as it has.
    """
    with reading(path), os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, at most {most} are expected", str(path))
        data = file.read(size + 1)
        if len(data) != size:
            raise OSError(errno.EIO, f"it brought {len(data)} bytes of {size}", str(path))
    return data


def file_digest(path: Path, most: int) -> tuple[int, str]:
    """Size and xxh3-128 (hex) of a file; no digest of one longer than `most` bytes. Raises OSError where it
    is no regular file, MachineError where it cannot be read.
    """
    hasher, size = xxhash.xxh3_128(), 0
    with reading(path), os.fdopen(open_regular(path), "rb") as file:
        if (whole := os.fstat(file.fileno()).st_size) > most:
            return whole, f"not taken of more than {most} bytes"
        while piece := file.read(CHUNK):
            hasher.update(piece)
            size += len(piece)
    return size, hasher.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. On a file system that cannot be asked to, they become so when it
    sees fit.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def existing(place: Path) -> Path:
    """The folder that `place` is, or would be made in."""
    place = place.absolute()
    while not place.exists():
        place = place.parent
    return place


def free_space(place: Path) -> int:
    """Bytes free where `place` is or would be made."""
    import shutil  # here, since it loads what packs archives

    return shutil.disk_usage(existing(place)).free


def make_path(folder: Path) -> None:
    """Make a folder and those above it, unless they are there, durably. Raises OSError."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in made:
        with suppress(PermissionError):  # a folder that may be written to and not be read
            sync_folder(each.parent)


def make_folder(folder: Path) -> None:
    """Make a folder, unless it is there. Raises UsageError as `refuse_in_place_of` does."""
    try:
        folder.mkdir()
    except FileExistsError:
        refuse_in_place_of(folder)


def refuse_in_place_of(folder: Path) -> None:
    """Raise UsageError where a link or something else stands in the place of a folder of ours: what is
    written under its name must not land elsewhere, nor where no file can be moved to.
    """
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        what = f"is {'a link' if folder.is_symlink() else 'no folder'}; move it away"
    elif on_its_own(folder):
        what = "is on another file system than the folder that it is in; unmount it"
    else:
        return
    raise UsageError(f"{folder} {what}, then run the same command again")


def on_its_own(folder: Path) -> bool:
    """Whether a folder is on another file system than the one that it is in: no name can be moved to it, and
    it cannot be removed.
    """
    return folder.lstat().st_dev != folder.parent.stat().st_dev


def write_new(path: Path, data: bytes) -> None:
    """Write a file that is durable under a name nobody looks for; what a broken run left under it is
    replaced.
    """
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        write_all(descriptor, memoryview(data), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes, temporary: Path | None = None) -> None:
    """Write a file so that it is either there whole, durably, or not at all; through no link. `temporary` is
    its name until it is whole, on the same file system.
    """
    temporary = temporary or path.with_name(path.name + ".partial")
    try:
        write_new(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_documents(folder: Path, files: Mapping[str, bytes], work: Path) -> None:
    """Write files below `folder`, each of which appears whole or not at all, whatever stood there. They are
    made in `work`, on the same file system, and get their names when all of them are on the disk.
    """
    make_folder(work)
    for number, data in enumerate(files.values()):
        write_new(work / str(number), data)
    folders = {folder}
    for number, name in enumerate(files):
        parent = folder
        for part in Path(name).parts[:-1]:
            parent /= part
            make_folder(parent)
            folders.add(parent)
        os.replace(work / str(number), folder / name)
    for each in sorted(folders, reverse=True):
        sync_folder(each)


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """pwrite all of `data`."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        if written <= 0:
            raise OSError(errno.EIO, "a write wrote nothing")
        data, offset = data[written:], offset + written


@contextmanager
def machine_errors(what: str) -> Iterator[None]:
    """Turn an OSError into a MachineError that says what was being done and what to do next; not the
    InterruptedError by which work breaks off that nobody needs any more.
    """
    try:
        yield
    except InterruptedError:
        raise
    except OSError as error:
        raise machine_error(what, error) from error


def machine_error(what: str, error: OSError) -> ConvertError:
    """The MachineError of an OSError."""
    place = error.filename2 or error.filename or "the folder that is in the place of a file"
    advice = {
        errno.ENOSPC: "free some space",
        errno.EDQUOT: "free some of your quota",
        errno.EACCES: "check the permissions",
        errno.EPERM: "check the permissions",
        errno.EROFS: "choose a place that can be written",
        errno.EMFILE: "raise the limit of open files (ulimit -n) or give fewer --threads",
        errno.ENOMEM: "give a smaller --memory or fewer --threads",
        errno.EISDIR: f"move {place} away",
    }.get(error.errno or 0, "check the disk")
    return MachineError(f"{what}: {error.strerror or error}; {advice}, then run the same command again")


def open_direct(path: Path, flags: int) -> int | None:
    """A descriptor that goes past the page cache, or None where the file system has no such thing."""
    direct = getattr(os, "O_DIRECT", 0)
    if not direct:
        return None
    try:
        return _open_regular(path, flags | direct)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return None
        raise


def advise(descriptor: int, offset: int, length: int, advice: str) -> None:
    """Tell the system how a file is used; `advice` is the end of a name `os.POSIX_FADV_...`. A hint: where it
    is not taken, for whatever reason, nothing but time is lost.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, offset, length, getattr(os, f"POSIX_FADV_{advice}"))


def drop_cache(descriptor: int, offset: int, length: int) -> None:
    """Give page cache back that will not be needed again (whole pages only)."""
    advise(descriptor, offset, length, "DONTNEED")


@cache
def lies_in_memory(device: int) -> bool:
    """Whether the mounted file system with this st_dev is one in memory; False where that cannot be told."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[2] == wanted:
                return fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
    except (OSError, ValueError, IndexError):
        pass
    return False
