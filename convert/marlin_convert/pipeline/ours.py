"""Which files of OUT are ours: by name, kind and place, and by what lists them or what is in them."""

from __future__ import annotations

import os
import re
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from marlin_convert.checkpoint.index import INDEX_NAME
from marlin_convert.checkpoint.source import Source
from marlin_convert.checkpoint.staging import PARTS
from marlin_convert.documents.bounds import LISTED
from marlin_convert.documents.manifest import Manifest, parse_manifest, sealed_manifest
from marlin_convert.documents.provenance import NAME as PROVENANCE
from marlin_convert.documents.provenance import is_as_written
from marlin_convert.documents.records import LOCK, TURN, WORK
from marlin_convert.errors import OutputError, UsageError
from marlin_convert.pipeline.work_folder import BEFORE, REMOVING, is_marked
from marlin_convert.storage.files import PAGE, open_regular, read_small
from marlin_convert.storage.shard_file import is_marked_shard
from marlin_convert.storage.writer import PARTIAL

#: what every conversion writes at the top, beside the small files it copies
OWN = frozenset({"manifest.json", PROVENANCE, "digests.bin", "config.json", "README.md"})
_INDEX, _WORK, _REMOVING, _PARTS = map(re.escape, (INDEX_NAME, WORK, REMOVING, PARTS))
#: the end of a name until the file is whole, with or without that of an attempt
UNTIL_WHOLE = rf"(?: \. [0-9a-f]{{8}} )? {re.escape(PARTIAL)}"
_PARTIAL = f"(?: {UNTIL_WHOLE} )?"
_CACHE = r"(?: /\.cache (?: /huggingface (?: /.+ )? )? )?"
_PART = r"(?: share-\d+-of-\d+ | layer-\d+ | top | embed | head | common )"
_UNIT = r"(?: layer-\d+ | top | embed | head | common )"
_STAGE = r"(?: stage-\d+-of-\d+ / )?"
#: below the top, as patterns of whole paths
FORMS = re.compile(
    rf"""(?x)
    {_STAGE} (?: rank-\d+-of-\d+ | common ) / {_INDEX}
    | {_STAGE} rank-\d+-of-\d+ / (?: manifest | experts ) \.json
    | {_STAGE} (?: rank-\d+-of-\d+ | common ) / {_UNIT} \.safetensors {_PARTIAL}
    | source / (?: config\.json | README\.md | digests\.bin | {_INDEX} | headers / [^/]+ \.safetensors\.gz )
    """
)
IN_WORK = re.compile(
    rf"""(?x)
    {_WORK} / (?:
        {LOCK} | {TURN}
        | (?: job\.json | {_REMOVING} | manifest\.json | units / {_UNIT} \.json ) {_PARTIAL}
        | {BEFORE} / manifest\.json
        | documents / \d+
        | staging / (?: {_PART} / )?
            (?: [^/]+ \.safetensors (?: {_PARTS} )? {_PARTIAL} | \.cache/huggingface/.+ )
    )
    """
)
FOLDERS = re.compile(
    rf"""(?x)
    {_STAGE} (?: rank-\d+-of-\d+ | common ) | stage-\d+-of-\d+ | source | source/headers
    | {_WORK} (?: / (?: units | documents | {BEFORE} | staging (?: /{_PART} )? {_CACHE} ) )?
    """
)
_RANK_MANIFEST = re.compile(rf"(?x) {_STAGE} rank-\d+-of-\d+ / manifest\.json")
_WHOLE = re.compile(f"(?x) {UNTIL_WHOLE} $")
#: what is in such a file of ours
SIGNS = {"README.md": b"Made by marlin-convert from ", "config.json": b'"quant_method": "marlin-convert"'}


def is_rank_manifest(path: str) -> bool:
    """Whether that is the path of a rank's manifest in OUT."""
    return _RANK_MANIFEST.fullmatch(path) is not None


def rank_manifests(out: Path) -> dict[str, Manifest | None]:
    """The manifests of ranks by their paths in OUT: what tells of its documents where there is no other; None
    for one that is damaged. Raises MachineError.
    """
    found = [path for form in ("", "stage-*/") for path in out.glob(f"{form}rank-*/manifest.json")]
    paths = sorted(filter(is_rank_manifest, (path.relative_to(out).as_posix() for path in found)))
    manifests: dict[str, Manifest | None] = dict.fromkeys(paths)
    for path in paths:
        with suppress(OutputError):
            manifests[path] = parse_manifest(sealed_manifest((out / path).parent), out / path)
    return manifests


def copy_of(source: Source, name: str) -> bytes | None:
    """What a conversion of this source has as its copy of a small file, at the path `name` in OUT; None where
    it has none there. Raises SourceError.
    """
    kept = {
        "source/config.json": source.config_bytes,
        "source/README.md": source.readme,
        f"source/{INDEX_NAME}": source.index_bytes,
    }
    return source.store.read(name) if name in source.auxiliary else kept.get(name)


def is_own(out: Path, path: Path, listed: Set[str] | None, source: Source) -> bool:
    """Whether a file of OUT, at `path` in it, is of the conversion: by what lists its files, `listed`; where
    nothing does, by its name and by what is in it, that of a copied file by what `source` has. Raises
    MachineError, SourceError.
    """
    name = str(path)
    if path.parts[0] == WORK:
        return IN_WORK.fullmatch(name) is not None
    if name == PROVENANCE:
        with suppress(OSError):
            return is_as_written(out)
        return False
    if listed is not None:
        return name in listed or (FORMS.fullmatch(name) is not None and _WHOLE.sub("", name) in listed)
    if name in SIGNS:
        with suppress(OSError):
            return SIGNS[name] in read_small(out / path, LISTED)
        return False
    if path.name == "manifest.json" and not is_marked(out / path):
        return False
    if name.endswith(".safetensors"):
        return FORMS.fullmatch(name) is not None and is_shard(out / path)
    if (copy := copy_of(source, name)) is not None:
        with suppress(OSError):
            return read_small(out / path, len(copy)) == copy
        return False
    return name in OWN or FORMS.fullmatch(name) is not None


def is_shard(path: Path) -> bool:
    """Whether a file is a shard of ours, whole, cut off or emptied; a link is none."""
    try:
        with os.fdopen(open_regular(path, os.O_NOFOLLOW), "rb") as file:
            return is_marked_shard(start := file.read(PAGE)) or not start
    except OSError:
        return False


def refuse_no_shard(path: Path) -> None:
    """Raise UsageError where something else is in the place of a shard that is to be made."""
    if os.path.lexists(path) and not is_shard(path):
        raise UsageError(
            f"{path} is in the place of a shard and is none of this program; move it away, then run the same"
            " command again"
        )
