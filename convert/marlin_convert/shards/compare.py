"""Which shards, tensors and experts of two conversions differ, by the digests that they keep. No shard is
read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from marlin_convert.arguments import refuse_odd
from marlin_convert.documents.expert_places import EXPERTS_NAME
from marlin_convert.documents.manifest import MANIFEST_NAME, Manifest, Shard, StoredTensor, read_manifest
from marlin_convert.documents.results import Differences, DifferingPart
from marlin_convert.errors import OutputError
from marlin_convert.shards.kept_source import ZEROS, KeptSource, listed_bytes, read_sound_source
from marlin_convert.storage.files import digest
from marlin_convert.storage.shard_file import is_filler

_Thing = TypeVar("_Thing")
ONE, OTHER, DIFFERS = "only in the first", "only in the second", "differs"
#: documents that another split has others of
OF_A_SPLIT = ("README.md", "config.json")


def diff(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> Differences:
    """Compare two converted folders by what their manifests and digests say; `verify` tells whether the files
    are so. The result is true where nothing differs.

    Of the same split and layout, shards are compared with each other, down to single experts, and the
    documents, manifest.json key by key. Otherwise what both keep of their sources is, and what both copied of
    it: each source tensor, and each file beside the weights.

    Raises UsageError, or OutputError where a manifest or what is compared is damaged.
    """
    refuse_odd(places={"one": one, "other": other})
    folders = Path(one), Path(other)
    manifests = read_manifest(folders[0]), read_manifest(folders[1])
    alike = _split(manifests[0]) == _split(manifests[1]) and _placed_alike(*manifests)
    compared, parts = (_by_shards if alike else _by_sources)(folders, manifests)
    by = "shards" if alike else "source tensors"
    return Differences(str(one), str(other), by, not parts, compared, tuple(parts))


def _split(manifest: Manifest) -> tuple[object, ...]:
    return manifest.layout, replace(manifest.parallel, rules="")


def _placed_alike(one: Manifest, other: Manifest) -> bool:
    """Whether experts are in the same slots of the layers that both have."""
    slots = {unit.name: unit.slots for unit in one.units}
    return all(unit.slots == slots.get(unit.name, unit.slots) for unit in other.units)


def _by_shards(
    folders: tuple[Path, Path], manifests: tuple[Manifest, Manifest]
) -> tuple[int, list[DifferingPart]]:
    blobs = _expert_digests(folders[0], manifests[0]), _expert_digests(folders[1], manifests[1])
    compared = {shard.path for manifest in manifests for shard in manifest.shards}
    parts = [*_shards(manifests, blobs), *_files(manifests), *_keys(manifests)]
    return len(compared), parts or list(_rank_manifests(manifests))


def _by_sources(
    folders: tuple[Path, Path], manifests: tuple[Manifest, Manifest]
) -> tuple[int, list[DifferingPart]]:
    kept = read_sound_source(folders[0], manifests[0]), read_sound_source(folders[1], manifests[1])
    known = _known(kept[0]), _known(kept[1])
    parts = [DifferingPart("source", what, name) for name, a, b in _pairs(*known) if (what := _differs(a, b))]
    if kept[0].config != kept[1].config:
        parts.append(DifferingPart("source/config.json", DIFFERS))
    parts += [part for part in _files(manifests) if "/" not in part.path and part.path not in OF_A_SPLIT]
    return len(known[0].keys() & known[1].keys()), parts


def _expert_digests(out: Path, manifest: Manifest) -> bytes:
    """digests.bin. Raises OutputError where a digest of the manifest is not that of the digests it stands
    for: what looks the same need not be so then.
    """
    blob = listed_bytes(out, manifest, "digests.bin")
    for shard in manifest.shards:
        for name, said, joined in _joined(shard, blob):
            if digest(joined).hex() != said:
                raise OutputError(
                    f"{out}/manifest.json: its digest of {name} is not that of the digests it is made of; run"
                    " verify"
                )
    return blob


def _joined(shard: Shard, blob: bytes) -> Iterator[tuple[str, str, bytes]]:
    """What has a digest of digests: its name, that digest, and those it is of."""
    parts = "".join(tensor.digest for tensor in shard.tensors)
    yield shard.path, shard.digest, bytes.fromhex(shard.header + parts)
    for tensor in shard.tensors:
        if tensor.experts is not None:
            end = tensor.experts + 16 * sum(tensor.shape[:1])
            said = tensor.digest if end <= len(blob) else "that of digests behind the end"
            yield tensor.name, said, blob[tensor.experts : end]


def _pairs(
    one: Mapping[str, _Thing], other: Mapping[str, _Thing]
) -> Iterator[tuple[str, _Thing | None, _Thing | None]]:
    for name in dict.fromkeys((*one, *other)):
        yield name, one.get(name), other.get(name)


def _differs(a: object, b: object) -> str | None:
    """How two things of one name differ, of which one may be missing; None where they are equal."""
    return None if a == b else OTHER if a is None else ONE if b is None else DIFFERS


def _shards(manifests: tuple[Manifest, Manifest], blobs: tuple[bytes, bytes]) -> Iterator[DifferingPart]:
    named = [{shard.path: shard for shard in manifest.shards} for manifest in manifests]
    held = manifests[0].held()
    same_source = manifests[0].source.id == manifests[1].source.id
    for path, a, b in _pairs(*named):
        if a is None or b is None:
            yield DifferingPart(path, OTHER if a is None else ONE)
        elif _content(a, same_source) != _content(b, same_source):
            yield from list(_tensors(a, b, blobs, held(a))) or [DifferingPart(path, DIFFERS)]


def _content(shard: Shard, same_source: bool) -> Shard:
    """All of a shard but where in digests.bin its experts are, and, of other sources, its header, which names
    the source.
    """
    own = {} if same_source else {"header": "", "digest": ""}
    return replace(shard, tensors=tuple(replace(tensor, experts=None) for tensor in shard.tensors), **own)


def _tensors(a: Shard, b: Shard, blobs: tuple[bytes, bytes], held: Sequence[int]) -> Iterator[DifferingPart]:
    named = [{t.name: t for t in shard.tensors if not is_filler(t.name)} for shard in (a, b)]
    for name, x, y in _pairs(*named):
        if x is None or y is None:
            yield DifferingPart(a.path, OTHER if x is None else ONE, name)
        elif (x.dtype, x.shape, x.digest) != (y.dtype, y.shape, y.digest):
            yield DifferingPart(a.path, DIFFERS, name, _experts(x, y, blobs, held))


def _experts(
    x: StoredTensor, y: StoredTensor, blobs: tuple[bytes, bytes], held: Sequence[int]
) -> tuple[int, ...] | None:
    """The experts whose parts differ, numbered as in the source; None where it is no matter of experts."""
    if x.experts is None or y.experts is None or (x.dtype, x.shape) != (y.dtype, y.shape):
        return None
    local = x.shape[0]
    pieces = [
        [blob[begin + 16 * e : begin + 16 * e + 16] for e in range(local)]
        for blob, begin in zip(blobs, (x.experts, y.experts), strict=True)
    ]
    return tuple(sorted({e for e, one, other in zip(held, *pieces, strict=True) if one != other}))


def _files(manifests: tuple[Manifest, Manifest]) -> Iterator[DifferingPart]:
    """The documents but those whose content is compared part by part: digests.bin and the ranks' manifests.
    experts.json, which names the source and came with a later release, only tells of shards, too.
    """
    named = [
        {
            file.path: file.digest
            for file in manifest.files
            if file.path != "digests.bin" and not file.path.endswith(f"/{MANIFEST_NAME}")
        }
        for manifest in manifests
    ]
    same_source = manifests[0].source.id == manifests[1].source.id
    for path, a, b in _pairs(*named):
        if path.endswith(f"/{EXPERTS_NAME}") and not (a and b and same_source):
            continue
        if what := _differs(a, b):
            yield DifferingPart(path, what)


def _rank_manifests(manifests: tuple[Manifest, Manifest]) -> Iterator[DifferingPart]:
    """They say what the whole ones say, so where these agree, they must."""
    named = [{file.path: file.digest for file in manifest.files} for manifest in manifests]
    for path, a, b in _pairs(*named):
        if path.endswith(f"/{MANIFEST_NAME}") and a and b and a != b:
            yield DifferingPart(path, DIFFERS)


def _keys(manifests: tuple[Manifest, Manifest]) -> Iterator[DifferingPart]:
    """The manifest's keys that say something else; what is compared apart, and its own digest, is none."""
    differing = []
    for name in sorted(set(Manifest.__struct_fields__) - {"digest", "shards", "files"}):
        a, b = (getattr(manifest, name) for manifest in manifests)
        if a != b and isinstance(a, Struct):
            differing += [
                f"{name}.{key}" for key in a.__struct_fields__ if getattr(a, key) != getattr(b, key)
            ]
        elif a != b:
            differing.append(name)
    if differing:
        yield DifferingPart("manifest.json", DIFFERS, keys=tuple(differing))


def _known(kept: KeptSource) -> dict[str, tuple[object, ...]]:
    """dtype, shape and digest of each source tensor that was converted."""
    return {
        name: (entry.dtype, entry.shape, kept.digests[name])
        for name, entry in kept.entries.items()
        if kept.digests[name] != ZEROS
    }
