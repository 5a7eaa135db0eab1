"""A second layout, to prove that adding one edits nothing else: matrices as published, gate above up, one
after the other, nothing permuted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from marlin_convert.layout.protocol import ExpertShape, ExpertSlice, Mismatch, Role, StackedTensor
from marlin_convert.layout.rows import RowView


@dataclass(frozen=True)
class ToyBatch:
    """Copies, one by one."""

    slices: Sequence[ExpertSlice]

    def pack(self, check: bool = False) -> Mismatch | None:
        """See `RepackBatch.pack`."""
        for number, part in enumerate(self.slices):
            for (projection, role), source in part.source.items():
                target = _place(part, projection, role).array()
                np.copyto(target, source.array())
                if check and not np.array_equal(target, source.array()):
                    return Mismatch(number, projection, f"{role} differs")
        return None


@dataclass(frozen=True)
class Toy:
    """[2I, H/8] and [H, I/8] words, [2I, H/g] and [H, I/g] scales."""

    id: str = "toy.n_major"

    def validate(self, shape: ExpertShape) -> str | None:
        """See `Layout.validate`."""
        whole = (
            shape.local * shape.moe_tp == shape.intermediate and shape.local % shape.scheme.group_size == 0
        )
        return None if whole else "a slice would cut a group"

    def padded(self, shape: ExpertShape) -> int:
        """Nothing is padded."""
        return shape.local

    def stacked(self, shape: ExpertShape) -> tuple[StackedTensor, ...]:
        """See `Layout.stacked`."""
        tensors = []
        for name, of in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))):
            out, inputs = (2 * shape.local, shape.hidden) if name == "w13" else (shape.hidden, shape.local)
            for role in shape.scheme.roles:
                size = shape.scheme.source_shape(role, out, inputs)
                tensors.append(StackedTensor(f"{name}_{role}", shape.scheme.dtype(role), size, role, of))
        return tuple(tensors)

    def batch(self, shape: ExpertShape, slices: Sequence[ExpertSlice]) -> ToyBatch:
        """See `Layout.batch`."""
        return ToyBatch(slices)

    def unpack(self, shape: ExpertShape, part: ExpertSlice) -> tuple[str, ...]:
        """See `Layout.unpack`."""
        for (projection, role), source in part.source.items():
            np.copyto(source.array(), _place(part, projection, role).array())
        return ()


def _place(part: ExpertSlice, projection: str, role: Role) -> RowView:
    if projection == "down_proj":
        return part.stored[f"w2_{role}"]
    stored = part.stored[f"w13_{role}"]
    half = stored.rows // 2
    return stored.part(half if projection == "up_proj" else 0, half, 0, stored.cols)
