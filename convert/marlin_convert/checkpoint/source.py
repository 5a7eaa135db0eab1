"""A checkpoint as published: its files, tensors and configuration. `open_source` is the one way to it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from marlin_convert.checkpoint.header import Header, TensorEntry
from marlin_convert.checkpoint.hub import open_repository
from marlin_convert.checkpoint.hub_files import HubOptions
from marlin_convert.checkpoint.store import RECORD, FolderStore, Store, recorded_origin
from marlin_convert.errors import ConvertError, SourceError, UsageError
from marlin_convert.models.family import ModelConfig, parse_config

INDEX_NAME = "model.safetensors.index.json"
#: never copied beside the shards: other weights, and what version control and downloaders leave
WEIGHT_SUFFIXES = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".incomplete", ".lock")
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
#: headers of a repository that are fetched at a time; reading those of a folder is all computing
REQUESTS = 8
#: names that the output uses itself
RESERVED = ("manifest.json", "provenance.json", "digests.bin")
#: what is in the output in another way, or stays behind without being mentioned
HANDLED = (INDEX_NAME, "config.json", "README.md", RECORD)


class SourceTensor(NamedTuple):
    """Where a tensor is: `file` is a name inside the checkpoint, the rest as in `TensorEntry`."""

    file: str
    entry: TensorEntry


@dataclass(frozen=True)
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

    @property
    def folder(self) -> Path | None:
        """The folder that holds all of it; None for a repository."""
        return self.store.folder

    def path(self, file: str) -> Path:
        """Where a file of the checkpoint can be read; one that has to be fetched is fetched now."""
        return self.store.path(file)

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return _json_object(self.config_bytes, "config.json")

    @property
    def auxiliary(self) -> tuple[str, ...]:
        """Small files that are copied beside the shards."""
        return auxiliary_files(self.names)[0]

    @property
    def left_out(self) -> tuple[str, ...]:
        """What lies beside the weights and is not copied; folders end with /."""
        return auxiliary_files(self.names)[1]

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


def open_source(source: str, hub: HubOptions | None = None) -> Source:
    """Open a checkpoint: a folder, else a repository `org/name` of the hub. Headers only; no tensor data is
    read.

    Raises SourceError where it is damaged, incomplete or of another kind, UsageError where it is neither,
    MachineError where the network fails.
    """
    try:
        store, notes = _store(source, hub)
        names = store.names()
    except ConvertError as error:
        if is_repository(source) and not Path(source).exists() and "folder" not in str(error):
            raise type(error)(
                f"{source} is no folder here, so it was taken for a repository of the hub: {error}"
            ) from error
        raise
    config_bytes = store.read("config.json")
    _refuse_converted(store, names)
    model = parse_config(_json_object(config_bytes, "config.json"))
    index_bytes = store.read(INDEX_NAME) if INDEX_NAME in names else None
    weight_map = parse_index(index_bytes) if index_bytes is not None else None
    with ThreadPoolExecutor(REQUESTS if store.folder is None else 1) as workers:
        headers = tuple(workers.map(store.header, weight_files(weight_names(names), weight_map)))
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
    )


def is_repository(source: str) -> bool:
    """Whether a name has the form of a repository's, org/name."""
    return REPOSITORY.fullmatch(source) is not None


def _store(source: str, hub: HubOptions | None) -> tuple[Store, tuple[str, ...]]:
    """What stands behind the name, and what a person should know about that choice."""
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
        return FolderStore(folder, recorded_origin(folder)), (note,) if is_repository(source) else ()
    if folder.exists():
        raise UsageError(
            f"{source} is a file, not a folder; give the folder that holds config.json and the .safetensors"
            " files"
        )
    if not is_repository(source):
        raise UsageError(
            f"{source} does not exist; give the folder that holds config.json and the .safetensors files, or"
            " a repository org/name"
        )
    return open_repository(source, hub or HubOptions()), ()


