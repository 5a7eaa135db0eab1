"""Writes safetensors files in any order of data and of header, real or sparse."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from .names import Tensor

Order = Literal["reference", "interleaved", "shuffled"]
Content = Callable[[Tensor], Iterable["memoryview | bytes"]]

# The reference writer puts the dtypes that need the widest alignment first.
_REFERENCE_DTYPES = ("I64", "F32", "I32", "BF16")


def arrange(tensors: list[Tensor], order: Order, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Puts a file's tensors in order: first the order of their data, then of their names in the header.

    "reference" is how the safetensors library writes, "interleaved" keeps each matrix's packed, scale and
    shape together, and "shuffled" follows no rule, nor does its header follow its data.
    """
    data = list(tensors)
    if order == "reference":
        data.sort(key=lambda tensor: (_REFERENCE_DTYPES.index(tensor.dtype), tensor.name))
    header = data
    if order == "shuffled":
        shuffle = random.Random(seed)
        shuffle.shuffle(data)
        header = list(data)
        shuffle.shuffle(header)
    return data, header


def encode_header(data: list[Tensor], header: list[Tensor]) -> bytes:
    """The bytes before the data: the length, then the JSON padded to a multiple of 8."""
    offsets = {}
    end = 0
    for tensor in data:
        offsets[tensor.name] = [end, end + tensor.nbytes]
        end += tensor.nbytes
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor in header:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": offsets[tensor.name],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_checkpoint(
    folder: Path, files: list[list[Tensor]], content: Content | None, order: Order, seed: int = 0
) -> dict[str, list[Tensor]]:
    """Writes the files and their index, and returns each file's tensors in the order of their data.

    Without `content` the files are sparse: a true header and a hole of the right size.
    """
    named: dict[str, list[Tensor]] = {}
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):06d}.safetensors"
        data, header = arrange(tensors, order, seed + number)
        _write_file(folder / name, encode_header(data, header), data, content)
        named[name] = data
    weight_map = {tensor.name: name for name, data in named.items() for tensor in data}
    total = sum(tensor.nbytes for data in named.values() for tensor in data)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return named


def _write_file(path: Path, header: bytes, data: list[Tensor], content: Content | None) -> None:
    size = len(header) + sum(tensor.nbytes for tensor in data)
    with path.open("wb") as file:
        file.write(header)
        if content is None:
            file.truncate(size)
            return
        for tensor in data:
            for piece in content(tensor):
                file.write(piece)
        if file.tell() != size:
            raise ValueError(f"{path.name}: wrote {file.tell()} bytes where the header says {size}")
