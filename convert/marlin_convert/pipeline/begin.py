"""May a conversion be written here? What OUT holds is compared with what is asked for; nothing is changed
unless the answer is yes.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from marlin_convert.checkpoint.source import Source
from marlin_convert.checks.kept_source import ZEROS, digests_by_tensor
from marlin_convert.documents.identity import SourceIdentity
from marlin_convert.documents.manifest import Manifest
from marlin_convert.documents.records import FinishedUnit, Job, JobOptions
from marlin_convert.errors import MachineError, SourceError, UsageError
from marlin_convert.files import existing
from marlin_convert.pipeline.records import WORK, WorkFolder
from marlin_convert.planning.output import OutputPlan
from marlin_convert.shards.format import FORMAT_VERSION

#: what is proven while converting, each more than the one before
CHECKS = ("none", "exact", "kernel")
#: room for indexes, manifest, headers of the source and other small files
SMALL_FILES = 64 << 20
#: the digests of the source's tensors, in OUT
KEPT = "source/digests.bin"


def refuse_foreign(out: Path, source: Source, overwrite: bool) -> None:
    """Raise UsageError for an OUT that is the source, lies in it, is no folder, or holds something that is
    not a conversion.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is not a folder")
    here, there = out.resolve(), None if source.folder is None else source.folder.resolve()
    if here == there or there in here.parents:
        raise UsageError(f"{out} is the source folder or lies in it; choose another place for the output")
    if out.is_dir() and any(out.iterdir()) and not is_ours(out):
        if not (out / "source" / "headers").is_dir():
            raise UsageError(f"{out} is not empty and is not a conversion; choose an empty folder")
        if not overwrite:
            raise UsageError(
                f"{out} holds files of a conversion but no manifest.json; use --overwrite to make it again"
            )


def is_ours(out: Path) -> bool:
    """Whether a folder is a conversion, finished or not."""
    if (out / WORK).is_dir():
        return True
    try:
        with (out / "manifest.json").open("rb") as file:
            return b'"marlin-convert"' in file.read(64)
    except OSError:
        return False


def job_options(plan: OutputPlan, verify: str) -> JobOptions:
    """What must be the same for a run to continue another. Threads, memory and the way of I/O do not matter:
    they change no byte.
    """
    return JobOptions(
        FORMAT_VERSION,
        plan.layout.id,
        plan.rules,
        plan.topology.tp,
        plan.topology.ep,
        tuple(plan.ranks),
        tuple(plan.layers),
        plan.complete,
        verify,
    )


def begin_or_continue(
    work: WorkFolder, identity: SourceIdentity, options: JobOptions, stamps: Mapping[str, list[int]]
) -> None:
    """Begin a job in OUT, or see that the one begun there is this one. Raises UsageError for other options,
    SourceError for another source.
    """
    asked, begun = Job(options, identity, dict(stamps)), work.job()
    if begun is None:
        work.begin(asked)
        return
    compare_options(work.out, begun.options, options)
    if (difference := begun.identity.continued_by(identity)) is not None:
        raise SourceError(
            f"{work.out} was begun from another source: {difference}; use another OUT, or --overwrite to"
            " start again"
        )
    touched = [name for name, stamp in stamps.items() if begun.stamps.get(name) != stamp]
    known = (work.out / KEPT).exists()  # then the digest of every tensor is compared
    if touched and (known or not work.any_finished()):
        work.begin(asked)
    elif touched:
        raise SourceError(
            f"{touched[0]} was written again after {work.out} was begun, and a sample cannot prove that all"
            " of it is the same; use --overwrite to start again"
        )


def kept_digests(out: Path, source: Source) -> dict[str, tuple[bytes, str]]:
    """Digest and file of each source tensor, as OUT keeps them from when it was finished: what is made again
    must come of the same bytes.
    """
    try:
        blob = (out / KEPT).read_bytes()
    except FileNotFoundError:
        return {}
    digests = digests_by_tensor(source.headers, blob)
    return {name: (value, source.tensors[name].file) for name, value in digests.items() if value != ZEROS}


def compare_options(out: Path, theirs: JobOptions, ours: JobOptions) -> None:
    """Raise UsageError where an OUT was made with other options."""
    for key in JobOptions.__struct_fields__:
        found, wanted = getattr(theirs, key), getattr(ours, key)
        if found != wanted:
            raise UsageError(
                f"{out} was made with {key} {_short(found)}, now asked for {_short(wanted)}; use another OUT,"
                " or --overwrite to start again"
            )


def manifest_options(manifest: Manifest) -> JobOptions:
    """The options of a finished conversion, as `job_options` has them."""
    return JobOptions(
        manifest.format_version,
        manifest.layout_id,
        manifest.parallel.rules,
        manifest.tp,
        manifest.ep,
        manifest.ranks,
        manifest.layers,
        manifest.complete,
        manifest.checks,
    )


def compare_finished(out: Path, manifest: Manifest, identity: SourceIdentity, asked: JobOptions) -> None:
    """See that a finished OUT is what is asked for. Raises UsageError or SourceError."""
    made = manifest_options(manifest)
    if CHECKS.index(made.verify) >= CHECKS.index(asked.verify):
        asked = replace(asked, verify=made.verify)  # proven more than is asked for
    elif replace(made, verify=asked.verify) == asked:
        flag = " --kernel" if asked.verify == "kernel" else ""
        raise UsageError(
            f"{out} is finished, made with --verify {made.verify}; prove it with `marlin-convert verify"
            f" {out}{flag}`"
        )
    compare_options(out, made, asked)
    if (difference := manifest.source.identity.continued_by(identity)) is not None:
        raise SourceError(
            f"{out} was made from another source: {difference}; use another OUT, or --overwrite to start"
            " again"
        )


def refuse_full_disk(
    out: Path, plan: OutputPlan, records: Mapping[str, FinishedUnit], place: Path, room: int
) -> None:
    """Raise MachineError before anything is written where the disk cannot hold what is left to write, and
    `room` for source files at `place`.
    """
    needed = SMALL_FILES + sum(
        unit.file_size * len(unit.ranks) for unit in plan.units if unit.name not in records
    )
    place = existing(place)
    together = place.stat().st_dev == out.stat().st_dev
    for folder, size in [(out, needed + (room if together else 0)), *([] if together else [(place, room)])]:
        free = shutil.disk_usage(folder).free
        if free < size:
            files = f", {_bytes(room)} of it source files," if room and (together or folder is place) else ""
            hint = (
                ""
                if place.samefile(out) or not room
                else "use --free-source to keep only a few source files at a time, or "
            )
            raise MachineError(
                f"{folder}: {_bytes(size)}{files} are still to be written but only {_bytes(free)} are free; "
                f"{hint}free some space, then run the same command again to continue"
            )


def _bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 10**9 else f"{-(-size // 10**6)} MB"


def _short(value: object) -> str:
    if isinstance(value, tuple):
        if len(value) > 2 and value == tuple(range(value[0], value[-1] + 1)):
            return f"{value[0]}-{value[-1]}"
        value = list(value)
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
