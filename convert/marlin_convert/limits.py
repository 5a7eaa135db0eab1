"""What this process may use: cores, memory, threads, open files, by the limits of the system, of its control
groups (v1, v2 or both) and of itself. Where nothing can be read, there is no limit.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: what version 1 says where there is no limit is near 2^63
UNLIMITED = 1 << 60
DEFAULT_MEMORY = 1536 << 20
MEMORY_PER_THREAD = 128 << 20
#: enough for any single step of the published checkpoints: with less a conversion does not work
LEAST_MEMORY = 64 << 20
#: bytes that a conversion takes beside its buffers: interpreter, compiling, documents of a large checkpoint
PROGRAM = 384 << 20
#: bytes of address space that it takes beside them, and that each thread takes: a stack and an arena
PROGRAM_SPACE = 1 << 30
THREAD_SPACE = 136 << 20
#: threads beside the workers: small files, downloads, compiling
OTHER_THREADS = 16
#: files that are open beside those of the workers, and those of one worker
OTHER_FILES = 32
FILES_PER_THREAD = 4


@dataclass(frozen=True)
class Limit:
    """How much may be used, and by what that is limited."""

    value: int
    by: str


@dataclass(frozen=True)
class Limits:
    """What this process may use now: cores, bytes of memory, bytes of address space, threads that it may
    still start, files open at once; None where that is not limited.
    """

    cores: Limit
    memory: Limit | None
    space: Limit | None
    threads: Limit | None
    open_files: Limit | None
    #: the tightest limit of a control group, used or not
    group_memory: int | None


@dataclass(frozen=True)
class Allowance:
    """Threads and bytes for buffers that a conversion takes unless it is told, and what decided them."""

    threads: Limit
    memory: Limit


def allow(limits: Limits, threads: int | None = None, ranks: int = 0) -> Allowance:
    """What stays below the limits; of `threads` if that is given. `ranks` is how many files a unit has."""
    if threads is None:
        # one thread more than cores: some of them wait for the disk
        chosen = Limit(limits.cores.value + 1, limits.cores.by)
        if limits.threads is not None:
            chosen = _less(chosen, limits.threads.value - OTHER_THREADS, limits.threads.by)
        if limits.open_files is not None:
            files = limits.open_files.value - OTHER_FILES - 4 * ranks
            chosen = _less(chosen, files // FILES_PER_THREAD, limits.open_files.by)
        if limits.space is not None:
            # as much for their buffers as for the threads themselves
            space = (limits.space.value - PROGRAM_SPACE) // (2 * THREAD_SPACE)
            chosen = _less(chosen, space, limits.space.by)
    else:
        chosen = Limit(int(threads), "--threads")
    memory = Limit(max(DEFAULT_MEMORY, chosen.value * MEMORY_PER_THREAD), "threads")
    if limits.memory is not None:
        # the other half is for the page cache, where reading and writing go through it
        memory = _less(memory, (limits.memory.value - PROGRAM) // 2, limits.memory.by, LEAST_MEMORY)
    if limits.space is not None:
        space = limits.space.value - PROGRAM_SPACE - chosen.value * THREAD_SPACE
        memory = _less(memory, space, limits.space.by, LEAST_MEMORY)
    return Allowance(chosen, memory)


def _less(chosen: Limit, value: int, by: str, least: int = 1) -> Limit:
    """What was chosen, or the `value` that a limit leaves where that is less, and never below `least`."""
    return Limit(max(value, least), by) if value < chosen.value else chosen


def usable_cores() -> int:
    """Cores that this process may use."""
    return read_limits().cores.value


def read_limits(root: Path = Path("/")) -> Limits:
    """Those of this process; `root` is where proc and the control groups are found."""
    groups = _Groups(root)
    cores = [Limit(len(os.sched_getaffinity(0)), "cores"), *groups.cores()]
    memory = [Limit(left, by) for left, by, _ in groups.memory()]
    if (available := _number(root / "proc/meminfo", r"MemAvailable:\s+(\d+) kB")) is not None:
        memory.append(Limit(available << 10, "available memory"))
    memory += _own(
        resource.RLIMIT_DATA, "ulimit -d", _number(root / "proc/self/status", r"VmData:\s+(\d+) kB")
    )
    space = _own(resource.RLIMIT_AS, "ulimit -v", _number(root / "proc/self/status", r"VmSize:\s+(\d+) kB"))
    return Limits(
        cores=_least(cores) or cores[0],
        memory=_least(memory),
        space=_least(space),
        threads=_least(list(groups.threads())),
        open_files=_least(_own(resource.RLIMIT_NOFILE, "ulimit -n", 0)),
        group_memory=min((limit for _, _, limit in groups.memory()), default=None),
    )


def _least(limits: list[Limit]) -> Limit | None:
    return min(limits, key=lambda limit: limit.value, default=None)


def _own(which: int, name: str, used_kb: int | None) -> list[Limit]:
    """What a limit of the process itself leaves."""
    soft, _ = resource.getrlimit(which)
    return [] if soft == resource.RLIM_INFINITY else [Limit(max(soft - ((used_kb or 0) << 10), 0), name)]


def text_of(path: Path) -> str:
    """A file of the system; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(path: Path, pattern: str = r"(\d+)\s*$") -> int | None:
    """The number in a file, None where there is none (such as `max`)."""
    match = re.search(rf"^{pattern}", text_of(path), re.MULTILINE)
    return None if match is None else int(match[1])


