"""Standard input, output and error, whatever they are: full, closed before we began, or closed meanwhile."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

import click

from marlin_convert.errors import MachineError
from marlin_convert.words import printable

if TYPE_CHECKING:
    from msgspec import Struct

#: characters of an error that are printed
MAX_LINE = 4000
#: what terminals take for colours
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
#: how a line of Ray begins: (raylet), (autoscaler +5s)
SAYS = re.compile(r"\([a-z]+[^()]*\)")
_as_json = [False]


def occupy() -> None:
    """Where one of them is closed, put a descriptor in its place that nothing can be written to: else the
    next file that is opened, a shard perhaps, would be taken for it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # takes the lowest free number: that of the closed one
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDONLY), mode))


def error_line(error: BaseException) -> str:
    """What an error says, on one line of a bounded length."""
    text = printable(str(error)[:MAX_LINE])
    return text if len(text) < MAX_LINE else text[:MAX_LINE] + "..."


def log_as_json(wanted: bool) -> None:
    """From now on all that is said on stderr is JSON, an object a line, or text again."""
    _as_json[0] = wanted


def json_lines() -> bool:
    """Whether it is JSON."""
    return _as_json[0]


def say(text: str) -> None:
    """A line on stderr. Where that does not work there is no place to say so: what the command does and its
    exit code are more.
    """
    _put(line(text))


def line(text: str) -> str:
    """What is said, without the end of the line."""
    if not json_lines():
        return printable(text, "\n")
    from marlin_convert.documents.log import LogMessage

    return _json_line(LogMessage("message", now(), text))


def fail(text: str, begin: str = "error: ") -> None:
    """Say why the command fails; `begin` is for people."""
    if json_lines():
        from marlin_convert.documents.log import LogError

        say_json(LogError("error", now(), text))
    else:
        _put(printable(begin + text, "\n"))


def say_json(line: Struct) -> None:
    """An object on stderr, in one line."""
    _put(_json_line(line))


def _json_line(line: Struct) -> str:
    from marlin_convert.documents.codec import write

    return write(line).decode()


def now() -> str:
    """The time, for a line of a log."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _put(text: str) -> None:
    try:
        click.echo(text, err=True)
    except (OSError, ValueError):
        _forget(sys.stderr)


class _Aside(io.TextIOBase):
    """In the place of stdout: a line that says who says it becomes a note, once; what follows it is dumps."""

    def __init__(self) -> None:
        self._begun, self._said = "", set[str]()

    def writable(self) -> bool:
        """See `io.TextIOBase`."""
        return True

    def write(self, text: str) -> int:
        """See `io.TextIOBase`."""
        *lines, self._begun = (self._begun + text).split("\n")
        for each in lines:
            plain = COLOURS.sub("", each).strip()
            if SAYS.match(plain) and plain not in self._said:
                self._said.add(plain)
                say(f"note: {plain}")
        return len(text)


@contextmanager
def aside() -> Iterator[None]:
    """Within this block what a library prints on stdout is said on stderr: stdout is for results."""
    with redirect_stdout(_Aside()):
        yield


def print_line(text: str) -> None:
    """A line on stdout. Raises MachineError where it cannot be written; BrokenPipeError where nobody reads
    any more.
    """
    try:
        click.echo(printable(text, "\n"))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise unprinted(error) from error


def unprinted(error: OSError) -> MachineError:
    """What is said of a result that could not be printed."""
    return MachineError(
        f"the result could not be written to standard output: {error.strerror or error}; run the same"
        " command again"
    )


def close(code: int) -> int:
    """Write out what is still held back; returns the exit code. The interpreter would do it later, and end
    with a code of its own where that fails.
    """
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        if code == 0 and isinstance(error, OSError) and error.errno != errno.EPIPE:
            say(f"error: {unprinted(error)}")
            code = MachineError.exit_code
        _forget(sys.stdout)
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        _forget(sys.stderr)
    return code


def _forget(stream: TextIO) -> None:
    """What is held back for a stream, and what comes yet, goes nowhere."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # not a file: a test's, or one that is closed
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
