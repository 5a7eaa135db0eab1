"""What a layout is to the rest of the project: one object; another layout is another module and a line in the
registry, not an edit of the pipeline.

A layout says where the matrices of a routed expert lie in the stacked tensors of a rank, and moves them there
and back. It never cuts: what it gets are slices already, made by `slicing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

from marlin_convert.layout.rows import RowView
from marlin_convert.slicing import Cut

#: the three matrices of a routed expert, in the order in which they are read and named
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Role(StrEnum):
    """What a tensor of a quantized matrix holds; the value is how its name ends, in the source and in
    shards.
    """

    WEIGHT = "weight_packed"
    SCALE = "weight_scale"


#: the elements that are moved: 16 inputs of 4 bit, one scale of 16 bit
ELEMENT: Mapping[Role, type[np.unsignedinteger]] = {Role.WEIGHT: np.uint64, Role.SCALE: np.uint16}


@dataclass(frozen=True)
class QuantScheme:
    """How the weights of a matrix are quantized, whatever its layout: value = (code - 2^(num_bits-1)) * scale
    where `symmetric`, one scale for `group_size` inputs of an output.
    """

    group_size: int
    num_bits: int = 4
    symmetric: bool = True
    scale_dtype: str = "BF16"

    @property
    def roles(self) -> tuple[Role, ...]:
        """The tensors of a matrix, in the order in which they are read and stored."""
        return (Role.WEIGHT, Role.SCALE)

    def dtype(self, role: Role) -> str:
        """safetensors dtype of a role's tensor, in the source and in shards."""
        return "I32" if role is Role.WEIGHT else self.scale_dtype

    def source_shape(self, role: Role, out: int, inputs: int) -> tuple[int, int]:
        """Shape of a role's tensor in a compressed-tensors checkpoint, for a matrix [out, inputs]."""
        return out, inputs * self.num_bits // 32 if role is Role.WEIGHT else inputs // self.group_size


@dataclass(frozen=True)
class ExpertShape:
    """The routed experts of a model, cut into `moe_tp` slices of the intermediate size."""

    hidden: int
    intermediate: int
    scheme: QuantScheme
    moe_tp: int

    @property
    def local(self) -> int:
        """A rank's slice of the intermediate size."""
        return self.intermediate // self.moe_tp

    def matrix(self, projection: str) -> tuple[int, int]:
        """[out, in] of a projection in the source."""
        down = projection == "down_proj"
        return (self.hidden, self.intermediate) if down else (self.intermediate, self.hidden)

    def cut(self, projection: str) -> Cut:
        """How a projection is divided: gate and up along their outputs, down along its inputs."""
        return Cut(1 if projection == "down_proj" else 0, self.moe_tp)


@dataclass(frozen=True)
class StackedTensor:
    """One tensor of a rank's routed experts: a role of the projections that share a GEMM. `shape` is that of
    one expert, the file has [E, *shape].
    """

    name: str
    dtype: str
    shape: tuple[int, int]
    role: Role
    projections: tuple[str, ...]


#: slices of an expert's source matrices, by projection and role, in `ELEMENT`s
SourceViews = Mapping[tuple[str, Role], RowView]


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """A rank's slice of one expert: where it lies in the source's memory, and the expert's stacked tensors by
    name, each whole, in `ELEMENT`s.
    """

    source: SourceViews
    stored: Mapping[str, RowView]


@dataclass(frozen=True)
class Mismatch:
    """What of a batch does not invert to its source: the number of the slice, the projection, and the
    place.
    """

    slice: int
    projection: str
    where: str


class RepackBatch(Protocol):
    """Slices on their way into the stacked tensors."""

    def pack(self, check: bool = False) -> Mismatch | None:
        """Fill the stacked side. With `check`, invert each piece and compare it with its source right after,
        and return the first slice that differs; without, and where none differs, None.
        """


class Layout(Protocol):
    """Slices of source matrices <-> the stacked tensors of one rank."""

    @property
    def id(self) -> str:
        """What files and manifest call it."""

    def validate(self, shape: ExpertShape) -> str | None:
        """Why experts of this shape cannot be stored this way, or None."""

    def padded(self, shape: ExpertShape) -> int:
        """The rank's slice of the intermediate size as stored."""

    def stacked(self, shape: ExpertShape) -> tuple[StackedTensor, ...]:
        """The stacked tensors, in load order."""

    def batch(self, shape: ExpertShape, slices: Sequence[ExpertSlice]) -> RepackBatch:
        """What brings slices into the stacked tensors, to be run and to be checked."""

    def unpack(self, shape: ExpertShape, part: ExpertSlice) -> tuple[str, ...]:
        """Inverse of `batch(...).pack()` for one slice: writes its source side, which may be some of its
        matrices with the stacked tensors they are in. Returns the projections whose padding is not zero.
        """
