"""Packages that only some functions need, and the extra that brings each. None is imported here."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from marlin_convert.arguments import shown
from marlin_convert.errors import MachineError, UsageError

#: package -> extra of this project
EXTRAS = {"torch": "torch", "matplotlib": "report", "ray": "ray", "boto3": "s3"}


def installed(module: str) -> bool:
    """Whether a module could be imported; it is not."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def package_version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    # here, since it takes half the time of a start
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def require(package: str) -> None:
    """Raise UsageError, which says what to install, where one of `EXTRAS` is not there."""
    if not installed(package):
        raise UsageError(missing(package))


def require_for_kernel(device: str) -> None:
    """Raise UsageError, which says what brings the kernel and torch, where torch is not there: torch alone
    would not do, but for the kernel's model on the CPU.
    """
    if device == "cpu":
        require("torch")
    elif not installed("torch"):
        raise UsageError(
            "the kernel needs torch and a package that has it: pip install '.[sglang]' for CUDA 13, or"
            " '.[sgl-kernel]' for CUDA 12, in the project's folder; --device cpu, a slow model of it, needs"
            " '.[torch]'"
        )


def need_device(device: Any) -> str:
    """The kind of a torch device, `cpu` or `cuda`, that is there. Raises UsageError for one that no machine
    or not this one has, MachineError where torch sees no GPU at all.
    """
    import torch

    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        wanted = None
    if wanted is None or wanted.type not in ("cpu", "cuda"):
        raise UsageError(f"device is {shown(device)}; it must be cpu, cuda, or cuda:N")
    if wanted.type == "cuda":
        if not torch.cuda.is_available():
            raise MachineError(
                f"torch {torch.__version__} sees no CUDA GPU; run `marlin-convert doctor`, or give the device"
                " cpu"
            )
        if (wanted.index or 0) >= (count := torch.cuda.device_count()):
            raise UsageError(f"there is no {device}: torch sees {count}, the last is cuda:{count - 1}")
    return str(wanted.type)


def missing(package: str) -> str:
    """What to do where one of `EXTRAS` is not there."""
    return f"this needs {package}: pip install '.[{EXTRAS[package]}]' in the project's folder"
