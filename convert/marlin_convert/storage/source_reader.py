"""Bytes of source tensors, wherever they are: what jobs ask for. `checkpoint.file_reader` takes them from
published files, `shards.assembled` puts them together out of shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from marlin_convert.storage.buffers import Bytes
from marlin_convert.storage.reads import PieceReader


class Part(NamedTuple):
    """Bytes wanted: `size` of a source tensor from `offset`, which counts from its first byte."""

    tensor: str
    offset: int
    size: int


class Reads(Protocol):
    """How some parts come into one page-aligned buffer; the same for every reading."""

    @property
    def places(self) -> tuple[int, ...]:
        """Where each part begins in the buffer."""

    @property
    def size(self) -> int:
        """Bytes of the buffer, whole pages; what is behind the parts is the reader's own."""

    @property
    def read_bytes(self) -> int:
        """Bytes that are read of files."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files they are read of, which must be open."""

    def fill(self, reader: PieceReader, buffer: Bytes) -> None:
        """Read and place them."""


class SourceReader(Protocol):
    """Reads parts of source tensors, from any number of threads. Parts of a plan must not overlap."""

    def plan(self, parts: Sequence[Part]) -> Reads:
        """How to read these parts, in one buffer; nothing is read yet."""

    def open_files(self, files: Iterable[str]) -> None:
        """Keep files open until `close_files`. Where one cannot be opened, none of them is kept."""

    def close_files(self, files: Iterable[str]) -> None:
        """Undo `open_files`."""

    def read(self, reads: Reads, buffer: Bytes) -> None:
        """Fill `buffer`, page-aligned and at least `reads.size` bytes. Raises SourceError, OutputError,
        MachineError.
        """
