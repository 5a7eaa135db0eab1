"""Whether the disk can hold what is still to be written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from marlin_convert.checkpoint.fetcher import Fetcher
from marlin_convert.checkpoint.source import Source
from marlin_convert.errors import MachineError
from marlin_convert.planning.needs import source_tensors
from marlin_convert.planning.output_plan import OutputPlan, OutputUnit
from marlin_convert.storage.files import existing, free_space
from marlin_convert.words import gigabytes

#: bytes in documents beside its name: of a source tensor that is read, of a tensor in a shard, of an expert
#: of a stacked one; of a file, blocks of the disk included; and of a source file in the manifest of a rank
PER_SOURCE, PER_STORED, PER_EXPERT, PER_FILE, PER_LISTED = 96, 1024, 96, 8192, 512


def documents_bytes(source: Source, plan: OutputPlan) -> int:
    """The most that everything beside the shards takes on the disk at any time: what is kept of the source,
    records, indexes, digests, the manifest and that of each rank.
    """
    size = len(source.config_bytes) * 2 + len(source.index_bytes or b"") + 2 * len(source.readme or b"")
    size += sum(len(header.raw) + PER_FILE for header in source.headers)
    size += sum(source.store.size(name) + PER_FILE for name in source.auxiliary)
    size += 16 * len(source.tensors)
    for unit in plan.units:
        size += sum(len(name) + PER_SOURCE for name in source_tensors(plan, unit))
        stored = sum(7 * len(placed.spec.name) + PER_STORED for placed in unit.files.tensors)
        stored += sum(stack.experts * PER_EXPERT for stack in unit.stacked)
        size += len(unit.ranks) * (stored + PER_FILE) + PER_FILE
    per_rank = (len(source.headers) + len(source.auxiliary)) * PER_LISTED + 4 * PER_FILE
    return size + len(plan.ranks) * plan.topology.pp * per_rank + 16 * PER_FILE


@dataclass(frozen=True)
class Need:
    """Bytes that are still to be written in OUT; `freed` is what goes away there before."""

    shards: int
    documents: int
    freed: int = 0

    @staticmethod
    def of(source: Source, plan: OutputPlan, left: Sequence[OutputUnit], freed: int = 0) -> Need:
        """For the units that are left."""
        shards = sum(unit.file_size * len(unit.ranks) for unit in left)
        return Need(shards, documents_bytes(source, plan), freed)


def refuse_full_disk(out: Path, need: Need, fetcher: Fetcher) -> None:
    """Raise MachineError before anything is written where the disk cannot hold what is needed, and the source
    files that the fetcher brings.
    """
    needed, place, room = need.shards + need.documents, fetcher.place or out, fetcher.room
    kept = fetcher.place is not None and room  # not staged in OUT
    stage = "use --free-source to keep only a few source files at a time, or " if kept else ""
    if existing(place).stat().st_dev == existing(out).stat().st_dev:
        refuse_short(out, needed + room, need.freed, _of_it(need.documents, room), stage)
    else:
        refuse_short(out, needed, need.freed, _of_it(need.documents, 0), stage)
        refuse_short(place, room, 0, _of_it(0, room), stage)


def _of_it(documents: int, source: int) -> str:
    """What of some bytes is not shards."""
    parts = {"source files": source, "documents": documents}
    named = " and ".join(f"{gigabytes(size)} of {what}" for what, size in parts.items() if size)
    return f", {named} among them," if named else ""


def refuse_short(folder: Path, size: int, freed: int = 0, of_it: str = "", hint: str = "") -> None:
    """Raise MachineError where `size` bytes do not fit, `freed` going away before. `of_it` says what some of
    them are, `hint` what could be done.
    """
    free = free_space(folder) + freed
    if free < size:
        raise MachineError(
            f"{folder}: {gigabytes(size)}{of_it} are still to be written but only {gigabytes(free)} are free:"
            f" {gigabytes(size - free)} too little; {hint}free some space, then run the same command again"
        )
