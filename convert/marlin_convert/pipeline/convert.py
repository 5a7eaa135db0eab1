"""The conversion from end to end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Lock, Thread

from marlin_convert.buffers import BufferPool
from marlin_convert.checkpoint.hub_files import HubOptions
from marlin_convert.checkpoint.identity import identify, stamps
from marlin_convert.checkpoint.source import Source, open_source
from marlin_convert.documents.identity import SourceIdentity
from marlin_convert.documents.manifest import read_manifest
from marlin_convert.documents.records import FinishedUnit
from marlin_convert.errors import SourceError, UsageError
from marlin_convert.files import machine_errors
from marlin_convert.pipeline.begin import (
    CHECKS,
    begin_or_continue,
    compare_finished,
    job_options,
    kept_digests,
    refuse_foreign,
    refuse_full_disk,
)
from marlin_convert.pipeline.budget import Budget, choose_budget
from marlin_convert.pipeline.clear import clear_output, has_lost_files, reopen
from marlin_convert.pipeline.executor import Executor, Job
from marlin_convert.pipeline.expert_job import expert_jobs
from marlin_convert.pipeline.finish import finish_output
from marlin_convert.pipeline.kernel_check import Check, kernel_check
from marlin_convert.pipeline.records import WORK, WorkFolder, locked
from marlin_convert.pipeline.stages import Stages, Tools
from marlin_convert.pipeline.tensor_job import tensor_jobs
from marlin_convert.pipeline.unit_work import Kept, UnitWork
from marlin_convert.planning.needs import needs
from marlin_convert.planning.output import Options, OutputPlan, OutputUnit, plan_output
from marlin_convert.planning.units import expert_tensors
from marlin_convert.progress import Progress
from marlin_convert.reads import PieceReader


@dataclass(frozen=True)
class Report:
    """What a run did: units made now and found finished, and seconds and bytes per stage, summed over
    threads.
    """

    out: Path
    made: int
    found: int
    output_bytes: int
    stages: Stages


def convert(
    source: str,
    out: str | os.PathLike[str],
    *,
    tp: int,
    ep: int = 1,
    layers: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    layout: str | None = None,
    threads: int | None = None,
    memory: int | None = None,
    verify: str = "exact",
    overwrite: bool = False,
    direct_io: bool = True,
    progress: Progress | None = None,
    hub: HubOptions | None = None,
    fetch_progress: Progress | None = None,
) -> Report:
    """Convert a checkpoint, a folder or a repository `org/name`; run again, it continues.

    `layers` and `ranks` limit what is made (None: all); `layout` is the id of one of the registered layouts
    (None: that of the Marlin MoE kernel). `memory` is the budget for buffers in bytes. `verify`
    is "exact" (each buffer is inverted and compared with the source before it is written), "kernel" (and each
    written layer goes through the kernel on a GPU) or "none". `progress(done, total)` gets source bytes and
    may be called from any thread; `fetch_progress` the same for what comes from the hub. `hub` says how a
    repository is read and kept.

    Raises UsageError for options that conflict with each other or with what OUT holds; SourceError for a
    source that is not what it should be; MachineError where disk or machine failed.
    """
    if verify not in CHECKS:
        raise UsageError(f"--verify {verify}: choose one of {', '.join(CHECKS)}")
    opened = open_source(source, hub)
    plan = plan_output(opened, Options.of(tp, ep, layers, ranks, layout))
    folder = Path(out)
    refuse_foreign(folder, opened, overwrite)
    budget = choose_budget(plan, opened, threads, memory)
    run_kernel = kernel_check(opened, plan, folder) if verify == "kernel" else None
    with machine_errors(f"creating {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if overwrite:
            with machine_errors(f"clearing {folder}"):
                clear_output(folder, opened.auxiliary)
        return _convert(opened, plan, folder, budget, verify, run_kernel, direct_io, progress, fetch_progress)


def _convert(
    source: Source,
    plan: OutputPlan,
    out: Path,
    budget: Budget,
    verify: str,
    run_kernel: Check | None,
    direct_io: bool,
    progress: Progress | None,
    fetch_progress: Progress | None,
) -> Report:
    """Everything under the lock."""
    identity, stages, work = identify(source), Stages(), WorkFolder(out)
    looks = stamps(source, () if source.folder is None else (header.file for header in source.headers))
    manifest = read_manifest(out) if (out / "manifest.json").exists() else None
    if manifest is not None:
        compare_finished(out, manifest, identity, job_options(plan, verify))
        if not has_lost_files(out, manifest):
            work.remove()
            return Report(out, 0, len(plan.units), plan.total_bytes, stages)
        if (verify := manifest.checks) == "kernel" and run_kernel is None:
            raise UsageError(
                f"{out} has lost files and was made with --verify kernel; give that again to remake them"
            )
    Thread(target=_load_compiled).start()
    with machine_errors(f"beginning in {out}"):
        begin_or_continue(work, identity, job_options(plan, verify), looks)
        if manifest is not None:
            reopen(out, plan, manifest, work)
        work.remove_partials()
        records = {
            unit.name: record for unit in plan.units if (record := work.finished(plan, unit)) is not None
        }
    found, kept = len(records), kept_digests(out, source)
    left = [unit for unit in plan.units if unit.name not in records]
    fetcher = source.store.fetcher(
        needs(source, plan, left), (out / WORK / "staging").resolve(), fetch_progress
    )
    refuse_full_disk(out, plan, records, fetcher.place or out, fetcher.room)
    for parent in sorted(
        {(out / plan.path(unit, rank)).parent for unit in plan.units for rank in unit.ranks}
    ):
        with machine_errors(f"creating {parent}"):
            parent.mkdir(exist_ok=True)

    def finished(done: UnitWork, record: FinishedUnit) -> None:
        """A unit's files are durable: unless the source was touched meanwhile, its record makes it count."""
        if stamps(source, looks) != looks:
            raise SourceError(
                f"a weight file was changed while {done.unit.name} was being converted; fetch it again, then"
                " use --overwrite"
            )
        fetcher.check(done.unit.name)
        if run_kernel is not None:
            run_kernel(done.unit)
        work.record(record)
        records[record.name] = record
        fetcher.release(done.unit.name)

    # what has just been fetched and hashed is in the page cache: reading past it would read the disk
    reader = PieceReader(source.path, direct_io and source.folder is not None)
    tools = Tools(
        fetcher,
        reader,
        BufferPool(budget.memory),
        stages,
        verify != "none",
        _counter(source, left, progress),
    )
    fetcher.start()
    Executor(tools, budget.threads, finished).run(
        _jobs(source, plan, left, out, identity, budget, direct_io, kept)
    )
    finish_output(source, identity, plan, records, out, verify, stages)
    work.remove()
    return Report(out, len(left), found, plan.total_bytes, stages)


