"""The Marlin MoE layout: how gate, up and down of an expert land in `w13` and `w2` of a rank.

w13 has gate (w1) in the first half of its columns and up (w3) in the second. The kernel needs N % 128 == 0
and K % 64 == 0, so a slice of the intermediate size that is not a multiple of 64 is padded with zero words
and zero scales, gate and up each on its own. (A zero word decodes to -8; the zero scale makes it harmless.)

Shapes are needed for planning, where nothing is compiled: the compiled functions are imported where they are
called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from marlin_convert.layout.protocol import ExpertShape, ExpertSlice, RepackBatch, Role, StackedTensor
from marlin_convert.layout.rows import RowView

#: what the kernel's thread configurations come down to (measured; its own stated check is weaker)
KERNEL_N, KERNEL_K = 128, 64
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class MarlinU4B8:
    """4 bit, symmetric, stored as value + 8 (`uint4b8`), one 16-bit scale per group."""

    id: str = "moe_wna16_marlin.u4b8"

    def validate(self, shape: ExpertShape) -> str | None:
        """Why the kernel could not run this shape, or None."""
        scheme, group = shape.scheme, shape.scheme.group_size
        if (scheme.num_bits, scheme.symmetric) != (4, True):
            return f"the layout {self.id} is for 4 bit, symmetric; these are {scheme.num_bits} bit"
        if shape.hidden % KERNEL_N:
            return f"hidden size {shape.hidden} is not a multiple of {KERNEL_N}, which the kernel needs"
        if shape.intermediate % shape.moe_tp:
            return (
                f"the experts' intermediate size {shape.intermediate} is not divisible by tp / ep = "
                f"{shape.moe_tp}"
            )
        if group not in GROUP_SIZES:
            return f"group size {group} is not one the kernel has (32, 64, 128)"
        if shape.hidden % group:
            return f"hidden size {shape.hidden} is not a multiple of the group size {group}"
        if shape.local % group:
            return (
                f"a slice of {shape.local} of the experts' intermediate size {shape.intermediate} at tp / ep"
                f" = {shape.moe_tp} would cut a group of {group}"
            )
        return None

    def padded(self, shape: ExpertShape) -> int:
        """The rank's slice of the intermediate size as stored: up to a multiple of 64."""
        unit = max(KERNEL_K, KERNEL_N // 2)
        return -(-shape.local // unit) * unit

    def stacked(self, shape: ExpertShape) -> tuple[StackedTensor, ...]:
        """w13 and w2, weights and scales, in load order; shapes of one expert."""
        return tuple(
            StackedTensor(f"{name}_{role}", shape.scheme.dtype(role), self._size(shape, name, role), role, of)
            for name, of in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",)))
            for role in shape.scheme.roles
        )

    def _size(self, shape: ExpertShape, name: str, role: Role) -> tuple[int, int]:
        """[K/16, 2N] 32-bit words or [K/group, N] scales of a GEMM with K inputs and N outputs."""
        padded, group = self.padded(shape), shape.scheme.group_size
        k, n = (shape.hidden, 2 * padded) if name == "w13" else (padded, shape.hidden)
        return (k // 16, 2 * n) if role is Role.WEIGHT else (-(-k // group), n)

    def batch(self, shape: ExpertShape, slices: Sequence[ExpertSlice]) -> RepackBatch:
        """What brings slices into w13 and w2; padded slices go through a copy with zeros."""
        from marlin_convert.layout.batch import MarlinBatch, Move

        moves: dict[Role, list[Move]] = {role: [] for role in Role}
        for number, part in enumerate(slices):
            for (projection, role), source in part.source.items():
                target = _stored(part, projection, role)
                size_k = self._size_k(shape, projection)
                moves[role].append(Move(number, projection, _padded(source, target), target, size_k))
        return MarlinBatch(moves[Role.WEIGHT], moves[Role.SCALE], shape.scheme.group_size)

    def unpack(self, shape: ExpertShape, part: ExpertSlice) -> tuple[str, ...]:
        """Write the source side of a slice back; see `Layout.unpack`."""
        from marlin_convert.layout import marlin

        dirty = {}
        for (projection, role), source in part.source.items():
            stored = _stored(part, projection, role)
            whole = source
            if (stored.cols, stored.rows) != (source.rows, source.cols):
                whole = RowView.of(np.empty((stored.cols, stored.rows), source.flat.dtype))
            if role is Role.WEIGHT:
                marlin.unpack_weight_view(stored, whole)
            else:
                size_k = self._size_k(shape, projection)
                marlin.unpack_scale_view(stored, whole, shape.scheme.group_size, size_k)
            if whole is not source and not _drop_padding(whole, source):
                dirty[projection] = True
        return tuple(dirty)

    def _size_k(self, shape: ExpertShape, projection: str) -> int:
        """The K the GEMM is called with: decides which scale order the kernel reads."""
        return self.padded(shape) if projection == "down_proj" else shape.hidden


def _stored(part: ExpertSlice, projection: str, role: Role) -> RowView:
    """The part of w13 or w2 that a projection fills."""
    if projection == "down_proj":
        return part.stored[f"w2_{role}"]
    stored = part.stored[f"w13_{role}"]
    half = stored.cols // 2
    return stored.part(0, stored.rows, half if projection == "up_proj" else 0, half)


def _padded(source: RowView, target: RowView) -> RowView:
    """`source`, or a copy with zeros up to the shape that `target` (its transpose) has."""
    if (source.rows, source.cols) == (target.cols, target.rows):
        return source
    copy = np.zeros((target.cols, target.rows), source.flat.dtype)
    copy[: source.rows, : source.cols] = source.array()
    return RowView.of(copy)


def _drop_padding(whole: RowView, source: RowView) -> bool:
    """Copy what is not padding to `source`; returns whether the rest is zero."""
    padded = whole.array()
    source.array()[:] = padded[: source.rows, : source.cols]
    return not (padded[source.rows :].any() or padded[:, source.cols :].any())
