"""A published weight file while it is being made again: its bytes put together out of shards, each tensor
compared with the digest that the converted folder keeps of it, and the whole with the published sha256.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import xxhash

from marlin_convert.checkpoint.header import Header, TensorEntry
from marlin_convert.errors import ConvertError, MachineError, OutputError
from marlin_convert.pipeline.restore_folder import RestoreFolder
from marlin_convert.pipeline.restore_plan import RestorePlan
from marlin_convert.pipeline.restored_file import file_head, restored, sha256_of
from marlin_convert.pipeline.stages import Tools
from marlin_convert.pipeline.work import Work
from marlin_convert.storage.buffers import Bytes
from marlin_convert.storage.files import PAGE, machine_errors
from marlin_convert.storage.source_reader import Part, Reads
from marlin_convert.storage.writer import ShardFile

#: bytes that a job makes at once: so many of these at most, fewer where memory is short
STEP, STEPS = 8 << 20, 4
#: the number of its layer in a tensor's name
LAYER = re.compile(r"(?<=\.layers\.)\d+")


@dataclass(eq=False)
class FileWork(Work):
    """One file: made in the work folder, proven, and moved to its name. `damage` says why that cannot be."""

    plan: RestorePlan
    folder: RestoreFolder
    header: Header
    direct_io: bool
    damage: ConvertError | None = None

    def __post_init__(self) -> None:
        self.sha256 = self.plan.sha256(self.header.file)
        self.file = ShardFile(self.folder.made(self.header.file), self.header.size, self.direct_io)

    def create(self) -> None:
        """See `Work`."""
        self.file.open(file_head(self.header))

    def finish(self, tools: Tools) -> None:
        """Prove the whole, make it durable under its name and record it; or remove it where it is not what
        was published. Raises UsageError where something else has its name.
        """
        if self.damage is None and self.sha256 is not None:
            with tools.stages.time("hash", self.header.size):
                self.damage = self._difference(self.sha256)
        if self.damage is not None:
            self.discard()
            return
        self.folder.refuse_in_place_of(self.header.file)
        self.file.finish()
        self.folder.publish(restored(self.plan, self.header))

    def _difference(self, published: str) -> OutputError | None:
        """How the whole, read back, differs from the published file."""
        with machine_errors(f"reading {self.file.partial}"):
            found = sha256_of(self.file.partial)
        if found == published:
            return None
        return OutputError(
            f"its tensors have their digests, but its sha256 is {found}, and {published} was published"
        )

    def discard(self) -> None:
        """See `Work`."""
        self.file.discard()


class Step(NamedTuple):
    """What is made at once: bytes that follow one another, in the file from `offset` on and in the buffer, in
    which they lie to the pages as in the file.
    """

    offset: int
    parts: tuple[Part, ...]
    reads: Reads


@dataclass(frozen=True)
class RestoreJob:
    """Some tensors that follow one another in a file, none where it has none. Its steps go in order, so that
    whole-tensor digests are made in the same pass.
    """

    work: FileWork
    entries: tuple[TensorEntry, ...]
    limit: int

    @property
    def need(self) -> int:
        """Bytes of memory."""
        return max((step.reads.size for step in self._steps), default=0)

    @property
    def files(self) -> tuple[str, ...]:
        """The shards it reads."""
        return tuple(sorted({file for step in self._steps for file in step.reads.files}))

    @cached_property
    def _steps(self) -> tuple[Step, ...]:
        """In the order of the file."""
        plan = self.work.plan.reader.plan
        return tuple(
            Step(offset, parts, plan(parts, offset % PAGE))
            for offset, parts in _parts(self.entries, self.limit)
        )

    def run(self, tools: Tools) -> None:
        """Make them, unless the file cannot be made; where these cannot, the others need not be. Raises
        MachineError where they cannot be written.
        """
        hashers = {entry.name: xxhash.xxh3_128() for entry in self.entries}
        with tools.pool.take(self.need) as buffer:
            for step in self._steps:
                if not self._read(tools, step, buffer):
                    return
                made = [buffer[at : at + p.size] for p, at in zip(step.parts, step.reads.places, strict=True)]
                size = sum(part.size for part in step.parts)
                with tools.stages.time("hash", size):
                    for part, data in zip(step.parts, made, strict=True):
                        hashers[part.tensor].update(data.data)
                begin = step.reads.places[0]
                with tools.stages.time("write", size):
                    self.work.file.write(buffer[begin : begin + size], step.offset)
                tools.progress(self.work.header.file, size)
        for entry in self.entries:
            self._compare(entry, hashers[entry.name].digest())

    def _read(self, tools: Tools, step: Step, buffer: Bytes) -> bool:
        """Whether the file can still be made, and this is there now. Shards that cannot be read are no reason
        not to make the files that need none of them.
        """
        if self.work.damage is None:
            try:
                with tools.stages.time("read", step.reads.read_bytes):
                    tools.reader.read(step.reads, buffer)
            except (OutputError, MachineError) as error:
                self.work.damage = error
        return self.work.damage is None

    def _compare(self, entry: TensorEntry, found: bytes) -> None:
        plan, kept = self.work.plan, self.work.plan.kept.digests[entry.name]
        if found == kept or self.work.damage is not None:
            return
        holders = [name for name in plan.kept.holders(found) if name != entry.name]
        hint = f" (what was read is {holders[0]})" if holders else ""
        self.work.damage = OutputError(
            f"{entry.name}, put together from the shards, is not what it was: its xxh3-128 is {found.hex()},"
            f" source/digests.bin has {kept.hex()}{hint}"
        )


def _parts(entries: tuple[TensorEntry, ...], limit: int) -> Iterator[tuple[int, tuple[Part, ...]]]:
    """Tensors at once, a single one that is over the limit by its rows; with where they begin in the file."""
    if not entries:
        return
    entry = entries[0]
    rows = entry.shape[0] if entry.shape else 1
    if entries[1:] or entry.size <= limit or rows == 1:
        yield entry.offset, tuple(Part(each.name, 0, each.size) for each in entries)
        return
    row = entry.size // rows
    step = max(limit // row, 1) * row
    for begin in range(0, entry.size, step):
        yield entry.offset + begin, (Part(entry.name, begin, min(step, entry.size - begin)),)


def file_jobs(work: FileWork, limit: int) -> list[RestoreJob]:
    """The jobs of a file: about `limit` bytes each, long tensors first so that none is left alone at the end.
    What is of one expert and stands together is made together: most of it is stored together.
    """
    jobs: list[RestoreJob] = []
    long: list[RestoreJob] = []
    run: list[TensorEntry] = []
    entries = (entry for entry in work.header.tensors if entry.size)
    for expert, group in groupby(entries, key=lambda entry: work.plan.expert(entry.name)):
        for block in [list(group)] if expert is not None else [[entry] for entry in group]:
            size = sum(entry.size for entry in block)
            if run and sum(entry.size for entry in run) + size > limit:
                jobs.append(RestoreJob(work, tuple(run), limit))
                run = []
            if expert is None and size > limit:
                long.append(RestoreJob(work, tuple(block), limit))
            else:
                run += block
    jobs = long + jobs
    return jobs if jobs and not run else [*jobs, RestoreJob(work, tuple(run), limit)]


def largest_need(plan: RestorePlan, limit: int) -> int:
    """Bytes of memory of the largest job."""
    need, seen = 0, set[Hashable]()
    for header in plan.files:
        # files of other layers differ only in how their pieces lie together: a margin covers that
        alike = tuple((LAYER.sub("", entry.name), entry.dtype, entry.shape) for entry in header.tensors)
        if alike not in seen:
            seen.add(alike)
            jobs = file_jobs(FileWork(plan, RestoreFolder(Path()), header, False), limit)
            need = max([need, *(job.need + 2 * PAGE * len(job.entries) for job in jobs)])
    return need
