"""What a converted folder can give back of the published checkpoint, file by file."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path

from marlin_convert.checkpoint.header import Header
from marlin_convert.checkpoint.index import INDEX_NAME
from marlin_convert.documents.manifest import Manifest, read_manifest
from marlin_convert.documents.restore import MissingFile
from marlin_convert.errors import OutputError, UsageError
from marlin_convert.pipeline.ours import OWN
from marlin_convert.shards.assembled import AssembledReader
from marlin_convert.shards.inspect import lost_shards
from marlin_convert.shards.kept_source import CONFIG_KEPT, KeptSource, read_sound_source, sound_bytes
from marlin_convert.shards.stored_index import StoredIndex
from marlin_convert.shards.stored_places import ExpertSource
from marlin_convert.words import count

#: a weight file's name, and one of a file beside them: at the top of a folder, and none that is hidden
WEIGHTS, SMALL = re.compile(r"[^./][^/]*\.safetensors"), re.compile(r"[^./][^/]*")


@dataclass(frozen=True)
class RestorePlan:
    """`files` are the weight files whose tensors are all here, in the order of their names, by their headers;
    `small` the other files, to be written when those are there, index and configuration last. `damaged` are
    such files that are not what they were, `lost` shards that are gone or of another size.
    """

    out: Path
    manifest: Manifest
    kept: KeptSource
    reader: AssembledReader
    index: StoredIndex
    files: tuple[Header, ...]
    small: dict[str, bytes]
    missing: tuple[MissingFile, ...]
    damaged: dict[str, OutputError]
    lost: frozenset[str]

    def sha256(self, name: str) -> str | None:
        """What is published as the digest of a weight file, where OUT has it."""
        return next((file.sha256 for file in self.manifest.source.files if file.name == name), None)

    def expert(self, tensor: str) -> Hashable:
        """What tensors have in common that are of one expert; None for others."""
        where = self.index.where(tensor)
        return (id(where.layer), where.expert) if isinstance(where, ExpertSource) else None


def plan_restore(out: Path, direct_io: bool) -> RestorePlan:
    """What can be restored of OUT. Raises OutputError where what it keeps of the source is damaged, so that
    nothing can be proven; UsageError where it is no conversion, or a part that holds no file whole.
    """
    manifest = read_manifest(out)
    kept = read_sound_source(out, manifest)
    index = StoredIndex.of(manifest, kept)
    found = {name: sound_bytes(out, manifest, path) for name, path in _small_files(out, manifest)}
    small = {name: data for name, data in found.items() if data is not None}
    damaged = {
        name: OutputError(f"what {out} keeps of it is damaged or missing") for name in found.keys() - small
    }
    names = [header.file for header in kept.headers]
    files, missing = [], []
    for header in kept.headers:
        if not WEIGHTS.fullmatch(header.file) or header.file in found or names.count(header.file) != 1:
            raise OutputError(f"{out}/manifest.json: {header.file!r} is no name of one weight file")
        if absent := index.missing(entry.name for entry in header.tensors):
            missing.append(MissingFile(header.file, str(absent)))
        else:
            files.append(header)
    if not files:
        raise UsageError(
            f"nothing can be restored: of {count(len(missing), 'weight file')} none is wholly in {out};"
            f" {missing[0].name}: it has not {missing[0].why}"
        )
    reader = AssembledReader(out, index, direct_io)
    lost = lost_shards(out, manifest)
    return RestorePlan(out, manifest, kept, reader, index, tuple(files), small, tuple(missing), damaged, lost)


def _small_files(out: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """The files that lay beside the weights, and where OUT has them."""
    listed = {file.path for file in manifest.files}
    kept = {"README.md": "source/README.md", INDEX_NAME: f"source/{INDEX_NAME}", "config.json": CONFIG_KEPT}
    for name in sorted(path for path in listed if "/" not in path and path not in OWN):
        if not SMALL.fullmatch(name) or name in kept:
            raise OutputError(f"{out}/manifest.json: {name!r} is no name of a file that is copied")
        yield name, name
    yield from ((name, path) for name, path in kept.items() if path in listed)
