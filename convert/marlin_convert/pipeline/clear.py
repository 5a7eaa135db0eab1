"""`--overwrite`: remove a conversion and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from marlin_convert.checkpoint.index import INDEX_NAME
from marlin_convert.documents.manifest import read_manifest
from marlin_convert.errors import OutputError, UsageError
from marlin_convert.pipeline.work_folder import WORK
from marlin_convert.storage.files import sync_folder
from marlin_convert.storage.writer import PARTIAL

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
