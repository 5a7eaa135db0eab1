"""Values of config.json: each is checked against bounds far beyond any
model, so that later code need not check it."""

from __future__ import annotations

import math
from typing import Any

from marlin_convert.errors import SourceError

#: objects in objects
MAX_DEPTH = 32
#: any size; layers, of which each is a unit of work; experts of a layer; anything with a fraction
MAX_SIZE, MAX_LAYERS, MAX_EXPERTS, MAX_RATIO = 1 << 24, 4096, 1 << 16, 1e6


def number(
    section: dict[str, Any],
    key: str,
    default: int | None = None,
    *,
    least: int = 0,
    most: int = MAX_SIZE,
    within: str = "",
) -> int:
    """A size of a section of config.json, which lies `within` the one of that name; `default` where it is not
    there or null. Raises SourceError for anything else than a whole number from `least` to `most`.
    """
    named = f"{within}.{key}" if within else key
    value = section.get(key, default)
    if value is None and default is not None:
        value = default
    if type(value) is not int or value < 0:
        raise SourceError(f"config.json: {named} should be a whole number, found {shown(value)}")
    if not least <= value <= most:
        raise SourceError(f"config.json: {named} is {shown(value)}, expected {least} to {most}")
    return value


def shown(value: object) -> str:
    """A value for a message, however long it is."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def refuse_odd_values(config: dict[str, Any]) -> None:
    """Raise SourceError for what other readers of the same JSON would not take or read differently: numbers
    that are not finite or have more than 64 bits, text that cannot be written, endless nesting.
    """
    left: list[tuple[str, Any, int]] = [("", config, 0)]
    while left:
        key, value, depth = left.pop()
        if depth > MAX_DEPTH:
            raise SourceError(f"config.json: it is nested more than {MAX_DEPTH} deep")
        if isinstance(value, dict):
            left += [(str(inner), each, depth + 1) for inner, each in value.items()]
            left += [(key, inner, depth + 1) for inner in value]
        elif isinstance(value, list):
            left += [(key, each, depth + 1) for each in value]
        elif isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise SourceError(f"config.json: {shown(key)} has text that is no Unicode") from None
        elif isinstance(value, float) and not math.isfinite(value):
            raise SourceError(f"config.json: {key} is {value}, which is no number")
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise SourceError(f"config.json: {key} is {shown(value)}, beyond 64 bits with a sign")
