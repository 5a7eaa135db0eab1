"""A batch of routed experts of one layer: read, repack for every rank, prove, hash, write."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from convert.buffers import Buffer
from convert.checkpoint.source import Source
from convert.errors import ConvertError, SourceError
from convert.files import PAGE, digest
from convert.layout.protocol import PROJECTIONS
from convert.layout.rows import Rows
from convert.pipeline.stages import Tools
from convert.pipeline.unit_work import UnitWork
from convert.planning.output import OutputPlan, OutputUnit
from convert.planning.rules import expert_tensors
from convert.reads import Piece, ReadPlan, plan_reads

ELEMENT = {"I32": np.int32, "BF16": np.uint16}


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
        return self.reads.size + len(self.ranks) * self.count * _stored_bytes(self.work.unit) + PAGE * 4 * len(self.ranks)

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
                self._each(buffer, outputs, self._pack)
            if tools.check:
                with tools.stages.time("check", size):
                    self._each(buffer, outputs, self._check)
            with tools.stages.time("hash", size + sum(array.nbytes for array in outputs.values())):
                self._hash(buffer, outputs)
            with tools.stages.time("write", sum(array.nbytes for array in outputs.values())):
                self._write(outputs)
        tools.progress(size)

    def _outputs(self, buffer: Buffer) -> dict[tuple[int, str], np.ndarray]:
        """Per rank and stacked tensor the batch's experts, each array on a page of its own in `buffer`."""
        at, outputs = self.reads.size, {}
        for rank in self.ranks:
            for tensor in self.work.unit.stacked:
                shape = (self.count, *tensor.shape[1:])
                dtype = np.dtype(ELEMENT[tensor.dtype])
                size = int(np.prod(shape)) * dtype.itemsize
                outputs[rank, tensor.name] = buffer[at : at + size].view(dtype).reshape(shape)
                at += -(-size // PAGE) * PAGE
        return outputs

    def _each(self, buffer: Buffer, outputs: dict[tuple[int, str], np.ndarray], do) -> None:  # type: ignore[no-untyped-def]
        """Call `do` for every expert, projection and rank with the source matrix and the place of its slice."""
        plan, prefix = self.work.plan, self.work.unit.source.experts_prefix
        for i in range(self.count):
            for p, projection in enumerate(PROJECTIONS):
                out, inputs = plan.shape.matrix(projection)
                at = self.reads.places[9 * i + 3 * p : 9 * i + 3 * p + 3]
                packed = _rows(buffer, at[0], out, inputs // 16, np.uint64)
                scale = _rows(buffer, at[1], out, inputs // plan.shape.group_size, np.uint16)
                words, scales = plan.layout.targets(projection)
                for rank in self.ranks:
                    w, s = outputs[rank, f"{prefix}.{words}"], outputs[rank, f"{prefix}.{scales}"]
                    do(i, projection, rank, packed, scale, _expert(w, i, np.uint64), _expert(s, i, np.uint16))

    def _pack(self, i: int, projection: str, rank: int, packed: Rows, scale: Rows, words: Rows, scales: Rows) -> None:
        plan = self.work.plan
        plan.layout.pack(plan.shape, projection, plan.topology.moe_tp_rank(rank), packed, scale, words, scales)

    def _check(self, i: int, projection: str, rank: int, packed: Rows, scale: Rows, words: Rows, scales: Rows) -> None:
        plan = self.work.plan
        wrong = plan.layout.mismatch(plan.shape, projection, plan.topology.moe_tp_rank(rank), packed, scale, words, scales)
        if wrong is not None:
            raise ConvertError(
                f"{self.work.unit.name}, expert {self.first + i}, {projection}, rank {rank}: the repacked buffer does not invert to the source: "
                f"{wrong}; nothing of this unit was kept. Faulty memory is likely: test it, then run the same command again"
            )

    def _hash(self, buffer: Buffer, outputs: dict[tuple[int, str], np.ndarray]) -> None:
        for name, place in zip(self.names, self.reads.places, strict=True):
            entry = self.source.tensors[name].entry
            data = buffer[place : place + entry.size]
            if name.endswith(".weight_shape"):
                self._check_shape(name, data)
            self.work.source_digests[name] = digest(data)
        start = self.work.plan.topology.expert_range(self.ranks[0], self.work.plan.experts).start
        for (rank, name), array in outputs.items():
            target = self.work.expert_digests[rank, name]
            for i in range(self.count):
                target[self.first + i - start] = np.frombuffer(digest(array[i]), np.uint8)

    def _check_shape(self, name: str, data: Buffer) -> None:
        """weight_shape only repeats the geometry; it is not stored, so what it says must be what the packed tensor has."""
        file, entry = self.source.tensors[name]
        found = tuple(int(n) for n in data.copy().view(np.int32 if entry.dtype == "I32" else np.int64))
        expected = self.work.plan.shape.matrix(name.split(".")[-2])
        if found != expected:
            raise SourceError(f"{name} in {file} says {list(found)}, but weight_packed has the shape of {list(expected)}")

    def _write(self, outputs: dict[tuple[int, str], np.ndarray]) -> None:
        work = self.work
        for (rank, name), array in outputs.items():
            first = self.first - work.plan.topology.expert_range(rank, work.plan.experts).start
            work.files[rank].write(array, work.unit.offset(name) + first * array[0].nbytes)


def _stored_bytes(unit: OutputUnit) -> int:
    """Bytes of one expert on one rank."""
    return sum(int(np.prod(tensor.shape[1:])) * np.dtype(ELEMENT[tensor.dtype]).itemsize for tensor in unit.stacked)


def _rows(buffer: Buffer, at: int, rows: int, cols: int, dtype: type[np.generic]) -> Rows:
    """A source matrix in the buffer; copied only where a strange file layout leaves it unaligned for its element."""
    item = np.dtype(dtype).itemsize
    if at % item:
        return Rows(buffer[at : at + rows * cols * item].copy().view(dtype), 0, cols, rows, cols)
    return Rows(buffer.view(dtype), at // item, cols, rows, cols)


def _expert(stacked: np.ndarray, i: int, dtype: type[np.generic]) -> Rows:
    """One expert of a contiguous stacked array."""
    flat = stacked.reshape(-1).view(dtype)
    rows = stacked.shape[1]
    cols = flat.size // (stacked.shape[0] * rows)
    return Rows(flat, i * rows * cols, cols, rows, cols)


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


def expert_job(work: UnitWork, source: Source, plan: OutputPlan, prefix: str, first: int, count: int, ranks: tuple[int, ...]) -> ExpertJob:
    """One job."""
    names = tuple(name for expert in range(first, first + count) for name, _, _ in expert_tensors(prefix, expert, plan.shape))
    tensors = [source.tensors[name] for name in names]
    return ExpertJob(work, source, first, count, ranks, plan_reads([Piece(t.file, t.entry.offset, t.entry.size) for t in tensors]), names)
