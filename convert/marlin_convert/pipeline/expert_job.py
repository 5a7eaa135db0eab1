"""A batch of routed experts of one layer: read, repack for every rank, prove, hash, write."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from marlin_convert.buffers import Buffer
from marlin_convert.checkpoint.header import DTYPE_SIZE
from marlin_convert.checkpoint.source import Source
from marlin_convert.errors import ConvertError, SourceError
from marlin_convert.files import PAGE, digest
from marlin_convert.layout.protocol import PROJECTIONS, Slice, StackedTensor
from marlin_convert.layout.rows import Rows
from marlin_convert.pipeline.stages import Tools
from marlin_convert.pipeline.unit_work import UnitWork
from marlin_convert.planning.output import OutputPlan
from marlin_convert.planning.rules import expert_tensors
from marlin_convert.reads import Piece, ReadPlan, plan_reads

#: (where it begins in the buffer, its bytes) per (rank, stacked tensor)
Outputs = dict[tuple[int, str], tuple[int, Buffer]]


@dataclass(frozen=True)
class ExpertJob:
    """Experts `first` .. `first + count - 1`, all owned by the ranks of one ep group."""

    work: UnitWork
    source: Source
    first: int
    count: int
    ranks: tuple[int, ...]
    reads: ReadPlan
    names: tuple[str, ...]

    @property
    def need(self) -> int:
        """Bytes of memory: input and output of the batch."""
        return (
            self.reads.size
            + len(self.ranks) * self.count * sum(map(expert_bytes, self.work.unit.stacked))
            + PAGE * 4 * len(self.ranks)
        )

    @property
    def files(self) -> tuple[str, ...]:
        """Source files it reads."""
        return tuple(sorted({run.file for run in self.reads.runs}))

    def run(self, tools: Tools) -> None:
        """Do it all. Raises SourceError, MachineError, or ConvertError where the exact check fails."""
        with tools.pool.take(self.need) as buffer:
            size = sum(run.length for run in self.reads.runs)
            with tools.stages.time("read", size):
                tools.reader.read(self.reads, buffer)
            outputs = self._outputs(buffer)
            with tools.stages.time("repack", size):
                slices = self._slices(buffer, outputs)
                moves = self.work.plan.layout.moves(self.work.plan.shape, [each for _, _, each in slices])
                wrong = moves.pack(tools.check)
            self._refuse_mismatch(wrong, slices)
            with tools.stages.time("hash", size + sum(data.nbytes for _, data in outputs.values())):
                self._hash(buffer, outputs)
            with tools.stages.time("write", sum(data.nbytes for _, data in outputs.values())):
                self._write(outputs)
        tools.progress(size)

    def _outputs(self, buffer: Buffer) -> Outputs:
        """Per rank and stacked tensor, where the batch's experts begin in `buffer` (each on a page of its
        own) and their bytes.
        """
        at, outputs = self.reads.size, {}
        for rank in self.ranks:
            for tensor in self.work.unit.stacked:
                size = self.count * expert_bytes(tensor)
                outputs[rank, tensor.name] = (at, buffer[at : at + size])
                at += -(-size // PAGE) * PAGE
        return outputs

    def _slices(self, buffer: Buffer, outputs: Outputs) -> list[tuple[int, int, Slice]]:
        """(expert, rank, slice) for every expert, projection and rank of the batch; all in the memory of
        `buffer`.
        """
        plan, prefix = self.work.plan, self.work.unit.source.experts_prefix
        wide, narrow = buffer.view(np.uint64), buffer.view(np.uint16)
        stacked = {tensor.name: tensor for tensor in self.work.unit.stacked}
        slices = []
        for p, projection in enumerate(PROJECTIONS):
            out, inputs = plan.shape.matrix(projection)
            words, scales = (f"{prefix}.{name}" for name in plan.layout.targets(projection))
            for i in range(self.count):
                packed = _rows(wide, buffer, self.reads.places[9 * i + 3 * p], out, inputs // 16)
                scale = _rows(
                    narrow, buffer, self.reads.places[9 * i + 3 * p + 1], out, inputs // plan.shape.group_size
                )
                for rank in self.ranks:
                    w = _expert(wide, outputs[rank, words][0], i, stacked[words])
                    s = _expert(narrow, outputs[rank, scales][0], i, stacked[scales])
                    slices.append(
                        (
                            self.first + i,
                            rank,
                            Slice(projection, plan.topology.moe_tp_rank(rank), packed, scale, w, s),
                        )
                    )
        return slices

    def _refuse_mismatch(self, wrong: tuple[int, str] | None, slices: list[tuple[int, int, Slice]]) -> None:
        if wrong is not None:
            expert, rank, each = slices[wrong[0]]
            raise ConvertError(
                f"{self.work.unit.name}, expert {expert}, {each.projection}, rank {rank}: the repacked buffer"
                f" does not invert to the source: {wrong[1]}; nothing of this unit was kept. Faulty memory is"
                " likely: test it, then run the same command again"
            )

    def _hash(self, buffer: Buffer, outputs: Outputs) -> None:
        for name, place in zip(self.names, self.reads.places, strict=True):
            entry = self.source.tensors[name].entry
            data = buffer[place : place + entry.size]
            if name.endswith(".weight_shape"):
                self._check_shape(name, data)
            self.work.source_digests[name] = digest(data)
        start = self.work.plan.topology.expert_range(self.ranks[0], self.work.plan.experts).start
        for (rank, name), (_, data) in outputs.items():
            target, size = self.work.expert_digests[rank, name], data.size // self.count
            for i in range(self.count):
                target[self.first + i - start] = np.frombuffer(
                    digest(data[i * size : (i + 1) * size]), np.uint8
                )

    def _check_shape(self, name: str, data: Buffer) -> None:
        """weight_shape only repeats the geometry; it is not stored, so what it says must be what the packed
        tensor has.
        """
        file, entry = self.source.tensors[name]
        found = tuple(int(n) for n in data.copy().view(np.int32 if entry.dtype == "I32" else np.int64))
        expected = self.work.plan.shape.matrix(name.split(".")[-2])
        if found != expected:
            raise SourceError(
                f"{name} in {file} says {list(found)}, but weight_packed has the shape of {list(expected)}"
            )

    def _write(self, outputs: Outputs) -> None:
        work, left = self.work, set(self.ranks)
        first = self.first - work.plan.topology.expert_range(self.ranks[0], work.plan.experts).start
        while left:
            # most file systems let one thread at a time write to a file: whichever is free comes next
            rank = min(left, key=lambda rank: work.files[rank].writers)
            left.remove(rank)
            for tensor in work.unit.stacked:
                _, data = outputs[rank, tensor.name]
                work.files[rank].write(
                    data, work.unit.offset(tensor.name) + first * (data.size // self.count)
                )


def expert_bytes(tensor: StackedTensor) -> int:
    """Bytes of one expert of a stacked tensor [E, ...]."""
    return math.prod(tensor.shape[1:]) * DTYPE_SIZE[tensor.dtype]


def _rows(flat: npt.NDArray[Any], buffer: Buffer, at: int, rows: int, cols: int) -> Rows:
    """A source matrix in the buffer, seen as `flat`; copied only where a strange file layout leaves it
    unaligned for its element.
    """
    item = flat.itemsize
    if at % item:
        return Rows(buffer[at : at + rows * cols * item].copy().view(flat.dtype), 0, cols, rows, cols)
    return Rows(flat, at // item, cols, rows, cols)


def _expert(flat: npt.NDArray[Any], at: int, i: int, tensor: StackedTensor) -> Rows:
    """Expert i of a stacked tensor that begins at byte `at` of the buffer."""
    size, rows = expert_bytes(tensor) // flat.itemsize, tensor.shape[1]
    return Rows(flat, at // flat.itemsize + i * size, size // rows, rows, size // rows)


def expert_jobs(work: UnitWork, source: Source, batch: int) -> list[ExpertJob]:
    """The jobs of a layer's routed experts, in expert order, `batch` at a time and never across ep groups."""
    plan, prefix = work.plan, work.unit.source.experts_prefix
    if prefix is None:
        return []
    jobs = []
    for group in range(plan.topology.ep):
        ranks = tuple(rank for rank in plan.ranks if plan.topology.ep_rank(rank) == group)
        if not ranks:
            continue
        owned = plan.topology.expert_range(ranks[0], plan.experts)
        for first in range(owned.start, owned.stop, batch):
            count = min(batch, owned.stop - first)
            jobs.append(expert_job(work, source, plan, prefix, first, count, ranks))
    return jobs


def expert_job(
    work: UnitWork,
    source: Source,
    plan: OutputPlan,
    prefix: str,
    first: int,
    count: int,
    ranks: tuple[int, ...],
) -> ExpertJob:
    """One job."""
    names = tuple(
        name
        for expert in range(first, first + count)
        for name, _, _ in expert_tensors(prefix, expert, plan.shape)
    )
    tensors = [source.tensors[name] for name in names]
    return ExpertJob(
        work,
        source,
        first,
        count,
        ranks,
        plan_reads([Piece(t.file, t.entry.offset, t.entry.size) for t in tensors]),
        names,
    )
