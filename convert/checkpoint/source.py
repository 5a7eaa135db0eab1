"""A checkpoint as published: its files, tensors and configuration. `open_source` is the one way to it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from convert.checkpoint.config import ModelConfig, parse_config
from convert.checkpoint.header import Header, TensorEntry, read_header
from convert.errors import SourceError, UsageError

INDEX_NAME = "model.safetensors.index.json"
#: never copied beside the shards: other weights, and what version control and downloaders leave
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".incomplete", ".lock")
#: names that the output uses itself; the source's README moves to source/
RESERVED = frozenset({"manifest.json", "provenance.json", "digests.bin", "config.json", INDEX_NAME, "README.md"})


class SourceTensor(NamedTuple):
    """Where a tensor is: `file` is a name inside the checkpoint, the rest as in `TensorEntry`."""

    file: str
    entry: TensorEntry


@dataclass(frozen=True)
class Source:
    """An opened checkpoint; headers are checked, no tensor data has been read."""

    label: str
    folder: Path
    headers: tuple[Header, ...]
    tensors: dict[str, SourceTensor]
    config: dict[str, Any]
    config_bytes: bytes
    index_bytes: bytes | None
    model: ModelConfig
    auxiliary: tuple[str, ...]
    left_out: tuple[str, ...]

    def path(self, file: str) -> Path:
        """Where a file of the checkpoint can be read."""
        return self.folder / file

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.entry.size for tensor in self.tensors.values())

    @property
    def prefix(self) -> str:
        """What stands before `model.layers` in the names of the text model: "language_model." or ""."""
        return "language_model." if any(name.startswith("language_model.") for name in self.tensors) else ""


def open_source(source: str) -> Source:
    """Open a checkpoint folder. Raises SourceError where it is damaged, incomplete or of another kind, UsageError where it is no folder."""
    folder = Path(source)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"{source} {what}; give the folder that holds config.json and the .safetensors files")
    config_bytes = _read(folder / "config.json")
    refuse_converted(folder)
    config = _json_object(config_bytes, "config.json")
    model = parse_config(config)
    index_bytes = _read(folder / INDEX_NAME) if (folder / INDEX_NAME).exists() else None
    weight_map = parse_index(index_bytes) if index_bytes is not None else None
    present = sorted(path.name for path in folder.iterdir() if path.name.endswith(".safetensors") and not path.name.startswith("."))
    names = weight_files(present, weight_map)
    headers = tuple(header_of(folder / name) for name in names)
    auxiliary, left_out = _auxiliary(folder)
    return Source(
        label=source, folder=folder, headers=headers, tensors=collect_tensors(headers, weight_map), config=config, config_bytes=config_bytes,
        index_bytes=index_bytes, model=model, auxiliary=auxiliary, left_out=left_out,
    )  # fmt: skip


def refuse_converted(folder: Path) -> None:
    """Raise SourceError for a folder that this project wrote."""
    try:
        start = (folder / "manifest.json").open("rb").read(64)
    except OSError:
        return
    if b'"marlin-convert"' in start:
        raise SourceError(f"{folder} is a converted folder already (it has a manifest.json of marlin-convert); give the published checkpoint")


def header_of(path: Path) -> Header:
    """The checked header of a safetensors file on disk."""
    try:
        with path.open("rb") as file:
            return read_header(path.name, os.fstat(file.fileno()).st_size, lambda offset, length: os.pread(file.fileno(), length, offset))
    except OSError as error:
        raise SourceError(f"{path.name}: cannot be read ({error.strerror})") from error


def parse_index(raw: bytes) -> dict[str, str]:
    """The checked weight_map of an index: tensor name -> file name. Raises SourceError for names that leave the folder."""
    weight_map = _json_object(raw, INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{INDEX_NAME}: it has no weight_map")
    for file in set(map(str, weight_map.values())):
        if file != os.path.basename(file) or file in ("", ".", "..") or "\\" in file or not file.endswith(".safetensors"):
            raise SourceError(f"{INDEX_NAME}: the file name {file!r} is not that of a .safetensors file in the same folder")
    return {str(name): str(file) for name, file in weight_map.items()}


def weight_files(present: Iterable[str], weight_map: dict[str, str] | None) -> list[str]:
    """The weight files in name order. Raises SourceError where one is missing, or lies there without being in the index."""
    here = set(present)
    if weight_map is None:
        if not here:
            raise SourceError("there is no .safetensors file and no index in the source folder")
        return sorted(here)
    named = set(weight_map.values())
    if missing := sorted(named - here):
        raise SourceError(f"{len(missing)} of {len(named)} weight files are missing: {_some(missing)}; fetch them, then run the same command")
    if extra := sorted(here - named):
        raise SourceError(f"{_some(extra)} lies in the folder but is not in {INDEX_NAME}; move it away, or fetch the index that goes with it")
    return sorted(named)


def collect_tensors(headers: Iterable[Header], weight_map: dict[str, str] | None) -> dict[str, SourceTensor]:
    """All tensors by name. Raises SourceError where headers and index disagree or a name stands twice."""
    tensors: dict[str, SourceTensor] = {}
    for header in headers:
        for entry in header.tensors:
            if entry.name in tensors:
                raise SourceError(f"{entry.name} stands in two files: {tensors[entry.name].file} and {header.file}")
            tensors[entry.name] = SourceTensor(header.file, entry)
    if weight_map is not None:
        if missing := sorted(weight_map.keys() - tensors.keys()):
            raise SourceError(f"{len(missing)} tensors of {INDEX_NAME} are in no file: {_some(missing)}; fetch {weight_map[missing[0]]} again")
        if extra := sorted(tensors.keys() - weight_map.keys()):
            raise SourceError(f"{len(extra)} tensors are not in {INDEX_NAME}: {_some(extra)} (in {tensors[extra[0]].file})")
        for name, file in weight_map.items():
            if tensors[name].file != file:
                raise SourceError(f"{name} is in {tensors[name].file}, but {INDEX_NAME} says {file}")
    return tensors


def _auxiliary(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Small files to copy (README.md and config.json are handled apart), and what is left out."""
    copied, left = [], []
    for path in sorted(folder.iterdir()):
        name = path.name
        if name in (INDEX_NAME, "config.json", "README.md") or name.endswith(".safetensors"):
            continue
        if path.is_file() and not name.startswith(".") and not name.endswith(WEIGHT_SUFFIXES) and name not in RESERVED:
            copied.append(name)
        else:
            left.append(name + ("/" if path.is_dir() else ""))
    return tuple(copied), tuple(left)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise SourceError(f"{path.name} is missing in {path.parent}; is this the folder of a published checkpoint?") from None
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from error


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
