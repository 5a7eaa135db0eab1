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
from marlin_convert.storage.files import digest, read_small


def rank_folders(manifest: Manifest) -> dict[str, int]:
    """The folders of the ranks that are there, and whose each is."""
    return {shard.folder: shard.rank for shard in manifest.shards if shard.rank is not None}


def of_rank(manifest: Manifest, folder: str) -> Manifest:
    """What a manifest says of the rank whose folder that is, and of common/."""
    folders = rank_folders(manifest)
    rank = folders.pop(folder)

    def is_here(path: str) -> bool:
        return path.rpartition("/")[0] not in folders

    shards: tuple[Shard, ...] = tuple(shard for shard in manifest.shards if is_here(shard.path))
    files = tuple(file for file in manifest.files if is_here(file.path))
    whole = manifest.complete and manifest.tp == 1
    return replace(manifest, ranks=(rank,), complete=whole, shards=shards, files=files)


def read_rank_manifest(out: Path, rank: int | None) -> Manifest:
    """What the manifest of a converted folder says of a rank: the rank's own, a small part of the whole one,
    where that lists it and it is as it was written; else the whole one. Raises what `read_manifest` raises.

    The whole one is not parsed but looked through: in JSON no text of a string has bare quotes, so what is
    found is the entry of a file.
    """
    if rank is None:
        return read_manifest(out)
    raw = sealed_manifest(out)
    entry = re.search(
        rb'"path":"(rank-0*%d-of-[0-9]+/%b)","size":[0-9]+,"digest":"([0-9a-f]{32})"'
        % (rank, re.escape(MANIFEST_NAME.encode())),
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
