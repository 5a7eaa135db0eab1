"""manifest.json in a rank's folder: what the whole one says of this rank, for a loader that needs no more."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec.structs import replace

from marlin_convert.documents.bounds import MANIFEST
from marlin_convert.documents.manifest import (
    MANIFEST_NAME,
    Manifest,
    Shard,
    parse_manifest,
    read_manifest,
    sealed_manifest,
)
from marlin_convert.errors import UsageError
from marlin_convert.storage.files import digest, read_small
from marlin_convert.words import count


def rank_folders(manifest: Manifest) -> dict[str, int]:
    """The folders of the ranks that are there, and whose each is."""
    return {shard.folder: shard.rank for shard in manifest.shards if shard.rank is not None}


def of_rank(manifest: Manifest, folder: str) -> Manifest:
    """What a manifest says of the rank whose folder that is, and of common/ where that is of its stage."""
    folders = rank_folders(manifest)
    rank, stage = folders.pop(folder), _stage(folder)

    def is_here(path: str) -> bool:
        return path.rpartition("/")[0] not in folders and _stage(path) in ("", stage)

    shards: tuple[Shard, ...] = tuple(shard for shard in manifest.shards if is_here(shard.path))
    units = tuple(unit for unit in manifest.units if any(shard.unit == unit.name for shard in shards))
    return replace(
        manifest,
        ranks=(rank,),
        layers=tuple(unit.layer for unit in units if unit.layer is not None),
        complete=manifest.complete and not folders,
        units=units,
        shards=shards,
        files=tuple(file for file in manifest.files if is_here(file.path)),
    )


def _stage(path: str) -> str:
    """The folder of the stage that a path lies in; empty where it lies in none."""
    first, below, _ = path.partition("/")
    return first if below and first.startswith("stage-") else ""


def of_stage(manifest: Manifest, stage: int) -> Manifest:
    """What a manifest says of a pipeline stage. Raises UsageError where there is none of that number."""
    parallel = manifest.parallel
    if stage >= parallel.pp:
        raise UsageError(f"there is no stage {stage}; the conversion has {count(parallel.pp, 'stage')}")
    units = tuple(unit for unit in manifest.units if parallel.pp == 1 or parallel.stage_of(unit) == stage)
    names = {unit.name for unit in units}
    return replace(
        manifest,
        layers=tuple(unit.layer for unit in units if unit.layer is not None),
        complete=manifest.complete and parallel.pp == 1,
        units=units,
        shards=tuple(shard for shard in manifest.shards if shard.unit in names),
    )


def read_rank_manifest(out: Path, rank: int | None, stage: int | None = None) -> Manifest:
    """What the manifest of a converted folder says of a rank, in one stage (None: in all): the rank's own, a
    small part of the whole one, where that lists it and it is as it was written; else the whole one. Raises
    what `read_manifest` raises.

    The whole one is not parsed but looked through: in JSON no text of a string has bare quotes, so what is
    found is the entry of a file.
    """
    if rank is None:
        return read_manifest(out)
    raw = sealed_manifest(out)
    entry = re.search(
        rb'"path":"(%brank-0*%d-of-[0-9]+/%b)","size":[0-9]+,"digest":"([0-9a-f]{32})"'
        % (
            b"" if stage is None else b"(?:stage-0*%d-of-[0-9]+/)?" % stage,
            rank,
            re.escape(MANIFEST_NAME.encode()),
        ),
        raw,
    )
    if entry is not None:
        path = out / entry[1].decode()
        try:
            own = read_small(path, MANIFEST)
        except OSError:
            own = b""
        if digest(own).hex() == entry[2].decode():
            return parse_manifest(own, path)
    return parse_manifest(raw, out / MANIFEST_NAME)
