"""A tensor that keeps its name: streamed in chunks of rows, cut by its rule, written to each rank that holds
some of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import xxhash

from marlin_convert.errors import ConvertError
from marlin_convert.pipeline.stages import Tools
from marlin_convert.pipeline.unit_work import UnitWork
from marlin_convert.planning.units import PlainTensor
from marlin_convert.slicing import Rank, span
from marlin_convert.storage.buffers import Bytes
from marlin_convert.storage.files import PAGE
from marlin_convert.storage.source_reader import Part, Reads

#: source bytes of a chunk, about
CHUNK = 16 << 20


class Chunk(NamedTuple):
    """Some rows of the tensor, the slices that have some of them, and how they are read."""

    rows: range
    slices: range
    reads: Reads


@dataclass(frozen=True)
class TensorJob:
    """One tensor. Its chunks go in order, so that whole-tensor digests are made in the same pass."""

    work: UnitWork
    tensor: PlainTensor

    @property
    def need(self) -> int:
        """Bytes of memory: one chunk as read, and once more as cut."""
        return max(chunk.reads.size for chunk in self._chunks) + self._chunk_rows * self._row_bytes

    @property
    def files(self) -> tuple[str, ...]:
        """Source files it reads."""
        return tuple(sorted({file for chunk in self._chunks for file in chunk.reads.files}))

    @property
    def _row_bytes(self) -> int:
        return self.work.target.source.tensors[self.tensor.name].entry.size // self.tensor.shape[0]

    @property
    def _chunk_rows(self) -> int:
        """Rows of a chunk, such that each slice's part of it is whole pages where it can be."""
        rows, row_bytes, cut = self.tensor.shape[0], self._row_bytes, self.tensor.cut
        part = row_bytes // cut.parts if cut.axis == 1 else row_bytes
        unit = PAGE // math.gcd(PAGE, part)
        return min(rows, max(unit, CHUNK // row_bytes // unit * unit))

    def run(self, tools: Tools) -> None:
        """Stream it. Raises SourceError or MachineError."""
        name = self.tensor.name
        holders = self.tensor.cut.holders(self.work.unit.ranks)
        whole = xxhash.xxh3_128()
        parts = {index: xxhash.xxh3_128() for index in holders}
        row_bytes = self._row_bytes
        with tools.pool.take(self.need) as buffer:
            for rows, indexes, reads in self._chunks:
                with tools.stages.time("read", reads.read_bytes):
                    tools.reader.read(reads, buffer)
                at = reads.places[0]
                chunk = buffer[at : at + len(rows) * row_bytes].reshape(len(rows), row_bytes)
                with tools.stages.time("hash", chunk.nbytes):
                    whole.update(chunk.data)
                space = buffer[reads.size :]
                for index in indexes:
                    if index in holders:
                        part = self._cut(tools, chunk, space, index)
                        self._write(tools, part, rows.start, index, holders[index])
                        with tools.stages.time("hash", part.nbytes):
                            parts[index].update(part.data)
                tools.progress(self.work.unit.name, chunk.nbytes)
        self.work.source_digests[name] = whole.digest()
        for index, ranks in holders.items():
            for rank in ranks:
                self.work.plain_digests[rank, name] = parts[index].digest()

    @cached_property
    def _chunks(self) -> tuple[Chunk, ...]:
        """In row order."""
        name, row, plan = self.tensor.name, self._row_bytes, self.work.target.reader.plan
        return tuple(
            Chunk(rows, slices, plan([Part(name, rows.start * row, len(rows) * row)]))
            for rows, slices in self._ranges()
        )

    def _ranges(self) -> Iterator[tuple[range, range]]:
        """(rows, slices that have some of them), in row order."""
        cut, rows = self.tensor.cut, self.tensor.shape[0]
        slices = [(cut.block(self.tensor.shape, i)[0], range(i, i + 1)) for i in range(cut.parts)]
        for whole, indexes in slices if cut.axis == 0 else [(range(rows), range(cut.parts))]:
            for begin in whole[:: self._chunk_rows]:
                yield range(begin, min(begin + self._chunk_rows, whole.stop)), indexes

    def _cut(self, tools: Tools, chunk: Bytes, space: Bytes, index: int) -> Bytes:
        """Copy a slice's part of a chunk to aligned memory."""
        rows, width = chunk.shape
        columns = span(width, self.tensor.cut.parts, index) if self.tensor.cut.axis == 1 else range(width)
        wanted = chunk[:, columns.start : columns.stop]
        part = space[: rows * len(columns)].reshape(rows, len(columns))
        with tools.stages.time("repack", part.nbytes):
            np.copyto(part, wanted)
            if tools.check and not np.array_equal(part, wanted):
                rank = self.tensor.cut.holders(self.work.unit.ranks)[index][0]
                raise ConvertError(
                    f"{self.tensor.name}, rank {rank}: a copied slice differs from the source; faulty memory"
                    " is likely"
                )
        return part

    def _write(self, tools: Tools, part: Bytes, begin: int, index: int, ranks: tuple[Rank, ...]) -> None:
        """Write rows of slice `index`, `begin` being the first of them in the whole tensor, to its ranks."""
        first = self.tensor.cut.block(self.tensor.shape, index)[0].start
        offset = self.work.unit.offset(self.tensor.name) + (begin - first) * part.shape[1]
        with tools.stages.time("write", part.nbytes * len(ranks)):
            for rank in ranks:
                self.work.files[rank].write(part, offset)


def tensor_jobs(work: UnitWork) -> list[TensorJob]:
    """The jobs of a unit's plain tensors, large ones first so that no long one is left alone at the end."""
    jobs = [TensorJob(work, tensor) for tensor in work.unit.source.plain]
    return sorted(jobs, key=lambda job: -work.target.source.tensors[job.tensor.name].entry.size)
