"""What the public functions are given, seen before it is used: in Python anything may come."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from marlin_convert.errors import UsageError


def refuse_odd(
    *,
    places: dict[str, Any] | None = None,
    lists: dict[str, Any] | None = None,
    least: int = 1,
    **sizes: Any,
) -> None:
    """Raise UsageError, naming the parameter, where one of `sizes` is no whole number of at least `least`,
    one of `lists` no list of whole numbers of at least 0, or one of `places` no path. None is left out.
    """
    for name, value in sizes.items():
        if value is not None and not _whole(value, least):
            raise UsageError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    for name, value in (lists or {}).items():
        fits = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
        if value is not None and not (fits and all(_whole(each, 0) for each in value)):
            raise UsageError(f"{name} is {value!r}; it must be a list of whole numbers, such as [0, 3]")
    for name, value in (places or {}).items():
        if value is not None and not _is_path(value):
            raise UsageError(f"{name} is {value!r}; it must be a path, as text or a Path")


def _whole(value: Any, least: int) -> bool:
    """Whether it is a whole number, of numpy too."""
    return hasattr(value, "__index__") and not isinstance(value, bool) and int(value) >= least


def _is_path(value: object) -> bool:
    return isinstance(value, (str, os.PathLike)) and isinstance(os.fspath(value), str)
