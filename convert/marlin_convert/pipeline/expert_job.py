"""A batch of routed experts of one layer: read, repack for every rank, prove, hash, write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from marlin_convert.errors import ConvertError, SourceError
from marlin_convert.layout.protocol import ELEMENT, ExpertSlice, Mismatch, Role
from marlin_convert.layout.rows import RowView
from marlin_convert.pipeline.stages import Tools
from marlin_convert.pipeline.unit_work import UnitWork
from marlin_convert.planning.output_plan import Stack
from marlin_convert.planning.units import ExpertTensor, expert_tensors
from marlin_convert.storage.buffers import Bytes
from marlin_convert.storage.files import PAGE, digest
from marlin_convert.storage.source_reader import Part, Reads

#: the memory of a batch in each role's elements
Memory = Mapping[Role, npt.NDArray[Any]]


class Output(NamedTuple):
    """The batch's experts of one stacked tensor of one rank: where they begin in the buffer, and their
    bytes.
    """

    at: int
    data: Bytes


@dataclass(frozen=True)
class ExpertJob:
    """The experts in consecutive slots of the ranks of one ep group, and their source tensors as they are
    read. `first` is which of these ranks' slots the batch begins with; `counted` are the source bytes that no
    job of the unit before reads, too.
    """

    work: UnitWork
    first: int
    experts: Sequence[int]
    ranks: tuple[int, ...]
    tensors: tuple[ExpertTensor, ...]
    reads: Reads
    counted: int

    @property
    def need(self) -> int:
        """Bytes of memory: input and output of the batch, each output on pages of its own."""
        stored = sum(stack.expert_bytes for stack in self.work.unit.stacked)
        pages = len(self.ranks) * len(self.work.unit.stacked)
        return self.reads.size + len(self.ranks) * len(self.experts) * stored + PAGE * pages

    @property
    def files(self) -> tuple[str, ...]:
        """Source files it reads."""
        return self.reads.files

    def run(self, tools: Tools) -> None:
        """Do it all. Raises SourceError, MachineError, or ConvertError where the exact check fails."""
        plan, size = self.work.target.plan, self.reads.read_bytes
        with tools.pool.take(self.need) as buffer:
            with tools.stages.time("read", size):
                tools.reader.read(self.reads, buffer)
            outputs = self._outputs(buffer)
            with tools.stages.time("repack", size):
                batch = plan.layout.batch(plan.shape, self._slices(buffer, outputs))
                wrong = batch.pack(tools.check)
            if wrong is not None:
                raise self._mismatch(wrong)
            written = sum(output.data.nbytes for output in outputs.values())
            with tools.stages.time("hash", size + written):
                self._hash_source(buffer)
                self._hash_outputs(outputs)
            with tools.stages.time("write", written):
                self._write(outputs)
        tools.progress(self.work.unit.name, self.counted)

    def _outputs(self, buffer: Bytes) -> dict[tuple[int, str], Output]:
        """By rank and stacked tensor, where the batch goes in `buffer`, each on a page of its own."""
        at, outputs = self.reads.size, {}
        for rank in self.ranks:
            for stack in self.work.unit.stacked:
                size = len(self.experts) * stack.expert_bytes
                outputs[rank, stack.name] = Output(at, buffer[at : at + size])
                at += -(-size // PAGE) * PAGE
        return outputs

    def _slices(self, buffer: Bytes, outputs: Mapping[tuple[int, str], Output]) -> list[ExpertSlice]:
        """Every expert for every rank, experts outermost; all in the memory of `buffer`."""
        shape, topology, slices = self.work.target.plan.shape, self.work.target.plan.topology, []
        memory: Memory = {role: buffer.view(element) for role, element in ELEMENT.items()}
        matrices = self._matrices(memory, buffer)
        for i, expert in enumerate(self.experts):
            for rank in self.ranks:
                index = topology.moe_tp_rank(rank)
                source = {
                    (projection, role): matrix.block(shape.cut(projection), index)
                    for (projection, role), matrix in matrices[expert].items()
                }
                stored = {
                    stack.tensor.name: _stored_expert(memory, stack, outputs[rank, stack.name].at, i)
                    for stack in self.work.unit.stacked
                }
                slices.append(ExpertSlice(source, stored))
        return slices

    def _matrices(self, memory: Memory, buffer: Bytes) -> dict[int, dict[tuple[str, Role], RowView]]:
        """The source matrices of each expert, as they were read."""
        matrices: dict[int, dict[tuple[str, Role], RowView]] = {expert: {} for expert in self.experts}
        for tensor, at in zip(self.tensors, self.reads.places, strict=True):
            if tensor.role is not None:
                size = self.work.target.source.tensors[tensor.name].entry.size
                view = _source_matrix(memory[tensor.role], buffer[at : at + size], at, tensor.shape[0])
                matrices[tensor.expert][tensor.projection, tensor.role] = view
        return matrices

    def _mismatch(self, wrong: Mismatch) -> ConvertError:
        expert, rank = divmod(wrong.slice, len(self.ranks))
        return ConvertError(
            f"{self.work.unit.name}, expert {self.experts[expert]}, {wrong.projection}, rank"
            f" {self.ranks[rank]}: the repacked buffer does not invert to the source: {wrong.where}; nothing"
            " of this unit was kept. Faulty memory is likely: test it, then run the same command again"
        )

    def _hash_source(self, buffer: Bytes) -> None:
        for tensor, at in zip(self.tensors, self.reads.places, strict=True):
            data = buffer[at : at + self.work.target.source.tensors[tensor.name].entry.size]
            if tensor.role is None:
                self._check_shape(tensor, data)
            self.work.note_source(tensor.name, digest(data))

    def _check_shape(self, tensor: ExpertTensor, data: Bytes) -> None:
        """weight_shape only repeats the geometry; it is not stored, so what it says must be what the packed
        tensor has.
        """
        file, entry = self.work.target.source.tensors[tensor.name]
        found = tuple(int(n) for n in data.copy().view(np.int32 if entry.dtype == "I32" else np.int64))
        expected = self.work.target.plan.shape.matrix(tensor.projection)
        if found != expected:
            raise SourceError(
                f"{tensor.name} in {file} says {list(found)}, but weight_packed has the shape of"
                f" {list(expected)}"
            )

    def _hash_outputs(self, outputs: Mapping[tuple[int, str], Output]) -> None:
        for key, (_, data) in outputs.items():
            for i, expert in enumerate(data.reshape(len(self.experts), -1)):
                self.work.expert_digests[key][self.first + i] = np.frombuffer(digest(expert), np.uint8)

    def _write(self, outputs: Mapping[tuple[int, str], Output]) -> None:
        work, left = self.work, set(self.ranks)
        while left:
            # most file systems let one thread at a time write to a file: whichever is free comes next
            rank = min(left, key=lambda rank: work.files[rank].writers)
            left.remove(rank)
            for stack in work.unit.stacked:
                offset = work.unit.offset(stack.name) + self.first * stack.expert_bytes
                work.files[rank].write(outputs[rank, stack.name].data, offset)


def _source_matrix(memory: npt.NDArray[Any], data: Bytes, at: int, rows: int) -> RowView:
    """A source matrix at byte `at` of the memory; copied only where a strange file layout leaves it unaligned
    for its element.
    """
    if at % memory.itemsize:
        return RowView.at(data.copy().view(memory.dtype), 0, rows, data.size)
    return RowView.at(memory, at, rows, data.size)


def _stored_expert(memory: Memory, stack: Stack, at: int, i: int) -> RowView:
    """Expert i of the batch in a stacked tensor that begins at byte `at` of the memory."""
    size = stack.expert_bytes
    return RowView.at(memory[stack.tensor.role], at + i * size, stack.tensor.shape[0], size)


class _Batch(NamedTuple):
    """The experts in consecutive slots of some ranks, `first` of them before."""

    first: int
    experts: Sequence[int]
    ranks: tuple[int, ...]


def _batches(work: UnitWork, batch: int) -> Iterator[_Batch]:
    """The slots of a layer's routed experts, `batch` at a time and never across ep groups; nothing of a layer
    that has none.

    The groups take turns: most file systems let one thread at a time write to a file, and each group's ranks
    have files of their own.
    """
    plan, groups = work.target.plan, []
    for group in range(plan.topology.ep):
        ranks = tuple(rank for rank in plan.ranks if plan.topology.ep_rank(rank) == group)
        held = plan.held(work.unit, ranks[0]) if ranks else ()
        groups.append([_Batch(at, held[at : at + batch], ranks) for at in range(0, len(held), batch)])
    turns = chain.from_iterable(zip_longest(*groups))
    return (turn for turn in turns if turn is not None)


def most_experts(work: UnitWork, batch: int) -> int:
    """How many experts a job has at most, each counted once however many of its slots it is in."""
    return max((len(set(each.experts)) for each in _batches(work, batch)), default=0)


def expert_jobs(work: UnitWork, batch: int) -> list[ExpertJob]:
    """The jobs of a layer's routed experts, `batch` slots at a time."""
    jobs, before = [], set[int]()
    for each in _batches(work, batch):
        jobs.append(_job(work, each, before))
        before.update(each.experts)
    return jobs


def _job(work: UnitWork, batch: _Batch, before: Set[int]) -> ExpertJob:
    """The job of some slots; `before` are the experts that other jobs of the unit read."""
    prefix = work.unit.source.experts_prefix or ""
    tensors = tuple(  # an expert in two slots of the batch is read once
        tensor
        for expert in dict.fromkeys(batch.experts)
        for tensor in expert_tensors(prefix, expert, work.target.plan.shape)
    )
    entries = [work.target.source.tensors[tensor.name].entry for tensor in tensors]
    reads = work.target.reader.plan([Part(entry.name, 0, entry.size) for entry in entries])
    sizes = zip(tensors, entries, strict=True)
    counted = sum(entry.size for tensor, entry in sizes if tensor.expert not in before)
    return ExpertJob(work, *batch, tensors, reads, counted)
