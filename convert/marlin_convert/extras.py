"""Packages that only some functions need, and the extra that brings each. None is imported here."""

from __future__ import annotations

from importlib.util import find_spec

from marlin_convert.errors import UsageError

#: package -> extra of this project
EXTRAS = {"torch": "torch", "matplotlib": "report"}


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


def missing(package: str) -> str:
    """What to do where one of `EXTRAS` is not there."""
    return f"this needs {package}: pip install '.[{EXTRAS[package]}]' in the project's folder"
