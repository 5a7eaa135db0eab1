"""Threads where the system may grant fewer than are asked for: a limit of processes (pids), of memory, or of
address space for their stacks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from types import TracebackType

from marlin_convert.errors import MachineError, MachineWarning


class Workers(ThreadPoolExecutor):
    """A pool that makes do with the threads it gets. Raises MachineError from `submit` and `map` where it
    gets none.
    """

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:
            if not self._threads:
                raise no_thread() from error

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for all that was submitted; after a failure or an interrupt only for what is under way."""
        self.shutdown(cancel_futures=kind is not None)


def start(target: Callable[[], None], name: str) -> bool:
    """Start a daemon thread; whether that could be done."""
    try:
        Thread(target=target, name=name, daemon=True).start()
    except RuntimeError:
        return False
    return True


def make_do(begun: int, wanted: int) -> None:
    """Say that fewer threads were started than wanted, if so. Raises MachineError where there is none."""
    if not begun:
        raise no_thread()
    if begun < wanted:
        warnings.warn(
            f"only {begun} of {wanted} threads could be started, and they go on alone: a limit of processes"
            " or of memory is near (ulimit -u, ulimit -v, pids.max)",
            MachineWarning,
            stacklevel=2,
        )


def no_thread() -> MachineError:
    """What is said where not even one thread could be started."""
    return MachineError(
        "no thread could be started; raise the limit of processes (ulimit -u, pids.max) or of memory (ulimit"
        " -v), then run the same command again"
    )
