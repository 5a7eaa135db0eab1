"""Threads that take jobs in order. Stages overlap because different jobs are at different stages; memory is
bounded by the buffer pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from threading import Event, Lock
from typing import Generic, Protocol, TypeVar

from marlin_convert.errors import ConvertError, MachineError
from marlin_convert.pipeline.stages import Tools
from marlin_convert.pipeline.work import Work
from marlin_convert.storage.files import machine_error
from marlin_convert.threads import make_do, start

W_co = TypeVar("W_co", bound=Work, covariant=True)

#: seconds between two looks at whether all threads have ended
POLL = 0.01


class Job(Protocol[W_co]):
    """A step that is done by one thread."""

    @property
    def work(self) -> W_co:
        """What it is a part of."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files that it reads."""

    def run(self, tools: Tools) -> None:
        """Do it."""


class Executor(Generic[W_co]):
    """Runs jobs on `threads` threads; the one that does the last job of a work also finishes it by `finish`.
    `doing` is what an error of the machine interrupts.
    """

    def __init__(
        self, tools: Tools, threads: int, finish: Callable[[W_co], None], doing: str = "converting"
    ) -> None:
        self._tools = tools
        self._threads = threads
        self._finish = finish
        self._doing = doing
        self._stop = Event()
        self._lock = Lock()
        self._failure: BaseException | None = None
        self._open: list[W_co] = []
        #: an entry for each thread that has begun to work, and for each that has ended
        self._entered: list[None] = []
        self._ended: list[None] = []

    def run(self, jobs: Iterator[Job[W_co]]) -> None:
        """Run all jobs. Fewer threads than wanted are enough. On a failure or an interrupt no further job
        starts, unfinished work is removed, and the first error is raised.
        """
        begun = 0
        try:
            while begun < self._threads and start(partial(self._work_until_done, jobs), f"convert-{begun}"):
                begun += 1
            make_do(begun, self._threads)
            self._wait(lambda: len(self._ended) == begun)
        except BaseException as interrupt:
            self._fail(interrupt)
            # a thread that only begins now finds nothing to do; one whose start was interrupted may be at
            # work
            self._wait(lambda: len(self._ended) >= len(self._entered))
        if self._failure is not None:
            for work in self._open:
                work.discard()
            raise self._failure

    def _wait(self, over: Callable[[], bool]) -> None:
        """Without a lock: a signal in the midst of taking one would leave it taken. Nor by Thread.join: up to
        Python 3.12 a signal in the midst of that marks a running thread as ended.
        """
        while not over():
            time.sleep(POLL)

    def _work_until_done(self, jobs: Iterator[Job[W_co]]) -> None:
        self._entered.append(None)
        try:
            self._work(jobs)
        finally:
            self._ended.append(None)

    def _work(self, jobs: Iterator[Job[W_co]]) -> None:
        while True:
            try:
                with self._lock:
                    job = None if self._stop.is_set() else next(jobs, None)
                    if job is not None and job.work not in self._open:
                        self._open.append(job.work)
                if job is None:
                    return
                self._run(job)
            except InterruptedError:
                return
            except OSError as error:
                self._fail(machine_error(self._doing, error))
            except MemoryError:
                self._fail(
                    MachineError(
                        "out of memory; give a smaller --memory or fewer --threads, then run the same command"
                        " again"
                    )
                )
            except BaseException as error:
                self._fail(error)

    def _run(self, job: Job[W_co]) -> None:
        self._tools.fetcher.wait(job.files)
        job.work.open()
        self._tools.reader.open_files(job.files)
        try:
            job.run(self._tools)
        finally:
            self._tools.reader.close_files(job.files)
        if job.work.job_done():
            self._finish(job.work)
            with self._lock:
                self._open.remove(job.work)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._failure is None or (
                isinstance(self._failure, ConvertError) and not isinstance(error, Exception)
            ):
                self._failure = error
        self._stop.set()
        self._tools.pool.stop()
        self._tools.fetcher.stop()
