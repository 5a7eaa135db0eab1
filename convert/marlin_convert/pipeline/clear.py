"""`--overwrite`: remove a conversion and nothing else.

Only what this tool writes is ever removed: in a folder that carries a mark of it, by name, kind and place,
and never through a link. Anything else in the folder means that nothing is removed at all.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath

from marlin_convert.checkpoint.source import Source
from marlin_convert.documents.manifest import Manifest, read_manifest
from marlin_convert.documents.records import LOCK, TURN, WORK
from marlin_convert.errors import ConvertError, OutputError, UsageError
from marlin_convert.pipeline.ours import (
    FOLDERS,
    IN_WORK,
    UNTIL_WHOLE,
    is_own,
    is_rank_manifest,
    rank_manifests,
    refuse_no_shard,
)
from marlin_convert.pipeline.work_folder import REMOVING, WorkFolder
from marlin_convert.planning.output_plan import OutputPlan, OutputUnit
from marlin_convert.shards.kept_source import DIGESTS
from marlin_convert.storage.files import on_its_own, sync_folder
from marlin_convert.storage.writer import PARTIAL
from marlin_convert.words import count

_HALF = re.compile(f"(?x) {UNTIL_WHOLE}")
#: removed by who holds them
HELD = (Path(WORK) / LOCK, Path(WORK) / TURN)


def removable(out: Path, source: Source) -> list[Path]:
    """Every file of the conversion in OUT, relative to it, the manifest first and those of ranks last: where
    a removal breaks off, they tell which documents were edited before it goes on.

    Where there is no list of what is in OUT, a small file that was copied is told by the manifests of ranks,
    or by what `source`, which is to be converted, has. Raises UsageError where OUT holds anything that no
    conversion wrote.
    """
    listed, not_ours = _listed(out), _not_ours(out)
    told = set() if listed is not None else _told_by_ranks(out)
    files, foreign = [], []
    for path, kind in _walk(out):
        below = stat.S_ISDIR(kind) or len(path.parts) > 1
        formed = not (below and str(path).startswith(not_ours))
        if formed and stat.S_ISREG(kind) and (str(path) in told or is_own(out, path, listed, source)):
            if path not in HELD:
                files.append(path)
        elif not (
            formed and stat.S_ISDIR(kind) and FOLDERS.fullmatch(str(path)) and not on_its_own(out / path)
        ):
            foreign.append(path)
    if foreign:
        raise UsageError(
            f"{out} holds {count(len(foreign), 'file')} not of a conversion, such as {foreign[0]}; move them"
            " away, then use --overwrite"
        )
    return sorted(files, key=lambda path: (path != Path("manifest.json"), is_rank_manifest(str(path)), path))


def clear_output(out: Path, source: Source) -> None:
    """Remove a conversion, manifest first, so that at no time a manifest stands for files that are gone. The
    folder is marked until the last file has gone. Raises UsageError, having removed nothing, as `removable`
    does.
    """
    files = removable(out, source)
    WorkFolder(out).mark_removal([str(path) for path in files])
    for path in files:
        if path.parts[0] != WORK:
            (out / path).unlink()
            if path.name == "manifest.json":
                sync_folder(out)
    for path in files:
        if path.parts[0] == WORK and path.name != REMOVING:
            (out / path).unlink(missing_ok=True)
    for folder in sorted((path for path, kind in _walk(out) if stat.S_ISDIR(kind)), reverse=True):
        if folder != PurePath(WORK):
            (out / folder).rmdir()
    (out / WORK / REMOVING).unlink()
    with suppress(OSError):  # unless what is locked is still in it
        (out / WORK).rmdir()


def leftovers(out: Path, plan: OutputPlan, units: Iterable[OutputUnit]) -> list[Path]:
    """What a run that broke off left of units which have no record: half-written shards, and whole ones, but
    those not where the conversion was finished once: of a repair that broke off they may be right, and the
    source may turn out to be wrong. Raises UsageError where something else is in the place of a shard.
    """
    finished_once, found = (out / DIGESTS).exists(), []
    for path in (out / plan.path(unit, rank) for unit in units for rank in unit.ranks):
        refuse_no_shard(path)
        if not finished_once and path.exists():
            found.append(path)
        found += (
            half
            for half in path.parent.glob(f"{path.name}*{PARTIAL}")
            if _HALF.fullmatch(half.name.removeprefix(path.name)) and half.is_file() and not half.is_symlink()
        )
    return found


def remove_work(out: Path) -> None:
    """The work is done: what is ours in the work folder is removed, and it with that, unless somebody put
    something else in it. What cannot be removed stays; the conversion is whole with it.
    """
    if (out / WORK).is_symlink():
        return
    with suppress(OSError):
        found = [(Path(WORK) / path, kind) for path, kind in _walk(out / WORK)]
        for path, kind in found:
            if stat.S_ISREG(kind) and IN_WORK.fullmatch(str(path)):
                with suppress(OSError):
                    (out / path).unlink()
        own = [path for path, kind in found if stat.S_ISDIR(kind) and FOLDERS.fullmatch(str(path))]
        for folder in [*sorted(own, reverse=True), Path(WORK)]:
            with suppress(OSError):
                (out / folder).rmdir()


def _walk(out: Path) -> Iterator[tuple[Path, int]]:
    """Everything below OUT with its kind; links are seen, never followed."""
    for folder, folders, names in os.walk(out):
        for name in sorted([*folders, *names]):
            path = Path(folder) / name
            yield path.relative_to(out), path.lstat().st_mode


def _not_ours(out: Path) -> tuple[str, ...]:
    """How paths begin of what the conversion in OUT, finished or begun, has not: with stages no ranks at the
    top, without them no folders of stages. Who has such a folder there has it of his own.
    """
    pp = None
    with suppress(ConvertError):
        pp = read_manifest(out).parallel.pp
    with suppress(ConvertError):
        job = WorkFolder(out).job() if pp is None else None
        pp = job.options.pp if job is not None else pp
    return () if pp is None else ("stage-",) if pp == 1 else ("rank-", "common")


def _told_by_ranks(out: Path) -> set[str]:
    """The documents that the manifests of ranks list."""
    return {file.path for manifest in rank_manifests(out).values() if manifest for file in manifest.files}


def _listed(out: Path) -> set[str] | None:
    """The files of the conversion in OUT: as they were when its removal began, else as its manifest has them,
    which may be set aside; None where nothing tells.
    """
    work = WorkFolder(out)
    with suppress(OutputError):
        if (removal := work.removal()) is not None:
            return set(removal.files)
    looks: tuple[Callable[[], Manifest | None], ...] = (partial(read_manifest, out), work.before)
    for look in looks:
        with suppress(OutputError, UsageError):  # what else is there may look like a checkpoint
            if (manifest := look()) is not None:
                files, shards = manifest.files, manifest.shards
                return {"manifest.json"} | {each.path for each in files} | {each.path for each in shards}
    return None
