"""What a layout is to the rest of the project: one object; another layout is another module, not an edit of
the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from marlin_convert.layout.rows import Rows

#: the three matrices of a routed expert, in the order in which they are read and named
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class StackedTensor:
    """One tensor of a rank's routed experts; `shape` is that of one expert, the file has [E, *shape]."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ExpertShape:
    """The routed experts of a model, cut into `moe_tp` slices of the intermediate size."""

    hidden: int
    intermediate: int
    group_size: int
    moe_tp: int

    @property
    def local(self) -> int:
        """A rank's slice of the intermediate size."""
        return self.intermediate // self.moe_tp

    def matrix(self, projection: str) -> tuple[int, int]:
        """[out, in] of a projection in the source."""
        return (
            (self.hidden, self.intermediate)
            if projection == "down_proj"
            else (self.intermediate, self.hidden)
        )

    def axis(self, projection: str) -> int:
        """The axis of the source matrix that is cut: gate and up along their outputs, down along its
        inputs.
        """
        return 1 if projection == "down_proj" else 0


@dataclass(frozen=True, slots=True)
class Slice:
    """Slice `index` of one projection of one expert: the whole source matrix (packed u64 [N, K/16], scale u16
    [N, K/g]) and the expert's words and scales in the stacked tensors (u64 [K/16, N total], u16 [K/g, N
    total]).
    """

    projection: str
    index: int
    packed: Rows
    scale: Rows
    words: Rows
    scales: Rows


class Moves(Protocol):
    """A batch of slices on its way into the stacked tensors."""

    def pack(self, check: bool = False) -> tuple[int, str] | None:
        """Fill the stacked side. With `check`, invert each piece and compare it with its source right after,
        and return the first slice that differs and where; without, and where none differs, None.
        """

    def mismatch(self) -> tuple[int, str] | None:
        """The first slice whose inverse is not its source, and where it differs; None where there is none."""


class Layout(Protocol):
    """Source matrices of one expert <-> the stacked tensors of one rank."""

    @property
    def id(self) -> str:
        """What files and manifest call it."""

    @property
    def num_bits(self) -> int: ...

    @property
    def symmetric(self) -> bool: ...

    @property
    def b_q_type(self) -> tuple[str, int]:
        """The kernel's name and number of the weight type."""

    def why_not(self, shape: ExpertShape) -> str | None:
        """Why the kernel could not run this shape, or None."""

    def padded(self, shape: ExpertShape) -> int:
        """The rank's slice of the intermediate size as stored."""

    def stacked(self, shape: ExpertShape) -> tuple[StackedTensor, ...]:
        """The stacked tensors, in load order."""

    def targets(self, projection: str) -> tuple[str, str]:
        """Names of the stacked tensors that hold the words and the scales of a projection."""

    def moves(self, shape: ExpertShape, slices: Sequence[Slice]) -> Moves:
        """What brings slices of source matrices into the stacked tensors, to be run and to be checked."""

    def pack(
        self,
        shape: ExpertShape,
        projection: str,
        index: int,
        packed: Rows,
        scale: Rows,
        words: Rows,
        scales: Rows,
    ) -> None:
        """Fill slice `index` from a whole source matrix: packed u64 [N, K/16] and scale u16 [N, K/g] -> words
        and scales of one expert.
        """

    def unpack(
        self,
        shape: ExpertShape,
        projection: str,
        index: int,
        words: Rows,
        scales: Rows,
        packed: Rows,
        scale: Rows,
    ) -> None:
        """Inverse of `pack`: writes slice `index` of the whole source matrix. ValueError where padding is not
        zero.
        """

    def mismatch(
        self,
        shape: ExpertShape,
        projection: str,
        index: int,
        packed: Rows,
        scale: Rows,
        words: Rows,
        scales: Rows,
    ) -> str | None:
        """Where the inverse of words and scales differs from the source, in words; None where it does not."""