def _refuse_converted(store: Store, names: dict[str, bool]) -> None:
    """Raise SourceError for something that this project wrote."""
    if names.get("manifest.json") and b'"marlin-convert"' in store.read("manifest.json")[:64]:
        raise SourceError(
            f"{store.where} is a conversion already (it has a manifest.json of marlin-convert); give the"
            " published checkpoint"
        )


def parse_index(raw: bytes) -> dict[str, str]:
    """The checked weight_map of an index: tensor name -> file name. Raises SourceError for names that leave
    the folder.
    """
    weight_map = _json_object(raw, INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{INDEX_NAME}: it has no weight_map")
    for file in set(map(str, weight_map.values())):
        if (
            file != os.path.basename(file)
            or file in ("", ".", "..")
            or "\\" in file
            or not file.endswith(".safetensors")
        ):
            raise SourceError(
                f"{INDEX_NAME}: the file name {file!r} is not that of a .safetensors file in the same folder"
            )
    return {str(name): str(file) for name, file in weight_map.items()}


def weight_files(present: Iterable[str], weight_map: dict[str, str] | None) -> list[str]:
    """The weight files in name order. Raises SourceError where one is missing, or lies there without being in
    the index.
    """
    here = set(present)
    if weight_map is None:
        if not here:
            raise SourceError("there is no .safetensors file and no index in the source folder")
        return sorted(here)
    named = set(weight_map.values())
    if missing := sorted(named - here):
        raise SourceError(
            f"{len(missing)} of {len(named)} weight files are missing: {_some(missing)}; fetch them, then run"
            " the same command"
        )
    if extra := sorted(here - named):
        raise SourceError(
            f"{_some(extra)} lies in the folder but is not in {INDEX_NAME}; move it away, or fetch the index"
            " that goes with it"
        )
    return sorted(named)


def collect_tensors(headers: Iterable[Header], weight_map: dict[str, str] | None) -> dict[str, SourceTensor]:
    """All tensors by name. Raises SourceError where headers and index disagree or a name stands twice."""
    tensors: dict[str, SourceTensor] = {}
    for header in headers:
        for entry in header.tensors:
            if entry.name in tensors:
                raise SourceError(
                    f"{entry.name} stands in two files: {tensors[entry.name].file} and {header.file}"
                )
            tensors[entry.name] = SourceTensor(header.file, entry)
    if weight_map is not None:
        if missing := sorted(weight_map.keys() - tensors.keys()):
            raise SourceError(
                f"{len(missing)} tensors of {INDEX_NAME} are in no file: {_some(missing)}; fetch"
                f" {weight_map[missing[0]]} again"
            )
        if extra := sorted(tensors.keys() - weight_map.keys()):
            raise SourceError(
                f"{len(extra)} tensors are not in {INDEX_NAME}: {_some(extra)} (in {tensors[extra[0]].file})"
            )
        for name, file in weight_map.items():
            if tensors[name].file != file:
                raise SourceError(f"{name} is in {tensors[name].file}, but {INDEX_NAME} says {file}")
    return tensors


def weight_names(names: Iterable[str]) -> list[str]:
    """Those that are names of weight files."""
    return [name for name in names if name.endswith(".safetensors") and not name.startswith(".")]


def auxiliary_files(names: Mapping[str, bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Small files to copy (README.md and config.json are handled apart), and what is left out."""
    others = [name for name in names if name not in HANDLED and not name.endswith(".safetensors")]
    copied = tuple(
        name
        for name in others
        if names[name]
        and not name.startswith(".")
        and name not in RESERVED
        and not name.endswith(WEIGHT_SUFFIXES)
    )
    return copied, tuple(name + ("" if names[name] else "/") for name in others if name not in copied)


def _json_object(raw: bytes, name: str) -> dict[str, Any]:
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{name}: not valid JSON ({error}); fetch it again") from error
    if not isinstance(document, dict):
        raise SourceError(f"{name}: not a JSON object; fetch it again")
    return document


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
