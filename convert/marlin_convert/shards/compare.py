"""Which shards, tensors and experts of two conversions differ, by the digests that they keep. No shard is
read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from marlin_convert.arguments import refuse_odd
from marlin_convert.documents.manifest import Manifest, Shard, StoredTensor, read_manifest
from marlin_convert.documents.results import Differences, DifferingPart
from marlin_convert.errors import OutputError
from marlin_convert.shards.kept_source import ZEROS, KeptSource, read_kept_source, sound_bytes
from marlin_convert.slicing import Topology
from marlin_convert.storage.shard_file import is_filler

_Thing = TypeVar("_Thing")
ONE, OTHER, DIFFERS = "only in the first", "only in the second", "differs"


def diff(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> Differences:
    """Compare two converted folders by what their manifests and digests say; `verify` tells whether the files
    are so. The result is true where nothing differs.

    Of the same split and layout, shards are compared with each other, down to single experts, and the
    documents. Otherwise what both keep of their sources is: each source tensor that both were made from.

    Raises UsageError, or OutputError where a manifest or what is compared is damaged.
    """
    refuse_odd(places={"one": one, "other": other})
    folders = Path(one), Path(other)
    first, second = (read_manifest(folder) for folder in folders)
    if _split(first) == _split(second):
        blobs = [_digests(*pair) for pair in zip(folders, (first, second), strict=True)]
        parts = [*_shards(first, second, (blobs[0], blobs[1])), *_files(first, second)]
        if first.source.id != second.source.id:
            parts.append(DifferingPart("manifest.json", "has another source id"))
        compared = len({shard.path for shard in (*first.shards, *second.shards)})
        return Differences(str(one), str(other), "shards", not parts, compared, tuple(parts))
    kept = [read_kept_source(*pair) for pair in zip(folders, (first, second), strict=True)]
    known = [_known(each) for each in kept]
    parts = list(_sources(known[0], known[1]))
    if kept[0].config != kept[1].config:
        parts.append(DifferingPart("source/config.json", DIFFERS))
    compared = len(known[0].keys() & known[1].keys())
    return Differences(str(one), str(other), "source tensors", not parts, compared, tuple(parts))


def _split(manifest: Manifest) -> tuple[object, ...]:
    return manifest.layout, manifest.tp, manifest.ep, manifest.parallel.padding


def _digests(out: Path, manifest: Manifest) -> bytes:
    blob = sound_bytes(out, manifest, "digests.bin")
    if blob is None:
        raise OutputError(
            f"{out}/digests.bin is damaged or missing, so experts cannot be compared; make OUT again: convert"
            " with --overwrite"
        )
    return blob


def _pairs(
    one: Mapping[str, _Thing], other: Mapping[str, _Thing]
) -> Iterator[tuple[str, _Thing | None, _Thing | None]]:
    for name in dict.fromkeys((*one, *other)):
        yield name, one.get(name), other.get(name)


def _shards(first: Manifest, second: Manifest, blobs: tuple[bytes, bytes]) -> Iterator[DifferingPart]:
    named = [{shard.path: shard for shard in manifest.shards} for manifest in (first, second)]
    topology = Topology.of(first.tp, first.ep)
    for path, a, b in _pairs(named[0], named[1]):
        if a is None or b is None:
            yield DifferingPart(path, OTHER if a is None else ONE)
        elif a.digest != b.digest:
            group = topology.ep_rank(a.rank or 0)
            yield from _tensors(a, b, blobs, group)  # none where only the header names another source


def _tensors(a: Shard, b: Shard, blobs: tuple[bytes, bytes], group: int) -> Iterator[DifferingPart]:
    named = [{t.name: t for t in shard.tensors if not is_filler(t.name)} for shard in (a, b)]
    for name, x, y in _pairs(named[0], named[1]):
        if x is None or y is None:
            yield DifferingPart(a.path, OTHER if x is None else ONE, name)
        elif (x.dtype, x.shape, x.digest) != (y.dtype, y.shape, y.digest):
            yield DifferingPart(a.path, DIFFERS, name, _experts(x, y, blobs, group))


def _experts(
    x: StoredTensor, y: StoredTensor, blobs: tuple[bytes, bytes], group: int
) -> tuple[int, ...] | None:
    """The experts whose parts differ, numbered as in the source; None where it is no matter of experts."""
    if x.experts is None or y.experts is None or (x.dtype, x.shape) != (y.dtype, y.shape):
        return None
    local = x.shape[0]
    pieces = [
        [blob[begin + 16 * e : begin + 16 * e + 16] for e in range(local)]
        for blob, begin in zip(blobs, (x.experts, y.experts), strict=True)
    ]
    return tuple(group * local + e for e in range(local) if pieces[0][e] != pieces[1][e])


def _files(first: Manifest, second: Manifest) -> Iterator[DifferingPart]:
    """The documents but those of digests: what these say is compared part by part."""
    named = [
        {file.path: file.digest for file in manifest.files if not file.path.endswith("digests.bin")}
        for manifest in (first, second)
    ]
    for path, a, b in _pairs(named[0], named[1]):
        if a != b:
            yield DifferingPart(path, DIFFERS if a and b else ONE if a else OTHER)


def _known(kept: KeptSource) -> dict[str, tuple[object, ...]]:
    """dtype, shape and digest of each source tensor that was converted."""
    return {
        name: (entry.dtype, entry.shape, kept.digests[name])
        for name, entry in kept.entries.items()
        if kept.digests[name] != ZEROS
    }


def _sources(
    one: Mapping[str, tuple[object, ...]], other: Mapping[str, tuple[object, ...]]
) -> Iterator[DifferingPart]:
    for name, a, b in _pairs(one, other):
        if a != b:
            yield DifferingPart("source", DIFFERS if a and b else ONE if a else OTHER, name)
