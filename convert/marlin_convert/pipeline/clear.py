"""`--overwrite`: remove a conversion and nothing else; and reuse what is whole of one that has lost files."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from marlin_convert.checkpoint.source import INDEX_NAME
from marlin_convert.checks.kept_source import ZEROS, read_kept_source, sound_bytes
from marlin_convert.documents.manifest import Manifest, Shard, Unit, read_manifest
from marlin_convert.documents.records import ExpertDigests, FinishedFile, FinishedUnit
from marlin_convert.errors import OutputError, UsageError
from marlin_convert.files import sync_folder
from marlin_convert.pipeline.records import WORK, WorkFolder
from marlin_convert.planning.output import OutputPlan
from marlin_convert.shards.writer import PARTIAL

#: what every conversion writes at the top, beside the small files it copies
OWN = ("manifest.json", "provenance.json", "digests.bin", "config.json", "README.md")


def clear_output(out: Path, copied: Iterable[str]) -> None:
    """Remove a conversion, manifest first, so that at no time a manifest stands for files that are gone.

    `copied` are the names of the small files that a conversion of this source copies. Raises UsageError,
    having removed nothing, where OUT holds files that no conversion wrote.
    """
    known = {*OWN, *copied, *_listed(out)}
    foreign = [path for path in _files(out) if str(path) not in known and not _own_form(path)]
    if foreign:
        raise UsageError(
            f"{out} holds {len(foreign)} files that are not of a conversion, such as {foreign[0]}; move them"
            " away, then use --overwrite"
        )
    (out / WORK).mkdir(exist_ok=True)  # marks the folder as ours until the new run has begun
    if (out / "manifest.json").exists():
        (out / "manifest.json").unlink()
        sync_folder(out)
    for path in _files(out):
        if path.parts[0] != WORK:
            (out / path).unlink()
    for folder in sorted(
        (path for path in out.rglob("*") if path.is_dir() and path.name != WORK), reverse=True
    ):
        if WORK not in folder.relative_to(out).parts:
            folder.rmdir()
    shutil.rmtree(out / WORK)


def _files(out: Path) -> Iterator[Path]:
    return (
        path.relative_to(out) for path in sorted(out.rglob("*")) if not path.is_dir() or path.is_symlink()
    )


def _listed(out: Path) -> set[str]:
    try:
        manifest = read_manifest(out)
    except OutputError:
        return set()
    return {file.path for file in manifest.files} | {shard.path for shard in manifest.shards}


def _own_form(path: Path) -> bool:
    """Whether a file has a name that only a conversion gives: an unfinished one has no list of its files."""
    first, name = path.parts[0], path.name.removesuffix(PARTIAL)
    if first in (WORK, "source"):
        return True
    if first == "common" or first.startswith("rank-"):
        return len(path.parts) == 2 and (name == INDEX_NAME or name.endswith(".safetensors"))
    return len(path.parts) == 1 and path.name.endswith(PARTIAL)


def has_lost_files(out: Path, manifest: Manifest) -> bool:
    """Whether a finished OUT lacks a file, or has one of another size. What is in the files is for `verify`
    to say.
    """
    sizes = {shard.path: shard.size for shard in manifest.shards} | {
        file.path: file.size for file in manifest.files
    }
    return not all(_is_there(out, path, size) for path, size in sizes.items())


def _is_there(out: Path, path: str, size: int) -> bool:
    return (out / path).is_file() and (out / path).stat().st_size == size


def reopen(out: Path, plan: OutputPlan, manifest: Manifest, work: WorkFolder) -> None:
    """Turn a finished OUT that has lost files into one that is being made: records for its units, and no
    manifest.

    A unit that has lost a file gets none, and is made anew. Raises OutputError where what is kept of the
    source is gone or damaged too.
    """
    kept = read_kept_source(out, manifest)
    blob, kept_blob = (sound_bytes(out, manifest, name) for name in ("digests.bin", "source/digests.bin"))
    if not (blob and kept_blob):
        name = "digests.bin" if not blob else "source/digests.bin"
        raise OutputError(
            f"{out}/{name} is damaged or missing, so what is left cannot be reused; start again with"
            " --overwrite"
        )
    planned = {unit.name for unit in plan.units}
    lost = {shard.unit for shard in manifest.shards if not _is_there(out, shard.path, shard.size)}
    for unit in manifest.units:
        if unit.name in planned - lost:
            work.record(
                _record(
                    unit,
                    [shard for shard in manifest.shards if shard.unit == unit.name],
                    kept.digests,
                    blob,
                    plan.experts,
                )
            )
    (out / "manifest.json").unlink()
    sync_folder(out)


def _record(
    unit: Unit, shards: list[Shard], digests: dict[str, bytes], blob: bytes, experts: int
) -> FinishedUnit:
    files = tuple(
        FinishedFile(shard.rank, shard.size, shard.header, {t.name: t.digest for t in shard.tensors})
        for shard in shards
    )
    stacked = tuple(
        ExpertDigests(shard.rank, tensor.name, blob[tensor.experts : tensor.experts + 16 * tensor.shape[0]])
        for shard in shards
        for tensor in shard.tensors
        if tensor.experts is not None
    )
    patterns = [source for origin in unit.tensors for source in origin.sources] + list(unit.checked)
    names = [
        pattern.replace("{expert}", str(e))
        for pattern in patterns
        for e in (range(experts) if "{expert}" in pattern else (0,))
    ]
    return FinishedUnit(
        unit.name,
        files,
        stacked,
        {name: digests[name].hex() for name in names if digests.get(name, ZEROS) != ZEROS},
    )
