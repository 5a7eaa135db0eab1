"""Options that several verbs have, and how their values are written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from marlin_convert.kernels import TOKENS

F = TypeVar("F", bound=Callable[..., Any])

#: a folder that is there
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
#: no checkpoint has more layers, ranks or experts, and no benchmark more tokens
LARGEST = 1_000_000
LOG_JSON = "--log-json"
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


def size(text: str) -> int:
    """The bytes of `1500M`, `2GiB` or a plain number. Raises BadParameter."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise click.BadParameter(f"{text!r} is not a size; write 2GiB or 1500M")
    return int(float(match[1]) * _UNITS[match[2]])


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of `3`, `0,4` or `1-3,7`, ranges with both ends, in order. Raises BadParameter."""
    if ":" in text:
        raise click.BadParameter(
            f"{text!r}: write {text.replace(':', '-')} for a range with both ends included"
        )
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise click.BadParameter(f"{text!r}: write numbers and ranges such as 0,4 or 1-3")
        if int(match[2] or match[1]) > LARGEST:
            raise click.BadParameter(f"{text!r}: {match[2] or match[1]} is more than there can be")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))


def parallel_options(function: F) -> F:
    """--tp --ep --attn-tp --pp --expert-map --layers --ranks --layout."""
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
                "--attn-tp",
                type=click.IntRange(1),
                help="Slices of attention and dense layers, for data-parallel attention [default: tp].",
            ),
            click.option(
                "--pp",
                type=click.IntRange(1),
                default=1,
                show_default=True,
                help="Pipeline stages that the layers are spread over, each of TP ranks.",
            ),
            click.option(
                "--expert-map",
                metavar="FILE",
                help=(
                    "Place routed experts by the physical_to_logical_map in this JSON file, redundant ones"
                    " too [default: each in the slot of its number]."
                ),
            ),
            click.option(
                "--layers", type=numbers, help="Only these layers, such as 0,3-5 (without top and common)."
            ),
            click.option("--ranks", type=numbers, help="Only these ranks."),
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


def machine_options(function: F) -> F:
    """--threads --memory --direct, of what reads and writes whole checkpoints."""
    for option in reversed(
        (
            click.option(
                "--threads",
                type=click.IntRange(1),
                help="Worker threads [default: usable cores + 1, within the limits of the process].",
            ),
            click.option(
                "--memory",
                type=size,
                help=(
                    "Memory for buffers, such as 2GiB [default: 1.5 GiB, or 128 MiB a thread, within the"
                    " limits]."
                ),
            ),
            click.option(
                "--direct/--no-direct",
                default=True,
                show_default=True,
                help="Read and write past the page cache where the file system can.",
            ),
        )
    ):
        function = option(function)
    return function


def spread_options(function: F) -> F:
    """--shard --engine --ray-address, of what several machines can do."""
    for option in reversed(
        (
            click.option(
                "--shard",
                metavar="I/N",
                help="Do only the share I, from 0, of N that run at the same time or one after the other.",
            ),
            click.option(
                "--engine",
                type=click.Choice(["local", "ray"]),
                default="local",
                show_default=True,
                help="ray: tasks of a Ray cluster do the work, with --threads and --memory of their own.",
            ),
            click.option(
                "--ray-address",
                metavar="ADDR",
                help="The cluster [default: RAY_ADDRESS, else one of this machine alone].",
            ),
        )
    ):
        function = option(function)
    return function


def hub_options(function: F) -> F:
    """--revision --token --cache-dir, for what may be a repository."""
    for option in reversed(
        (
            click.option("--revision", help="Branch, tag or commit of a repository [default: main]."),
            click.option(
                "--token",
                help="Token for private and gated repositories [default: HF_TOKEN, or who is logged in].",
            ),
            click.option("--cache-dir", help="The hub cache to use [default: that of HF_HOME]."),
        )
    ):
        function = option(function)
    return function


def staging_options(function: F) -> F:
    """--local-dir --free-source, for a SOURCE that is a repository."""
    for option in reversed(
        (
            click.option(
                "--local-dir", help="Keep a repository's files in this folder, not in the hub cache."
            ),
            click.option(
                "--free-source",
                is_flag=True,
                help="Stage a repository's files in OUT and remove each once all that needs it is written.",
            ),
        )
    ):
        function = option(function)
    return function


def json_option(function: F) -> F:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")(function)


def kernel_options(function: F) -> F:
    """--tokens --device --provider, of what runs the kernel."""
    for option in reversed(
        (
            click.option(
                "--tokens",
                type=numbers,
                default=",".join(map(str, TOKENS)),
                show_default=True,
                help="Token counts of a call: one; a draft of 8 and one; ten streams of 9; ten of 33.",
            ),
            click.option(
                "--device",
                default="cuda",
                show_default=True,
                help="Where the kernel runs: cpu is a slow model of it, whose times mean nothing.",
            ),
            click.option(
                "--provider", help="Where to take the kernel from; `marlin-convert doctor` lists what loads."
            ),
        )
    ):
        function = option(function)
    return function


def rank_option(what: str) -> Callable[[F], F]:
    """--rank, where one is looked at."""
    return click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help=what)


def rounds_option(default: int, what: str = "Rounds of which the median is taken.") -> Callable[[F], F]:
    """--rounds, of a bench."""
    return click.option("--rounds", type=click.IntRange(1), default=default, show_default=True, help=what)


def log_option(function: F) -> F:
    """--log-json; `cli.run` has looked for it before."""
    return click.option(
        LOG_JSON,
        is_flag=True,
        expose_value=False,
        help="Progress, messages and errors on standard error as JSON, an object a line.",
    )(function)
