"""The way back: out of a converted folder the published checkpoint that it was made from, file for file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from marlin_convert.arguments import refuse_odd
from marlin_convert.checkpoint.fetcher import LocalFiles
from marlin_convert.checkpoint.header import Header
from marlin_convert.errors import ConvertError, MachineError, OutputError, UsageError
from marlin_convert.pipeline.budget import Budget, Wish, settle
from marlin_convert.pipeline.executor import Executor, Job
from marlin_convert.pipeline.locks import locked
from marlin_convert.pipeline.places import refuse_nested
from marlin_convert.pipeline.restore_folder import RestoreFolder
from marlin_convert.pipeline.restore_job import STEP, STEPS, FileWork, file_jobs, largest_need
from marlin_convert.pipeline.restore_plan import RestorePlan, plan_restore
from marlin_convert.pipeline.restored import Restored
from marlin_convert.pipeline.restored_file import has_head, is_published, restored
from marlin_convert.pipeline.resume import Action
from marlin_convert.pipeline.space import refuse_short
from marlin_convert.pipeline.stages import Stages, Tools
from marlin_convert.progress import Progress, Tally
from marlin_convert.storage.buffers import BufferPool
from marlin_convert.storage.files import machine_errors, make_path
from marlin_convert.words import count

#: files that are written at a time, about
TOGETHER = 2
#: files that are named which could not be restored
LISTED = 3


def restore(
    out: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    threads: int | None = None,
    memory: int | None = None,
    direct_io: bool = True,
    progress: Progress | None = None,
) -> Restored:
    """Make the published checkpoint again that the converted folder `out` was made from; run again, it
    continues.

    Every file comes back with its name and its bytes: header, order, index, configuration. Each tensor is
    compared with the digest that `out` keeps of it, and each file with the sha256 that was published, where
    `out` has that, before the file gets its name. What a part does not hold is left out, and named. Nothing
    that is in `folder` is written over or removed. `memory` is the budget for buffers in bytes;
    `progress(point)` gets a `progress.Point` of bytes of the files and may be called from any thread.

    Raises OutputError for an `out` that is damaged, when all is restored that is not; UsageError for a
    `folder` that holds something else, or an `out` that holds no file wholly; MachineError where disk or
    machine failed.
    """
    refuse_odd(places={"out": out, "folder": folder}, threads=threads, memory=memory)
    plan = plan_restore(Path(out), direct_io)
    wish = Wish(threads, memory, STEPS, TOGETHER + len(plan.manifest.ranks))
    budget = settle(wish, lambda batch: largest_need(plan, batch * STEP))
    return Restoration(plan, RestoreFolder(Path(folder)), budget, direct_io, progress).run()


@dataclass
class Restoration:
    """One run: look, lock, see what is there, make what is left, the small files last."""

    plan: RestorePlan
    place: RestoreFolder
    budget: Budget
    direct_io: bool
    progress: Progress | None

    def __post_init__(self) -> None:
        self.stages = Stages()
        self.source = self.plan.manifest.source_id
        self.names = [file.name for file in self.plan.manifest.source.files]
        self.damaged: dict[str, ConvertError] = dict(self.plan.damaged)

    def run(self) -> Restored:
        """Do what is left to do. Raises what `restore` raises."""
        plan, folder = self.plan, self.place.folder
        self._decide()  # a refusal leaves no trace
        with machine_errors(f"creating {folder}"):
            make_path(folder)
        with locked(folder):
            action, left = self._decide(), list[Header]()
            if action is not Action.DONE:
                left = self._prepare()
                self._make(left)
                with machine_errors(f"writing the small files of {folder}"):
                    self.place.write_small(plan.small)
                self._refuse_damage()
            records = [self.place.record(header.file) for header in plan.files]
            with machine_errors(f"ending in {folder}"):
                self.place.end(self.names)
        made = sum(header.size for header in left)
        by_sha256 = sum(record is not None and record.proof == "sha256" for record in records)
        not_kept = plan.manifest.source.not_copied
        found = len(plan.files) - len(left)
        return Restored(
            folder, action.value, len(left), made, found, by_sha256, plan.missing, not_kept, self.stages
        )

    def _refuse_damage(self) -> None:
        """Where OUT is not what it was, or cannot be read, all else is restored by then. Raises OutputError;
        MachineError where any of it could not be read.
        """
        if not self.damaged:
            return
        unread = any(isinstance(error, MachineError) for error in self.damaged.values())
        said = [f"{name}: {error}" for name, error in self.damaged.items()]
        more = f"; and {count(len(said) - LISTED, 'file')} more" if said[LISTED:] else ""
        raise (MachineError if unread else OutputError)(
            f"{count(len(said), 'file')} could not be restored: {'; '.join(said[:LISTED])}{more}. All else is"
            f" in {self.place.folder}; once {self.plan.out} is mended the same command goes on, and what is"
            f" wrong there says marlin-convert verify {self.plan.out}"
        )

    def _decide(self) -> Action:
        """What may be done with the folder. Raises UsageError for one that holds something else, or that lies
        where it may not.
        """
        place, folder = self.place, self.place.folder
        refuse_nested(folder, self.plan.out, [self.plan.out.resolve()])
        if os.path.lexists(folder) and not folder.is_dir():
            raise UsageError(f"{folder} is not a folder")
        if not folder.exists() or place.is_empty:
            place.refuse_links()
            return Action.NEW
        job = place.job() if place.is_begun else None
        if job is not None and job.source != self.source:
            raise UsageError(
                f"{folder} was begun from a conversion of another source: its id is {job.source}, that of"
                f" {self.plan.out} is {self.source}; choose another folder"
            )
        if (job is None or job.finished) and self._is_there():
            return Action.DONE
        if job is None:
            raise UsageError(
                f"{folder} is not empty, and no restoration was begun there; choose an empty folder: nothing"
                " that is there is written over or removed"
            )
        place.refuse_links()
        return Action.CONTINUE

    def _is_there(self) -> bool:
        """Whether all files are there, the weights by size and header."""
        plan, place = self.plan, self.place
        return all(has_head(place.folder / header.file, header) for header in plan.files) and all(
            place.holds(name, data) for name, data in plan.small.items()
        )

    def _prepare(self) -> list[Header]:
        """See which files are there; returns those that are left. Raises UsageError where something else is
        in the place of one.
        """
        plan, place = self.plan, self.place
        with machine_errors(f"beginning in {place.folder}"):
            place.begin(self.source)
            place.remove_made(self.names)
        there = [header for header in plan.files if os.path.lexists(place.folder / header.file)]
        self._compare([header for header in there if not self._is_recorded(header)])
        for name, data in plan.small.items():
            if not place.holds(name, data):
                place.refuse_in_place_of(name)
        left = [header for header in plan.files if header not in there]
        small = sum(len(data) for data in plan.small.values())
        refuse_short(place.folder, sum(header.size for header in left) + small)
        return left

    def _is_recorded(self, header: Header) -> bool:
        return self.place.record(header.file) is not None and has_head(
            self.place.folder / header.file, header
        )

    def _compare(self, headers: Sequence[Header]) -> None:
        """Compare files that have their names and no record with what is to be there: a run that broke off
        may have left them, or anybody.
        """
        total, names = sum(header.size for header in headers), [header.file for header in headers]
        tally = Tally("comparing", total, names, self.progress)
        for header in headers:
            tally.count(header.file)
            if not is_published(self.place.folder / header.file, header, self.plan):
                self.place.refuse_in_place_of(header.file)
            self.place.write_record(restored(self.plan, header))
            tally.count(header.file, header.size)

    def _make(self, left: Sequence[Header]) -> None:
        """Make the files that are left."""
        names = [header.file for header in self.plan.files]
        total = sum(header.size - header.data_start for header in left)
        tally = Tally("restoring", total, names, self.progress)
        tally.count(left[0].file if left else "")
        pool = BufferPool(self.budget.memory)
        tools = Tools(LocalFiles(), self.plan.reader, pool, self.stages, False, tally.count)

        def finish(work: FileWork) -> None:
            work.finish(tools)
            if work.damage is not None:
                self.damaged[work.header.file] = work.damage

        Executor(tools, self.budget.threads, finish, "restoring").run(self._jobs(left))
        tally.then("writing small files")

    def _jobs(self, headers: Sequence[Header]) -> Iterator[Job[FileWork]]:
        """All jobs in order, each file's made only when its turn comes."""
        for header in headers:
            work = FileWork(self.plan, self.place, header, self.direct_io)
            jobs = file_jobs(work, self.budget.batch * STEP)
            work.jobs_left = len(jobs)
            if lost := self._lost(jobs):
                self.damaged[header.file] = OutputError(f"{lost[0]} is gone or of another size")
            else:
                yield from jobs

    def _lost(self, jobs: Sequence[Job[FileWork]]) -> list[str]:
        """Shards that are not there any more and that these jobs would read."""
        lost = self.plan.lost
        return sorted({file for job in jobs for file in job.files if file in lost}) if lost else []
