"""Bytes of source tensors out of the published files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from marlin_convert.checkpoint.index import SourceTensor
from marlin_convert.storage.buffers import Bytes
from marlin_convert.storage.reads import Piece, PieceReader, ReadPlan, plan_reads
from marlin_convert.storage.source_reader import Part, Reads, SourceReader


class FileReader(SourceReader):
    """See `SourceReader`; `tensors` says which tensor lies where, `path_of` where a file of that name is."""

    def __init__(
        self, path_of: Callable[[str], Path], tensors: Mapping[str, SourceTensor], direct: bool
    ) -> None:
        self._pieces = PieceReader(path_of, direct)
        self._tensors = tensors

    def plan(self, parts: Sequence[Part]) -> ReadPlan:
        """See `SourceReader`."""
        return plan_reads([self._piece(part) for part in parts])

    def _piece(self, part: Part) -> Piece:
        file, entry = self._tensors[part.tensor]
        return Piece(file, entry.offset + part.offset, part.size)

    def open_files(self, files: Iterable[str]) -> None:
        """See `SourceReader`."""
        self._pieces.open_files(files)

    def close_files(self, files: Iterable[str]) -> None:
        """See `SourceReader`."""
        self._pieces.close_files(files)

    def read(self, reads: Reads, buffer: Bytes) -> None:
        """See `SourceReader`."""
        reads.fill(self._pieces, buffer)
