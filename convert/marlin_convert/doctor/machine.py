"""Processor, memory and limits of this machine. What cannot be told is None."""

from __future__ import annotations

import os
import platform
import re
import resource
from pathlib import Path

from marlin_convert.documents.doctor import Machine


def find_machine() -> Machine:
    """This one."""
    memory, available = _memory()
    soft, hard = open_files()
    return Machine(
        cpu=_cpu(),
        architecture=platform.machine(),
        cores=os.cpu_count(),
        usable_cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory,
        available_bytes=available,
        memory_limit_bytes=_memory_limit(),
        open_files=soft,
        open_files_hard=hard,
        system=f"{platform.system()} {platform.release()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
    )


def open_files() -> tuple[int | None, int | None]:
    """How many files a process may have open, and how far it may raise that; None for any number."""
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return soft, hard


def text_of(path: str) -> str:
    """A file of /proc or /sys; empty where it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _cpu() -> str:
    for key in ("model name", "Hardware", "CPU part"):
        if match := re.search(rf"^{key}\s*:\s*(.+)$", text_of("/proc/cpuinfo"), re.MULTILINE):
            return match[1].strip()
    return platform.processor() or platform.machine()


def _memory() -> tuple[int | None, int | None]:
    """All and available, in bytes."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text_of("/proc/meminfo"), re.MULTILINE)
    values = {name: int(size) * 1024 for name, size in found}
    return values.get("MemTotal"), values.get("MemAvailable")


def _memory_limit() -> int | None:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = text_of(name).strip()
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None
