"""The index of a checkpoint, model.safetensors.index.json, against the files and tensors that are there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from marlin_convert.checkpoint.header import Header, TensorEntry
from marlin_convert.documents.codec import parse_json
from marlin_convert.errors import SourceError
from marlin_convert.words import count, some

INDEX_NAME = "model.safetensors.index.json"


class SourceTensor(NamedTuple):
    """Where a tensor is: `file` is a name inside the checkpoint, the rest as in `TensorEntry`."""

    file: str
    entry: TensorEntry


def parse_index(raw: bytes) -> dict[str, str]:
    """The checked weight_map of an index: tensor name -> file name. Raises SourceError for names that leave
    the folder.
    """
    weight_map = json_object(raw, INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{INDEX_NAME}: it has no weight_map")
    for file in set(map(str, weight_map.values())):
        if file != os.path.basename(file) or "\\" in file or not file.endswith(".safetensors"):
            raise SourceError(
                f"{INDEX_NAME}: the file name {file!r} is not that of a .safetensors file in the same folder"
            )
    return weight_map


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
            f"{len(missing)} of {count(len(named), 'weight file')} missing: {some(missing)}; fetch them,"
            " then run the same command"
        )
    if extra := sorted(here - named):
        raise SourceError(
            f"{some(extra)} lies in the folder but is not in {INDEX_NAME}; move it away, or fetch the index"
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
    files = {name: tensor.file for name, tensor in tensors.items()}
    if weight_map is not None and files != weight_map:
        if missing := sorted(weight_map.keys() - tensors.keys()):
            raise SourceError(
                f"{len(missing)} tensors of {INDEX_NAME} are in no file: {some(missing)}; fetch"
                f" {weight_map[missing[0]]} again"
            )
        if extra := sorted(tensors.keys() - weight_map.keys()):
            raise SourceError(
                f"{len(extra)} tensors are not in {INDEX_NAME}: {some(extra)} (in {tensors[extra[0]].file})"
            )
        name = next(name for name, file in weight_map.items() if files[name] != file)
        raise SourceError(f"{name} is in {files[name]}, but {INDEX_NAME} says {weight_map[name]}")
    return tensors


def weight_names(names: Iterable[str]) -> list[str]:
    """Those that are names of weight files."""
    return [name for name in names if name.endswith(".safetensors") and not name.startswith(".")]


def json_object(raw: bytes, name: str) -> dict[str, Any]:
    """The JSON object that a file holds. Raises SourceError."""
    try:
        document = parse_json(raw)
    except ValueError as error:
        raise SourceError(f"{name}: not valid JSON ({error}); fetch it again") from error
    if not isinstance(document, dict):
        raise SourceError(f"{name}: not a JSON object; fetch it again")
    return document
