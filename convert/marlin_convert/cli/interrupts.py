"""Signals that end a run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from marlin_convert.cli import streams

#: signals after which nothing is waited for any more, and seconds after the first one
IMPATIENT = 3
PATIENCE = 60


class Terminated(KeyboardInterrupt):
    """SIGTERM: unwinds like Ctrl-C, with an exit code of its own."""


class Interrupts:
    """SIGINT and SIGTERM. The first one raises, and what is half-made is removed while that unwinds. A second
    one, of either kind, must not break into that. A third ends the process at once, as a kill would, and so
    does time: the next run continues all the same.
    """

    def __init__(self) -> None:
        self._code = 0
        self._signals = 0

    def install(self) -> None:
        """Handle both from now on; Ctrl-C not where the caller had it ignored (nohup, a shell's
        background).
        """
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._receive)
        sys.unraisablehook = self._end_where_it_is_ignored
        signal.signal(signal.SIGTERM, self._receive)  # last: who sees it handled may send either

    def ignore(self) -> None:
        """Nothing is left to unwind, and the exit code stands."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end(self, code: int) -> NoReturn:
        """End the process. After an interrupt not in the interpreter's way: that waits for threads and locks,
        and ends by SIGINT, without a code, where the first signal came while it compiled something.
        """
        if self._signals:
            os._exit(code)
        sys.exit(code)

    def _end_where_it_is_ignored(self, ignored: sys.UnraisableHookArgs) -> None:
        """Python drops what is raised where an object is destroyed, the interrupt with it: the run would go
        on, and nobody would know. It ends as if it had been killed.
        """
        if isinstance(ignored.exc_value, KeyboardInterrupt):
            os._exit(self._code)
        sys.__unraisablehook__(ignored)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        self._code = self._code or 128 + number
        if self._signals >= IMPATIENT:
            os._exit(self._code)
        if self._signals == 1:
            # what was interrupted in the midst of taking a lock leaves it taken, and others may wait for it
            signal.signal(signal.SIGALRM, lambda *_: os._exit(self._code))
            signal.alarm(PATIENCE)
            _announce()
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


#: what is said at once where an interrupt does not end the command at once
_announcements: list[str] = []


@contextmanager
def announced(text: str) -> Iterator[None]:
    """Within this block the first signal says `text`, if there is any."""
    _announcements.append(text)
    try:
        yield
    finally:
        _announcements.pop()


def _announce() -> None:
    """From a signal handler: past all buffers and locks, which what was interrupted may hold."""
    if _announcements and _announcements[-1]:
        with suppress(OSError):
            bar = "\n" if os.isatty(2) else ""  # the line of the bar ends there
            os.write(2, f"{bar}{streams.line(_announcements[-1])}\n".encode())


def interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """The interrupt in the midst of which an error came up, such as that of a lock that a signal kept from
    being taken again; None where there is none.
    """
    seen: set[int] = set()
    here: BaseException | None = error
    while here is not None and id(here) not in seen:
        if isinstance(here, KeyboardInterrupt):
            return here
        seen.add(id(here))
        here = here.__cause__ or here.__context__
    return None
