"""What is done with stored pieces once they are read, so that source tensors lie in the buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from marlin_convert.errors import OutputError
from marlin_convert.layout.protocol import ELEMENT, ExpertSlice, Role
from marlin_convert.layout.rows import RowView
from marlin_convert.shards.stored_places import StoredExperts
from marlin_convert.storage.buffers import Bytes
from marlin_convert.storage.reads import PieceReader, ReadPlan

#: by projection and role, where a whole source matrix goes in the buffer, and its bytes
Homes = dict[tuple[str, Role], tuple[int, int]]


class Step(Protocol):
    """What is to be done once the pieces are read; `at` is where each begins in the buffer."""

    def run(self, buffer: Bytes, at: Sequence[int]) -> None:
        """Do it."""


@dataclass(frozen=True)
class AssembledReads:
    """The parts, then what is whole only here, then from byte `scratch` the pieces as they are stored."""

    places: tuple[int, ...]
    scratch: int
    plan: ReadPlan
    steps: tuple[Step, ...]

    @property
    def size(self) -> int:
        """See `Reads`."""
        return self.scratch + self.plan.size

    @property
    def read_bytes(self) -> int:
        """See `Reads`."""
        return self.plan.read_bytes

    @property
    def files(self) -> tuple[str, ...]:
        """See `Reads`."""
        return self.plan.files

    def fill(self, reader: PieceReader, buffer: Bytes) -> None:
        """See `Reads`. Raises OutputError where what is padding is not zero."""
        reader.read(self.plan, buffer[self.scratch :])
        at = [self.scratch + place for place in self.plan.places]
        for step in self.steps:
            step.run(buffer[: self.size], at)


class Place(NamedTuple):
    """Rows of `width` bytes, `stride` bytes apart."""

    at: int
    width: int
    stride: int


@dataclass(frozen=True)
class Copy:
    """`rows` rows of piece `piece`, or with None from `source` on, to a place."""

    rows: int
    target: Place
    piece: int | None
    source: int = 0

    def run(self, buffer: Bytes, at: Sequence[int]) -> None:
        """See `Step`."""
        begin = self.source if self.piece is None else at[self.piece]
        place, size = self.target, self.rows * self.target.width
        rows = buffer[begin : begin + size].reshape(self.rows, place.width)
        np.copyto(RowView(buffer, place.at, place.stride, self.rows, place.width).array(), rows)


@dataclass(frozen=True)
class Constant:
    """Bytes that are not stored."""

    place: int
    data: bytes

    def run(self, buffer: Bytes, at: Sequence[int]) -> None:
        """See `Step`."""
        buffer[self.place : self.place + len(self.data)] = np.frombuffer(self.data, np.uint8)


@dataclass(frozen=True)
class Unpack:
    """Matrices of one expert out of its slices: in slice order, the piece of each stacked tensor."""

    layer: StoredExperts
    expert: int
    homes: Homes
    slices: tuple[dict[str, int], ...]

    def run(self, buffer: Bytes, at: Sequence[int]) -> None:
        """See `Step`."""
        layer, memory = self.layer, {role: buffer.view(element) for role, element in ELEMENT.items()}
        stacks = {stack.name: stack for stack in layer.stacks.values()}
        matrices = {
            (projection, role): RowView.at(memory[role], begin, layer.shape.matrix(projection)[0], size)
            for (projection, role), (begin, size) in self.homes.items()
        }
        for index, pieces in enumerate(self.slices):
            source = {
                (projection, role): matrix.block(layer.shape.cut(projection), index)
                for (projection, role), matrix in matrices.items()
            }
            stored = {}
            for name, piece in pieces.items():
                rows, size = stacks[name].shape[0], next(iter(layer.held[name].values())).row_bytes
                stored[name] = RowView.at(memory[stacks[name].role], at[piece], rows, size)
            if layer.layout.unpack(layer.shape, ExpertSlice(source, stored)):
                raise self._unclean(index, next(iter(pieces)))

    def _unclean(self, index: int, name: str) -> OutputError:
        rank, _ = self.layer.homes(self.expert)[index]
        return OutputError(
            f"{self.layer.held[name][rank].shard.path}: expert {self.expert}, rank {rank}: the padding is not"
            " zero; run verify"
        )