class _Groups:
    """The control groups of this process."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._mounts = [_Mount.of(line) for line in text_of(root / "proc/self/mountinfo").splitlines()]
        self._paths: dict[str, str] = {}
        for line in text_of(root / "proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            self._paths |= dict.fromkeys(controllers.split(","), path)

    def _folders(self, controller: str) -> Iterator[Path]:
        """Its group and all above it, as far as they can be seen; version 2 for the controller ""."""
        for mount in self._mounts:
            if mount is None or controller not in mount.controllers or controller not in self._paths:
                continue
            # a path outside what is mounted is of another namespace: what is mounted is ours then
            path, top = Path(self._paths[controller]), self._root / mount.point.lstrip("/")
            visible = path.is_relative_to(mount.root) and ".." not in path.parts
            inside = path.relative_to(mount.root) if visible else Path()
            yield from (top / folder for folder in (inside, *inside.parents))

    def cores(self) -> Iterator[Limit]:
        """Quotas of time, in whole cores and at least one."""
        for folder in self._folders(""):
            if match := re.match(r"(\d+) (\d+)", text_of(folder / "cpu.max")):
                yield _cores(int(match[1]), int(match[2]), self._by(folder / "cpu.max"))
        for folder in self._folders("cpu"):
            quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
            if quota is not None and period:
                yield _cores(quota, period, self._by(folder / "cpu.cfs_quota_us"))

    def memory(self) -> Iterator[tuple[int, str, int]]:
        """Bytes left below each limit, page cache that can be given back not counted; which limit; and it."""
        for folder in self._folders(""):
            for name in ("memory.max", "memory.high"):
                yield from self._memory(folder / name, "memory.current", "")
        for folder in self._folders("memory"):
            yield from self._memory(folder / "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")

    def _memory(self, file: Path, usage: str, prefix: str) -> Iterator[tuple[int, str, int]]:
        if (limit := _number(file)) is not None and limit < UNLIMITED:
            used, stat = _number(file.with_name(usage)) or 0, file.with_name("memory.stat")
            cached = sum(_number(stat, rf"{prefix}{kind}_file (\d+)") or 0 for kind in ("active", "inactive"))
            yield max(limit - max(used - cached, 0), 0), self._by(file), limit

    def threads(self) -> Iterator[Limit]:
        """Threads that may still be started."""
        for controller in ("", "pids"):
            for folder in self._folders(controller):
                if (limit := _number(folder / "pids.max")) is not None:
                    used = _number(folder / "pids.current") or 0
                    yield Limit(max(limit - used, 0), self._by(folder / "pids.max"))

    def _by(self, file: Path) -> str:
        return f"/{file.relative_to(self._root)}"


def _cores(quota: int, period: int, by: str) -> Limit:
    return Limit(max(-(-quota // period), 1), by)


@dataclass(frozen=True)
class _Mount:
    """Where control groups are mounted: from which group on, where, and for which controllers."""

    root: str
    point: str
    controllers: tuple[str, ...]

    @staticmethod
    def of(line: str) -> _Mount | None:
        """A line of mountinfo, if it is one of control groups."""
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            return None
        controllers = ("",) if kind[0] == "cgroup2" else tuple(kind[2].split(","))
        return _Mount(fields[3], fields[4].replace("\\040", " "), controllers)