def _load_compiled() -> None:
    """Import what numba compiled, a third of a second, while the disk is busy with beginning; who needs it
    meets the errors.
    """
    with suppress(Exception):
        import_module("marlin_convert.layout.batch")


def _jobs(
    source: Source,
    plan: OutputPlan,
    units: Sequence[OutputUnit],
    out: Path,
    identity: SourceIdentity,
    budget: Budget,
    direct_io: bool,
    kept: Kept,
) -> Iterator[Job]:
    """All jobs in order, each unit's made only when its turn comes."""
    for unit in units:
        work = UnitWork(plan, unit, out, identity.id, direct_io, kept)
        jobs: list[Job] = [*expert_jobs(work, source, budget.batch), *tensor_jobs(work, source)]
        work.jobs_left = len(jobs)
        yield from jobs


def _counter(source: Source, units: Sequence[OutputUnit], progress: Progress | None) -> Callable[[int], None]:
    """Adds up source bytes and tells `progress`."""
    if progress is None:
        return lambda size: None
    total = sum(source_bytes(source, unit) for unit in units)
    lock, done = Lock(), 0
    progress(0, total)

    def count(size: int) -> None:
        nonlocal done
        with lock:
            done = min(done + size, total)
            progress(done, total)

    return count


def source_bytes(source: Source, unit: OutputUnit) -> int:
    """Bytes a unit takes from the source."""
    names = [tensor.name for tensor in unit.source.plain]
    if unit.source.experts_prefix is not None:
        shape = source.model.expert_shape()
        names += [
            tensor.name
            for expert in range(source.model.experts)
            for tensor in expert_tensors(unit.source.experts_prefix, expert, shape)
        ]
    return sum(source.tensors[name].entry.size for name in names)
