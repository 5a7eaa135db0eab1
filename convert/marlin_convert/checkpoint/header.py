"""The header of a safetensors file: read, and checked to the last byte before anything trusts it."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from marlin_convert.documents.bounds import HEADER, HEADERS, MAX_TENSORS
from marlin_convert.documents.codec import parse_json
from marlin_convert.errors import SourceError
from marlin_convert.storage.shard_file import DTYPE_SIZE

#: of a tensor; no framework has more
MAX_DIMENSIONS = 64
#: shapes that are kept
MAX_SHAPES = 1024
#: how what Git LFS leaves in a file's place begins, and its bytes at most
LFS, MAX_POINTER = b"version ", 1024


class TensorEntry(NamedTuple):
    """One tensor of a file; `offset` counts from the start of the file, `size` is in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Header:
    """A checked header. `raw` is the JSON as it stands in the file, `tensors` are in file order."""

    file: str
    size: int
    raw: bytes
    metadata: dict[str, str]
    tensors: tuple[TensorEntry, ...]

    @property
    def data_start(self) -> int:
        """Where tensor data begins, in bytes from the start of the file."""
        return 8 + len(self.raw)


def read_header(file: str, size: int, read: Callable[[int, int], bytes]) -> Header:
    """Read and check a header; `read(offset, length)` returns bytes of the file, `size` is the file's.

    Raises SourceError, naming file and tensor, unless the tensors cover the rest of the file exactly.
    """
    if size < 10:
        raise SourceError(f"{file}: {size} bytes is too short for a safetensors file; fetch it again")
    begin = read(0, 8)
    if begin == LFS and size < MAX_POINTER:
        raise SourceError(
            f"{file} is a Git LFS pointer of {size} bytes, not the file itself; get that with `git lfs pull`"
            " in the clone, or fetch the repository with `marlin-convert download`"
        )
    (length,) = struct.unpack("<Q", begin)
    if length > HEADER:
        raise SourceError(
            f"{file}: the header claims {length} bytes, more than the {HEADER} any reader accepts; not a"
            " safetensors file?"
        )
    if 8 + length > size:
        raise SourceError(
            f"{file}: the header claims {length} bytes but the file has only {size}; it is truncated, fetch"
            " it again"
        )
    return parse_header(file, size, read(8, length))


def parse_header(file: str, size: int, raw: bytes) -> Header:
    """Check the header JSON `raw` of a file of `size` bytes; see `read_header`."""
    try:
        document = parse_json(raw)
    except ValueError as error:
        raise SourceError(f"{file}: the header is not valid JSON ({error}); fetch the file again") from error
    if not isinstance(document, dict) or raw[:1] != b"{":
        raise SourceError(f"{file}: the header is not a JSON object; not a safetensors file?")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        raise SourceError(f"{file}: __metadata__ must map strings to strings")
    start = 8 + len(raw)
    tensors = sorted(
        (_entry(file, name, spec, start) for name, spec in document.items()), key=lambda t: (t.offset, t.size)
    )
    position = start
    for tensor in tensors:
        if tensor.offset != position:
            what = "overlaps the tensor before it" if tensor.offset < position else "leaves a hole before it"
            raise SourceError(
                f"{file}: {tensor.name} starts at byte {tensor.offset} but {position} was expected: it {what}"
            )
        position += tensor.size
    if position != size:
        what = "truncated" if position > size else "longer than its header says"
        raise SourceError(
            f"{file}: header and tensors take {position} bytes but the file has {size}: it is {what}; fetch"
            " it again"
        )
    return Header(file, size, raw, metadata, tuple(tensors))


def bounded(headers: Iterable[Header]) -> Iterator[Header]:
    """The headers of a checkpoint, one after the other. Raises SourceError at the one with which they have
    more bytes, or more tensors, than those of any checkpoint.
    """
    size, tensors = 0, 0
    for header in headers:
        size, tensors = size + len(header.raw), tensors + len(header.tensors)
        for what, count, most in (("bytes", size, HEADERS), ("tensors", tensors, MAX_TENSORS)):
            if count > most:
                raise SourceError(
                    f"{header.file}: with it the headers of all files have {count} {what}, expected at most"
                    f" {most}"
                )
        yield header


def _entry(file: str, name: str, spec: Any, start: int) -> TensorEntry:
    elements: int | None = None
    try:
        dtype, shape, (begin, end) = spec["dtype"], spec["shape"], spec["data_offsets"]
        if (
            len(spec) == 3
            and type(dtype) is str
            and type(shape) is list
            and len(shape) <= MAX_DIMENSIONS
            and _well_sized(begin)
            and _well_sized(end)
        ):
            elements = _elements(*shape)
    except (TypeError, KeyError, ValueError):
        pass
    if elements is None:
        raise SourceError(f"{file}: the header entry of {name} is malformed: {str(spec)[:120]}")
    if dtype not in DTYPE_SIZE:
        raise SourceError(f"{file}: {name} has the unknown dtype {str(dtype)[:40]!r}")
    size = DTYPE_SIZE[dtype] * elements
    if end - begin != size:
        raise SourceError(
            f"{file}: {name} is {dtype} {shape}, {size} bytes, but its offsets span {end - begin}"
        )
    return TensorEntry(name, dtype, tuple(shape), start + begin, size)


def _well_sized(number: Any) -> bool:
    return type(number) is int and 0 <= number < 1 << 62


@lru_cache(MAX_SHAPES, typed=True)
def _elements(*shape: Any) -> int | None:
    """The product of a shape, None for one that is none. Kept, since hundreds of thousands of tensors have
    some twenty shapes; by type, too, since True and 1.0 equal 1.
    """
    if not all(map(_well_sized, shape)) or math.prod(filter(None, shape)) >= 1 << 62:
        return None
    product: int = math.prod(shape)
    return product
