"""What ran: packages and the machine, for reports."""

from __future__ import annotations

from marlin_convert.doctor.machine import find_machine
from marlin_convert.extras import package_version
from marlin_convert.words import gigabytes

PACKAGES = ("marlin-convert", "numpy", "numba", "safetensors", "xxhash")


def describe() -> dict[str, str | None]:
    """Names and values; None for a package that is not installed."""
    machine = find_machine()
    found: dict[str, str | None] = {package: package_version(package) for package in PACKAGES}
    memory = "unknown" if machine.memory_bytes is None else gigabytes(machine.memory_bytes)
    return found | {
        "python": machine.python,
        "system": f"{machine.system}, {machine.architecture}",
        "processor": f"{machine.cpu}, {machine.usable_cores or machine.cores} cores",
        "memory": memory,
    }
