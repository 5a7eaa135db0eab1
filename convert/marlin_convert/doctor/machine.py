"""Processor, memory and limits of this machine. What cannot be told is None."""

from __future__ import annotations

import os
import platform
import re
import resource
from pathlib import Path

from marlin_convert.documents.doctor import Machine
from marlin_convert.limits import read_limits, text_of


def find_machine() -> Machine:
    """This one."""
    memory, available = _memory()
    limits = read_limits()
    soft, hard = open_files()
    return Machine(
        cpu=_cpu(),
        architecture=platform.machine(),
        cores=os.cpu_count(),
        usable_cores=limits.cores.value,
        memory_bytes=memory,
        available_bytes=available,
        memory_limit_bytes=limits.group_memory,
        usable_bytes=None if limits.memory is None else limits.memory.value,
        usable_by=None if limits.memory is None else limits.memory.by,
        threads_left=None if limits.threads is None else limits.threads.value,
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


def _cpu() -> str:
    for key in ("model name", "Hardware", "CPU part"):
        if match := re.search(rf"^{key}\s*:\s*(.+)$", text_of(Path("/proc/cpuinfo")), re.MULTILINE):
            return match[1].strip()
    return platform.processor() or platform.machine()


def _memory() -> tuple[int | None, int | None]:
    """All and available, in bytes."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text_of(Path("/proc/meminfo")), re.MULTILINE)
    values = {name: int(size) * 1024 for name, size in found}
    return values.get("MemTotal"), values.get("MemAvailable")
