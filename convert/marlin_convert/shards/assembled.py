"""Bytes of source tensors out of converted shards: slices read, put side by side, the experts' unpacked.

Nothing here is proven: whoever reads compares each tensor with the digest that the folder keeps of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np

from marlin_convert.assemble import StoredSlice, piece_of
from marlin_convert.errors import OutputError, SourceError
from marlin_convert.layout.protocol import ELEMENT
from marlin_convert.shards.assembly import AssembledReads, Constant, Copy, Homes, Place, Step, Unpack
from marlin_convert.shards.stored_index import StoredIndex
from marlin_convert.shards.stored_places import ExpertSource, PlainSource, StoredExperts
from marlin_convert.storage.buffers import Bytes
from marlin_convert.storage.files import PAGE
from marlin_convert.storage.reads import Piece, PieceReader, plan_reads
from marlin_convert.storage.source_reader import Part, Reads, SourceReader


class AssembledReader(SourceReader):
    """See `SourceReader`: of the converted folder `out`, whose tensors lie where `index` says. Errors are
    OutputErrors.
    """

    def __init__(self, out: Path, index: StoredIndex, direct: bool) -> None:
        self._out, self._index = out, index
        self._pieces = PieceReader(lambda path: out / path, direct)

    def plan(self, parts: Sequence[Part], lead: int = 0) -> AssembledReads:
        """See `SourceReader`: the parts lie one behind the other, in their order, the first at byte `lead`.
        Raises OutputError for one that is not wholly here.
        """
        *places, end = accumulate((part.size for part in parts), initial=lead)
        draft = _Draft(self._index, end)
        for part, at in zip(parts, places, strict=True):
            where = self._index.where(part.tensor)
            if where is None:
                raise OutputError(f"{self._out} does not hold all of {part.tensor}")
            if isinstance(where, PlainSource):
                draft.plain(where, part, at)
            else:
                draft.expert(where, part, at)
        return draft.reads(tuple(places))

    def open_files(self, files: Iterable[str]) -> None:
        """See `SourceReader`."""
        with self._of_output():
            self._pieces.open_files(files)

    def close_files(self, files: Iterable[str]) -> None:
        """See `SourceReader`."""
        self._pieces.close_files(files)

    def read(self, reads: Reads, buffer: Bytes) -> None:
        """See `SourceReader`."""
        with self._of_output():
            reads.fill(self._pieces, buffer)

    @contextmanager
    def _of_output(self) -> Iterator[None]:
        """What would be an error of the source is one of the folder."""
        try:
            yield
        except SourceError as error:
            raise OutputError(f"{error}; run marlin-convert verify {self._out}") from error


@dataclass
class _Draft:
    """The steps of a plan while it is made; `end` is the end of what the buffer has before the pieces."""

    index: StoredIndex
    end: int
    pieces: list[Piece] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    #: by layer and expert, the parts of each of its matrices, and where they go
    matrices: dict[tuple[int, int], list[tuple[ExpertSource, Part, int]]] = field(default_factory=dict)

    def reads(self, places: tuple[int, ...]) -> AssembledReads:
        """The plan."""
        for parts in self.matrices.values():
            self._unpack(parts)
        scratch = -(-self.end // PAGE) * PAGE
        return AssembledReads(places, scratch, plan_reads(self.pieces), tuple(self.steps))

    def plain(self, where: PlainSource, part: Part, at: int) -> None:
        """A part of a tensor that keeps its name."""
        stored = [each for each in where.slices if each is not None]
        if where.cut.axis == 1:
            self._columns(stored, part, at)
            return
        size = stored[0].tensor.size
        for i, each in enumerate(stored):
            begin = max(part.offset, i * size)
            stop = min(part.offset + part.size, (i + 1) * size)
            if begin < stop:
                piece = self._piece(each, begin - i * size, stop - begin)
                target = Place(at + begin - part.offset, stop - begin, stop - begin)
                self.steps.append(Copy(1, target, piece))

    def _columns(self, stored: Sequence[StoredSlice], part: Part, at: int) -> None:
        """Whole rows, put together of their columns; where others are asked for, a part of them."""
        width = stored[0].row_bytes
        row = width * len(stored)
        first, last = part.offset // row, -(-(part.offset + part.size) // row)
        size = (last - first) * row
        home = at if size == part.size else self._space(size)
        for i, each in enumerate(stored):
            piece = self._piece(each, first * width, (last - first) * width)
            self.steps.append(Copy(last - first, Place(home + i * width, width, row), piece))
        if home != at:
            self._cut_out(home + part.offset - first * row, part.size, at)

    def expert(self, where: ExpertSource, part: Part, at: int) -> None:
        """A part of a tensor of an expert; those of one expert are made together."""
        entry = self.index.kept.entries[part.tensor]
        if where.role is not None:
            key = id(where.layer), where.expert
            self.matrices.setdefault(key, []).append((where, part, at))
            return
        shape = where.layer.shape.matrix(where.projection)
        data = np.array(shape, np.int64 if entry.dtype == "I64" else np.int32).tobytes()
        self.steps.append(Constant(at, data[part.offset : part.offset + part.size]))

    def _unpack(self, parts: Sequence[tuple[ExpertSource, Part, int]]) -> None:
        """The matrices of one expert that are asked for, or that something of is."""
        homes: Homes = {}
        cut_out: list[tuple[int, int, int]] = []
        layer, expert = parts[0][0].layer, parts[0][0].expert
        for where, part, at in parts:
            if where.role is None:
                continue
            key, size = (where.projection, where.role), self.index.kept.entries[part.tensor].size
            item = np.dtype(ELEMENT[where.role]).itemsize
            if part.size == size and at % item == 0:
                homes[key] = at, size
                continue
            if key not in homes:
                homes[key] = self._space(size), size
            cut_out.append((homes[key][0] + part.offset, part.size, at))
        names = dict.fromkeys(layer.stacks[key].name for key in homes)
        self.steps.append(Unpack(layer, expert, homes, self._slices(layer, expert, names)))
        for source, size, at in cut_out:
            self._cut_out(source, size, at)

    def _slices(
        self, layer: StoredExperts, expert: int, names: Mapping[str, None]
    ) -> tuple[dict[str, int], ...]:
        """The pieces of an expert's stacked tensors, in slice order."""
        slices = []
        for rank, local in layer.homes(expert):
            pieces = {name: piece_of(layer.held[name][rank], local, local + 1) for name in names}
            slices.append({name: self._append(piece) for name, piece in pieces.items()})
        return tuple(slices)

    def _cut_out(self, source: int, size: int, at: int) -> None:
        """A part of what is whole only here, to its place."""
        self.steps.append(Copy(1, Place(at, size, size), None, source))

    def _piece(self, stored: StoredSlice, begin: int, size: int) -> int:
        """Bytes of a stored tensor; returns the number of the piece."""
        return self._append(Piece(stored.shard.path, stored.tensor.offset + begin, size))

    def _append(self, piece: Piece) -> int:
        self.pieces.append(piece)
        return len(self.pieces) - 1

    def _space(self, size: int) -> int:
        """Room for what is not a part, aligned for any element."""
        at = -(-self.end // 8) * 8
        self.end = at + size
        return at
