"""Options that several verbs have, and how their values are written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

#: no checkpoint has more layers, ranks or experts, and no benchmark more tokens
LARGEST = 1_000_000
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


# click 8.5 has these types generic; whether the oldest that pyproject allows has, was not tried, so no
# argument is given
class Size(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """`1500M`, `2GiB` or plain bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", str(value).strip().lower())
        if match is None or match[2] not in _UNITS:
            self.fail(f"{value!r} is not a size; write 2GiB or 1500M", param, ctx)
        return int(float(match[1]) * _UNITS[match[2]])


# as above
class Numbers(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """`3`, `0,4` or `1-3,7`: numbers and ranges, both ends included."""

    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The numbers, in order."""
        if isinstance(value, tuple):
            return value
        if ":" in str(value):
            self.fail(
                f"{value!r}: write {str(value).replace(':', '-')} for a range with both ends included",
                param,
                ctx,
            )
        numbers: set[int] = set()
        for part in str(value).split(","):
            match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
            if match is None or (match[2] and int(match[2]) < int(match[1])):
                self.fail(f"{value!r}: write numbers and ranges such as 0,4 or 1-3", param, ctx)
            if int(match[2] or match[1]) > LARGEST:
                self.fail(f"{value!r}: {match[2] or match[1]} is more than there can be", param, ctx)
            numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
        return tuple(sorted(numbers))


def parallel_options(function: F) -> F:
    """--tp --ep --layers --ranks --layout."""
    for option in reversed(
        (
            click.option(
                "--tp", type=click.IntRange(1), required=True, help="Number of ranks (GPUs) in all."
            ),
            click.option(
                "--ep",
                type=click.IntRange(1),
                default=1,
                show_default=True,
                help="Groups the routed experts are split over; divides tp.",
            ),
            click.option(
                "--layers", type=Numbers(), help="Only these layers, such as 0,3-5 (without top and common)."
            ),
            click.option("--ranks", type=Numbers(), help="Only these ranks."),
            click.option(
                "--layout",
                help=(
                    "How the routed experts are stored [default: moe_wna16_marlin.u4b8, for the Marlin MoE"
                    " kernel]."
                ),
            ),
        )
    ):
        function = option(function)
    return function


def hub_options(function: F) -> F:
    """--revision --token --cache-dir, for a SOURCE that is a repository."""
    for option in reversed(
        (
            click.option("--revision", help="Of a repository: branch, tag or commit [default: main]."),
            click.option(
                "--token",
                help="Token for private and gated repositories [default: HF_TOKEN, or who is logged in].",
            ),
            click.option("--cache-dir", help="The hub cache to use [default: that of HF_HOME]."),
        )
    ):
        function = option(function)
    return function


def json_option(function: F) -> F:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")(function)


def gigabytes(size: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return ""
