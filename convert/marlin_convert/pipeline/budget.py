"""How much memory a run may use for buffers, and how many experts a batch then has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from marlin_convert.arguments import plain
from marlin_convert.errors import MachineError, UsageError
from marlin_convert.limits import allow, read_limits
from marlin_convert.pipeline.expert_job import expert_jobs, most_experts
from marlin_convert.pipeline.target import Target
from marlin_convert.pipeline.tensor_job import tensor_jobs
from marlin_convert.pipeline.unit_work import UnitWork

#: experts of a batch at most. At tp 8 of K2.6 that gives writes of 3.5, 0.4, 1.75 and 0.2 MiB; with 8, a
#: layer has so few jobs that all threads read together and then write together, and 96 experts took a quarter
#: longer
BATCH = 2


@dataclass(frozen=True)
class Budget:
    """Threads, bytes for buffers, and how much a job does at once: for a conversion, experts."""

    threads: int
    memory: int
    batch: int


def choose_budget(target: Target, threads: int | None, memory: int | None) -> Budget:
    """Of a conversion; see `settle`."""
    known = target.source.store.known
    read = 0 if known is None else known.files
    wish = Wish(threads, memory, BATCH, len(target.plan.ranks) + read)
    return settle(wish, lambda batch: _need(target, batch))


@dataclass(frozen=True)
class Wish:
    """What is asked for: threads and memory, where they are given; the largest batch that is worth while; and
    how many files are written, and where they are many read, together.
    """

    threads: int | None
    memory: int | None
    batch: int
    files: int


def settle(wish: Wish, need: Callable[[int], int]) -> Budget:
    """Threads and memory below the limits of this process, unless they are given, and the largest batch for
    which every thread has room, `need` being the bytes of the largest job. Raises UsageError where not even
    one job fits into the memory given, naming the least that works, and MachineError where that is more than
    there is.
    """
    limits, least, memory = read_limits(), need(1), plain(wish.memory)
    allowed = allow(limits, wish.threads, wish.files)
    threads = allowed.threads.value
    if memory is None:
        memory = max(allowed.memory.value, least)
        if limits.memory is not None and limits.memory.value < least:
            raise MachineError(
                f"the largest single step needs {-(-least >> 20)} MiB of memory and {limits.memory.by} leaves"
                f" {limits.memory.value >> 20} MiB; raise that limit, or try all the same with --memory"
                f" {-(-least >> 20)}MiB"
            )
    if memory < least:
        raise UsageError(
            f"--memory {memory} is too little: the smallest that works is {-(-least >> 20)}MiB, for the"
            " largest single step"
        )
    batch = wish.batch
    while batch > 1 and need(batch) * threads > memory:
        batch //= 2
    return Budget(threads, memory, batch)


def _need(target: Target, batch: int) -> int:
    """Bytes of the largest job."""
    need = 0
    most = 0
    for unit in target.plan.units:
        work = UnitWork(target, unit)
        need = max([need, *(job.need for job in tensor_jobs(work))])
        if (experts := most_experts(work, batch)) > most:
            # batches of as many experts differ only in how their pieces lie together: a margin covers that
            need = max(need, *(job.need + len(job.tensors) * 8192 for job in expert_jobs(work, batch)))
            most = experts
    return need
