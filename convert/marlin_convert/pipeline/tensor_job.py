"""A tensor that keeps its name: streamed in chunks of rows, cut by its rule, written to each rank that holds
some of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from marlin_convert.checkpoint.source import Source
from marlin_convert.errors import ConvertError
from marlin_convert.files import PAGE
from marlin_convert.pipeline.stages import Tools
from marlin_convert.pipeline.unit_work import UnitWork
from marlin_convert.planning.rules import PlainTensor
from marlin_convert.reads import Piece, plan_reads

Ranks = tuple[int | None, ...]
Bytes = npt.NDArray[np.uint8]

#: source bytes of a chunk, about
CHUNK = 16 << 20


@dataclass(frozen=True)
class TensorJob:
    """One tensor. Its chunks go in order, so that whole-tensor digests are made in the same pass."""

    work: UnitWork
    source: Source
    tensor: PlainTensor

    @property
    def need(self) -> int:
        """Bytes of memory: one chunk as read, and once more as cut."""
        return 2 * (self._chunk_rows * self._row_bytes + 2 * PAGE) + PAGE * len(self.work.unit.ranks)

    @property
    def files(self) -> tuple[str, ...]:
        """Source files it reads."""
        return (self.source.tensors[self.tensor.name].file,)

    @property
    def _row_bytes(self) -> int:
        return self.source.tensors[self.tensor.name].entry.size // self.tensor.shape[0]

    @property
    def _chunk_rows(self) -> int:
        """Rows of a chunk, such that each rank's part of it is whole pages where it can be."""
        rows, row_bytes = self.tensor.shape[0], self._row_bytes
        part = row_bytes // self.work.plan.topology.tp if self.tensor.axis == 1 else row_bytes
        unit = PAGE // math.gcd(PAGE, part)
        return min(rows, max(unit, CHUNK // row_bytes // unit * unit))

    def run(self, tools: Tools) -> None:
        """Stream it. Raises SourceError or MachineError."""
        name = self.tensor.name
        file, entry = self.source.tensors[name]
        whole = xxhash.xxh3_128()
        parts = {ranks: xxhash.xxh3_128() for ranks in self._owners()}
        row_bytes = self._row_bytes
        with tools.pool.take(self.need) as buffer:
            for begin, end, owners in self._chunks():
                reads = plan_reads([Piece(file, entry.offset + begin * row_bytes, (end - begin) * row_bytes)])
                with tools.stages.time("read", reads.size):
                    tools.reader.read(reads, buffer)
                chunk = buffer[reads.places[0] : reads.places[0] + (end - begin) * row_bytes].reshape(
                    end - begin, row_bytes
                )
                with tools.stages.time("hash", chunk.nbytes):
                    whole.update(chunk.data)
                space = buffer[-(-reads.size // PAGE) * PAGE :]
                for ranks in owners:
                    part = self._cut(tools, chunk, space, ranks, begin)
                    with tools.stages.time("hash", part.nbytes):
                        parts[ranks].update(part.data)
                tools.progress(chunk.nbytes)
        self.work.source_digests[name] = whole.digest()
        for ranks, part_digest in parts.items():
            for rank in ranks:
                self.work.plain_digests[rank, name] = part_digest.digest()

    def _owners(self) -> list[Ranks]:
        """Groups of ranks that hold the same bytes: all of them, or each on its own."""
        ranks = self.work.unit.ranks
        return [ranks] if self.tensor.axis is None else [(rank,) for rank in ranks]

    def _chunks(self) -> Iterator[tuple[int, int, list[Ranks]]]:
        """(first row, end row, who holds some of it), in row order."""
        step, rows, owners = self._chunk_rows, self.tensor.shape[0], self._owners()
        if self.tensor.axis != 0:
            for begin in range(0, rows, step):
                yield begin, min(begin + step, rows), owners
            return
        tp = self.work.plan.topology.tp
        local = rows // tp
        for owner in range(tp):
            holders: list[Ranks] = [ranks for ranks in owners if ranks == (owner,)]
            for begin in range(owner * local, (owner + 1) * local, step):
                yield begin, min(begin + step, (owner + 1) * local), holders

    def _cut(self, tools: Tools, chunk: Bytes, space: Bytes, ranks: Ranks, begin: int) -> Bytes:
        """Copy the ranks' part of a chunk to aligned memory and write it; returns the part."""
        tensor, tp, rank = self.tensor, self.work.plan.topology.tp, ranks[0]
        rows, width = chunk.shape
        row, column = begin, 0
        if tensor.axis == 0 and rank is not None:
            row = begin - rank * (tensor.shape[0] // tp)
        elif tensor.axis == 1 and rank is not None:
            width //= tp
            column = rank * width
        part = space[: rows * width].reshape(rows, width)
        with tools.stages.time("repack", part.nbytes):
            np.copyto(part, chunk[:, column : column + width])
            if tools.check and not np.array_equal(part, chunk[:, column : column + width]):
                raise ConvertError(
                    f"{tensor.name}, rank {rank}: a copied slice differs from the source; faulty memory is"
                    " likely"
                )
        with tools.stages.time("write", part.nbytes * len(ranks)):
            for each in ranks:
                self.work.files[each].write(part, self.work.unit.offset(tensor.name) + row * width)
        return part


def tensor_jobs(work: UnitWork, source: Source) -> list[TensorJob]:
    """The jobs of a unit's plain tensors, large ones first so that no long one is left alone at the end."""
    jobs = [TensorJob(work, source, tensor) for tensor in work.unit.source.plain]
    return sorted(jobs, key=lambda job: -source.tensors[job.tensor.name].entry.size)
