"""What the public functions are given, seen before it is used: in Python anything may come."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from numbers import Integral
from typing import Any

from marlin_convert.errors import UsageError

#: characters of a value in a message
LONGEST = 120


def refuse_odd(
    *,
    places: dict[str, Any] | None = None,
    lists: dict[str, Any] | None = None,
    least: int = 1,
    **sizes: Any,
) -> None:
    """Raise UsageError, naming the parameter, where one of `sizes` is no whole number of at least `least`,
    one of `lists` no list of whole numbers of at least 0, or one of `places` no path. None is left out.
    Numbers may be numpy's: see `plain`. A list may be of any kind that can be gone over again.
    """
    for name, value in sizes.items():
        if value is not None and not _whole(value, least):
            raise UsageError(f"{name} is {shown(value)}; it must be a whole number of at least {least}")
    for name, value in (lists or {}).items():
        numbers = () if value is None else items(value)
        if numbers is None or not all(_whole(each, 0) for each in numbers):
            raise UsageError(f"{name} is {shown(value)}; it must be a list of whole numbers, such as [0, 3]")
    for name, value in (places or {}).items():
        if value is not None and not _is_path(value):
            raise UsageError(f"{name} is {shown(value)}; it must be a path, as text or a Path")


def plain(value: int | None) -> int | None:
    """A number that was seen by `refuse_odd` as Python's own, which every document and message takes."""
    return None if value is None else int(value)


def items(value: object) -> tuple[Any, ...] | None:
    """What is in a list; None for what is none. What can be gone over once alone is none: whoever looks at it
    first would leave nothing to the next.
    """
    if not isinstance(value, Collection) or isinstance(value, (str, bytes, Mapping)):
        return None
    try:
        return tuple(value)
    except TypeError:  # an array of numpy without dimensions
        return None


def shown(value: object) -> str:
    """A value for a message, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no number of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _whole(value: object, least: int) -> bool:
    """Whether it is a whole number, of numpy too, that fits in 64 bits with a sign."""
    fits = isinstance(value, Integral) and not isinstance(value, bool)
    return fits and least <= int(value) < 1 << 63  # type: ignore[call-overload]  # it has


def _is_path(value: object) -> bool:
    if not isinstance(value, (str, os.PathLike)):
        return False
    text = os.fspath(value)
    try:
        return isinstance(text, str) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half a surrogate
        return False
