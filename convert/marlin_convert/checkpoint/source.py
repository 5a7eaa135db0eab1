"""A checkpoint as published: its files, tensors and configuration. `open_source` is the one way to it."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from marlin_convert.checkpoint.header import Header, bounded
from marlin_convert.checkpoint.hub import open_repository
from marlin_convert.checkpoint.hub_files import HubOptions
from marlin_convert.checkpoint.index import (
    INDEX_NAME,
    SourceTensor,
    collect_tensors,
    json_object,
    parse_index,
    weight_files,
    weight_names,
)
from marlin_convert.checkpoint.object_store import open_objects
from marlin_convert.checkpoint.store import RECORD, FolderStore, Store, download_record, folder_of_commit
from marlin_convert.documents.bounds import ALL_COPIED, COPIED, MANIFEST
from marlin_convert.documents.codec import begins_ours
from marlin_convert.errors import ConvertError, SourceError, UsageError
from marlin_convert.models.family import ModelConfig, parse_config
from marlin_convert.storage.objects import is_uri
from marlin_convert.threads import Workers

#: never copied beside the shards: other weights, and what version control and downloaders leave
WEIGHT_SUFFIXES = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".incomplete", ".lock")
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
#: headers of a repository that are fetched at a time; reading those of a folder is all computing
REQUESTS = 8
#: names that the output uses itself
RESERVED = re.compile(
    r"manifest\.json|provenance\.json|digests\.bin|common|source|(rank|stage)-\d+-of-\d+|.*\.partial",
    re.DOTALL,
)
#: bytes of a name, so that what is made of it is a name, too
MAX_NAME = 240
#: what is in the output in another way, or stays behind without being mentioned
HANDLED = (INDEX_NAME, "config.json", "README.md", RECORD)


@dataclass(frozen=True, repr=False)
class Source:
    """An opened checkpoint; headers are checked, no tensor data has been read.

    `label` is the name it was opened by, `names` tells of every name beside config.json whether it is a file,
    `notes` are for people.
    """

    label: str
    store: Store
    names: dict[str, bool]
    headers: tuple[Header, ...]
    tensors: dict[str, SourceTensor]
    config_bytes: bytes
    index_bytes: bytes | None
    readme: bytes | None
    model: ModelConfig
    notes: tuple[str, ...]
    #: files beside the weights that are too large to be copied
    large: frozenset[str] = frozenset()

    @property
    def folder(self) -> Path | None:
        """The folder that holds all of it; None for a repository or an object store."""
        return self.store.folder

    def path(self, file: str) -> Path:
        """Where a file of the checkpoint can be read; one that has to be fetched is fetched now."""
        return self.store.path(file)

    def part(self, file: str, offset: int, size: int) -> bytes:
        """Some bytes of a file of the checkpoint. Raises SourceError, MachineError."""
        return self.store.part(file, offset, size)

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return json_object(self.config_bytes, "config.json")

    @property
    def auxiliary(self) -> tuple[str, ...]:
        """Small files that are copied beside the shards."""
        return auxiliary_files(self.names, self.large)[0]

    @property
    def left_out(self) -> tuple[str, ...]:
        """What lies beside the weights and is not copied; folders end with /."""
        return auxiliary_files(self.names, self.large)[1]

    def __repr__(self) -> str:
        return f"Source({self.label!r}, files={len(self.headers)}, tensors={len(self.tensors)})"

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.entry.size for tensor in self.tensors.values())

    @cached_property
    def prefix(self) -> str:
        """What stands before `model.layers` in the names of the text model, such as "language_model."."""
        return self.model.family.prefix(self.tensors)

    def layer_prefix(self, layer: int) -> str:
        """What the names of a layer's tensors begin with."""
        return f"{self.prefix}model.layers.{layer}."


