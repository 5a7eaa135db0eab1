"""`--overwrite`: remove a conversion and nothing else.

Only what this tool writes is ever removed: in a folder that carries a mark of it, by name, kind and place,
and never through a link. Anything else in the folder means that nothing is removed at all.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePath

from marlin_convert.checkpoint.index import INDEX_NAME
from marlin_convert.documents.manifest import read_manifest
from marlin_convert.errors import ConvertError, UsageError
from marlin_convert.pipeline.work_folder import BEFORE, REMOVING, WORK, WorkFolder
from marlin_convert.planning.output_plan import OutputPlan, OutputUnit
from marlin_convert.shards.kept_source import DIGESTS
from marlin_convert.storage.files import on_its_own, sync_folder
from marlin_convert.storage.writer import PARTIAL
from marlin_convert.words import count

#: what every conversion writes at the top, beside the small files it copies
OWN = frozenset({"manifest.json", "provenance.json", "digests.bin", "config.json", "README.md"})
_INDEX, _WORK, _REMOVING = map(re.escape, (INDEX_NAME, WORK, REMOVING))
_PARTIAL = f"(?: {re.escape(PARTIAL)} )?"
_STAGE = r"(?: stage-\d+-of-\d+ / )?"
#: below the top, as patterns of whole paths
FORMS = re.compile(
    rf"""(?x)
    {_STAGE} (?: rank-\d+-of-\d+ | common ) / {_INDEX}
    | {_STAGE} rank-\d+-of-\d+ / (?: manifest | experts ) \.json
    | {_STAGE} (?: rank-\d+-of-\d+ | common )
        / (?: layer-\d+ | top | embed | head | common ) \.safetensors {_PARTIAL}
    | source / (?: config\.json | README\.md | digests\.bin | {_INDEX} | headers / [^/]+ \.gz )
    | {_WORK} / (?: job\.json | {_REMOVING} | manifest\.json | units / [^/]+ \.json ) {_PARTIAL}
    | {_WORK} / {BEFORE} / manifest\.json
    | {_WORK} / documents / \d+
    | {_WORK} / staging / .+
    """
)
FOLDERS = re.compile(
    rf"""(?x)
    {_STAGE} (?: rank-\d+-of-\d+ | common ) | stage-\d+-of-\d+ | source | source/headers
    | {_WORK} (?: / (?: units | documents | {BEFORE} | staging (?: /.+ )? ) )?
    """
)


def removable(out: Path, copied: Iterable[str]) -> list[Path]:
    """Every file of the conversion in OUT, relative to it, the manifest first.

    `copied` are the names of the small files that a conversion of this source copies: what else could tell
    them, where there is no manifest that lists them. Raises UsageError where OUT holds anything that no
    conversion wrote.
    """
    listed, not_ours = _listed(out), _not_ours(out)
    names = OWN | (set(copied) if listed is None else listed)
    files, foreign = [], []
    for path, kind in _walk(out):
        formed = not str(path).startswith(not_ours) and (
            FORMS.fullmatch(str(path))
            if stat.S_ISREG(kind)
            else stat.S_ISDIR(kind) and FOLDERS.fullmatch(str(path)) and not on_its_own(out / path)
        )
        if not formed and not (stat.S_ISREG(kind) and str(path) in names):
            foreign.append(path)
        elif stat.S_ISREG(kind):
            files.append(path)
    if foreign:
        raise UsageError(
            f"{out} holds {count(len(foreign), 'file')} not of a conversion, such as {foreign[0]}; move them"
            " away, then use --overwrite"
        )
    return sorted(files, key=lambda path: (path != Path("manifest.json"), path))


def clear_output(out: Path, copied: Iterable[str]) -> None:
    """Remove a conversion, manifest first, so that at no time a manifest stands for files that are gone. The
    folder is marked until the last file has gone. Raises UsageError, having removed nothing, as `removable`
    does.
    """
    files = removable(out, copied)
    work = WorkFolder(out)
    work.mark_removal()
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
    (out / WORK).rmdir()


def stale_files(out: Path, plan: OutputPlan, units: Iterable[OutputUnit]) -> list[Path]:
    """Shards that lie under the names of units which have no record: a run broke off between the two, and
    they are made anew. None where the conversion was finished once: of a repair that broke off they may be
    right, and the source may turn out to be wrong.
    """
    if (out / DIGESTS).exists():
        return []
    paths = [out / plan.path(unit, rank) for unit in units for rank in unit.ranks]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def remove_work(out: Path) -> None:
    """The work is done: what is ours in the work folder is removed, and it with that, unless somebody put
    something else in it. What cannot be removed stays; the conversion is whole with it.
    """
    if (out / WORK).is_symlink():
        return
    with suppress(OSError):
        found = [(Path(WORK) / path, kind) for path, kind in _walk(out / WORK)]
        for path, kind in found:
            if stat.S_ISREG(kind) and FORMS.fullmatch(str(path)):
                with suppress(OSError):
                    (out / path).unlink()
        own = [path for path, kind in found if stat.S_ISDIR(kind) and FOLDERS.fullmatch(str(path))]
        for folder in [*sorted(own, reverse=True), Path(WORK)]:
            with suppress(OSError):
                (out / folder).rmdir()


def remove_partials(out: Path, folders: Iterable[str]) -> None:
    """Remove the shards that a killed run left half-written in the folders of a conversion."""
    for path in (path for folder in (*folders, WORK) for path in (out / folder).glob(f"*{PARTIAL}")):
        if FORMS.fullmatch(path.relative_to(out).as_posix()) and not path.is_symlink():
            path.unlink()


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


def _listed(out: Path) -> set[str] | None:
    """The files that the manifest lists; None without one."""
    try:
        manifest = read_manifest(out)
    except ConvertError:
        return None
    return {file.path for file in manifest.files} | {shard.path for shard in manifest.shards}