def open_source(source: str | os.PathLike[str], hub: HubOptions | None = None) -> Source:
    """Open a checkpoint: a prefix `s3://bucket/prefix` in an object store, a folder, else a repository
    `org/name` of the hub. Headers only; no tensor data is read.

    Raises SourceError where it is damaged, incomplete or of another kind, UsageError where it is neither,
    MachineError where the network fails.
    """
    source = os.fspath(source)
    try:
        store, notes = _store(source, hub)
        names = store.names()
    except ConvertError as error:
        if is_repository(source) and not Path(source).exists() and "folder" not in str(error):
            raise type(error)(
                f"{source} is no folder here, so it was taken for a repository of the hub: {error}"
            ) from error
        raise
    _refuse_names(names)
    config_bytes = store.read("config.json")
    _refuse_converted(store, names)
    model = parse_config(json_object(config_bytes, "config.json"))
    index_bytes = store.read(INDEX_NAME) if INDEX_NAME in names else None
    weight_map = parse_index(index_bytes) if index_bytes is not None else None
    with Workers(REQUESTS if store.folder is None else 1) as workers:
        files = weight_files(weight_names(names), weight_map)
        headers = tuple(bounded(workers.map(store.header, files)))
    return Source(
        label=source,
        store=store,
        names=names,
        headers=headers,
        tensors=collect_tensors(headers, weight_map),
        config_bytes=config_bytes,
        index_bytes=index_bytes,
        readme=store.read("README.md") if names.get("README.md") else None,
        model=model,
        notes=notes,
        large=_large(store, names),
    )


def _large(store: Store, names: Mapping[str, bool]) -> frozenset[str]:
    """Files that would be copied but for their size. Raises SourceError where the others have more together
    than such files ever have.
    """
    sizes = {name: store.size(name) for name in auxiliary_files(names)[0]}
    large = frozenset(name for name, size in sizes.items() if size > COPIED)
    if (total := sum(size for name, size in sizes.items() if name not in large)) > ALL_COPIED:
        raise SourceError(
            f"the files beside the weights have {total} bytes together, expected at most {ALL_COPIED}; move"
            " away what no engine needs"
        )
    return large


def _refuse_names(names: Iterable[str]) -> None:
    """Raise SourceError for names that the output could not be made with."""
    for name in names:
        try:
            length = len(name.encode())
        except UnicodeEncodeError:
            raise SourceError(f"the name {name!r} is no text in UTF-8; rename or remove that file") from None
        if "\0" in name:
            raise SourceError(f"the name {name!r} has a zero byte, which no file has; rename that object")
        if length > MAX_NAME:
            raise SourceError(
                f"the name {name} has {length} bytes, expected at most {MAX_NAME}; rename or remove that file"
            )


def is_repository(source: str) -> bool:
    """Whether a name has the form of a repository's, org/name."""
    return REPOSITORY.fullmatch(source) is not None


def _store(source: str, hub: HubOptions | None) -> tuple[Store, tuple[str, ...]]:
    """The store that a name stands for, and notes for people about that choice."""
    if is_uri(source):
        return open_objects(source, hub or HubOptions()), ()
    folder = Path(source)
    if folder.is_dir():
        if hub is not None and (hub.revision or hub.free_source or hub.local_dir):
            raise UsageError(
                f"{source} is a folder here; --revision, --local-dir and --free-source are for repositories"
                " of the hub"
            )
        note = (
            f"{source} is the folder of that name here, not the repository on the hub; write ./{source} to"
            " say so"
        )
        notes = (note,) if is_repository(source) else ()
        if (record := download_record(folder)) is None:
            return FolderStore(folder), notes
        published = {name: sha256 for name, (_, sha256) in record.files.items()}
        store, more = folder_of_commit(folder, (record.repo, record.revision), published)
        return store, (*notes, *more)
    if folder.exists():
        raise UsageError(
            f"{source} is a file, not a folder; give the folder that holds config.json and the .safetensors"
            " files"
        )
    if not is_repository(source):
        raise UsageError(
            f"{source} does not exist; give the folder that holds config.json and the .safetensors files,"
            " s3://bucket/prefix or a repository org/name"
        )
    return open_repository(source, hub or HubOptions())


def _refuse_converted(store: Store, names: dict[str, bool]) -> None:
    """Raise SourceError for something that this project wrote."""
    name = "manifest.json"
    if names.get(name) and store.size(name) <= MANIFEST and begins_ours(store.read(name)):
        raise SourceError(
            f"{store.where} is a conversion already (it has a manifest.json of marlin-convert); give the"
            " published checkpoint, or cut it in another way with marlin-convert reshard"
        )


def auxiliary_files(
    names: Mapping[str, bool], large: Container[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Small files to copy (README.md and config.json are handled apart), and what is left out, as are those
    of `large`.
    """
    others = [name for name in names if name not in HANDLED and not name.endswith(".safetensors")]
    copied = tuple(
        name
        for name in others
        if names[name]
        and not name.startswith(".")
        and name not in large
        and not RESERVED.fullmatch(name)
        and not name.endswith(WEIGHT_SUFFIXES)
    )
    return copied, tuple(name + ("" if names[name] else "/") for name in others if name not in copied)
