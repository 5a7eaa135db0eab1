"""The Marlin MoE layout: how gate, up and down of an expert land in `w13` and `w2` of a rank.

w13 has gate (w1) in the first half of its columns and up (w3) in the second; gate and up are cut along their
outputs, down along its inputs. The kernel needs N % 128 == 0 and K % 64 == 0, so a slice of the intermediate
size that is not a multiple of 64 is padded with zero words and zero scales, gate and up each on its own. (A
zero word decodes to -8; the zero scale makes it harmless.)

Shapes are needed for planning, where nothing is compiled: the compiled functions are imported where they are
called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from marlin_convert.layout.protocol import ExpertShape, Layout, Moves, Slice, StackedTensor
from marlin_convert.layout.rows import Rows

#: what the kernel's thread configurations come down to (measured; its own stated check is weaker)
KERNEL_N, KERNEL_K = 128, 64


@dataclass(frozen=True)
class MarlinU4B8:
    """4 bit, symmetric, stored as value + 8 (`uint4b8`), one 16-bit scale per group."""

    id: str = "moe_wna16_marlin.u4b8"
    num_bits: int = 4
    symmetric: bool = True
    b_q_type: tuple[str, int] = ("uint4b8", 1125899907892224)

    def why_not(self, shape: ExpertShape) -> str | None:
        """Why the kernel could not run this shape, or None."""
        if shape.hidden % KERNEL_N:
            return f"hidden size {shape.hidden} is not a multiple of {KERNEL_N}, which the kernel needs"
        if shape.intermediate % shape.moe_tp:
            return (
                f"the experts' intermediate size {shape.intermediate} is not divisible by moe_tp ="
                f" {shape.moe_tp}"
            )
        if shape.group_size not in (32, 64, 128):
            return f"group size {shape.group_size} is not one the kernel has (32, 64, 128)"
        if shape.hidden % shape.group_size:
            return f"hidden size {shape.hidden} is not a multiple of the group size {shape.group_size}"
        if shape.local % shape.group_size:
            return (
                f"a slice of {shape.local} of the experts' intermediate size {shape.intermediate} at moe_tp ="
                f" {shape.moe_tp} would cut a group of {shape.group_size}"
            )
        return None

    def padded(self, shape: ExpertShape) -> int:
        """The rank's slice of the intermediate size as stored: up to a multiple of 64."""
        unit = max(KERNEL_K, KERNEL_N // 2)
        return -(-shape.local // unit) * unit

    def stacked(self, shape: ExpertShape) -> tuple[StackedTensor, ...]:
        """w13 and w2, words and scales, in load order; shapes of one expert."""
        h, i, g = shape.hidden, self.padded(shape), shape.group_size
        return (
            StackedTensor("w13_weight_packed", "I32", (h // 16, 4 * i)),
            StackedTensor("w13_weight_scale", "BF16", (h // g, 2 * i)),
            StackedTensor("w2_weight_packed", "I32", (i // 16, 2 * h)),
            StackedTensor("w2_weight_scale", "BF16", (-(-i // g), h)),
        )

    def targets(self, projection: str) -> tuple[str, str]:
        """Names of the stacked tensors that hold the words and the scales of a projection."""
        name = "w2" if projection == "down_proj" else "w13"
        return f"{name}_weight_packed", f"{name}_weight_scale"

    def moves(self, shape: ExpertShape, slices: Sequence[Slice]) -> Moves:
        """What brings slices of source matrices into w13 and w2; padded slices go through a copy with
        zeros.
        """
        from marlin_convert.layout.moves import Moves as MarlinMoves

        word_pairs, scale_pairs = [], []
        for each in slices:
            source, target = (
                _slice(shape, each.projection, each.index, each.packed),
                _half(each.projection, each.words),
            )
            word_pairs.append((_padded(source, target), target))
            source, target = (
                _slice(shape, each.projection, each.index, each.scale),
                _half(each.projection, each.scales),
            )
            scale_pairs.append((_padded(source, target), target))
        return MarlinMoves(
            word_pairs,
            scale_pairs,
            shape.group_size,
            [self._size_k(shape, each.projection) for each in slices],
        )

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
        """Fill slice `index` of a projection; see `Layout.pack`."""
        self.moves(shape, [Slice(projection, index, packed, scale, words, scales)]).pack()

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
        """Write slice `index` of a source matrix back; see `Layout.unpack`."""
        from marlin_convert.layout import marlin

        size_k = self._size_k(shape, projection)
        _restore(_half(projection, words), _slice(shape, projection, index, packed), marlin.unpack_rows)
        _restore(
            _half(projection, scales),
            _slice(shape, projection, index, scale),
            lambda target, source: marlin.unpack_scale_rows(target, source, shape.group_size, size_k),
        )

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
        """Where the inverse differs from the source (padding included), in words; None where it does not."""
        wrong = self.moves(shape, [Slice(projection, index, packed, scale, words, scales)]).mismatch()
        return None if wrong is None else wrong[1]

    def _size_k(self, shape: ExpertShape, projection: str) -> int:
        """The K the GEMM is called with: decides which scale order the kernel reads."""
        return self.padded(shape) if projection == "down_proj" else shape.hidden


def _slice(shape: ExpertShape, projection: str, index: int, source: Rows) -> Rows:
    """Slice `index` of `moe_tp` of a whole source matrix, in whatever unit its columns have."""
    if shape.axis(projection) == 0:
        rows = source.rows // shape.moe_tp
        return source.part(index * rows, rows, 0, source.cols)
    cols = source.cols // shape.moe_tp
    return source.part(0, source.rows, index * cols, cols)


def _half(projection: str, target: Rows) -> Rows:
    """The part of w13 or w2 that a projection fills."""
    if projection == "down_proj":
        return target
    half = target.cols // 2
    return target.part(0, target.rows, half if projection == "up_proj" else 0, half)


def _padded(source: Rows, target: Rows) -> Rows:
    """`source`, or a copy with zeros up to the shape that `target` (its transpose) has."""
    if (source.rows, source.cols) == (target.cols, target.rows):
        return source
    copy = np.zeros((target.cols, target.rows), source.flat.dtype)
    copy[: source.rows, : source.cols] = source.array()
    return Rows.of(copy)


def _restore(target: Rows, source: Rows, unpack: Callable[[Rows, Rows], None]) -> None:
    """Unpack `target` into `source`, dropping padding after seeing that it is zero."""
    if (source.rows, source.cols) == (target.cols, target.rows):
        return unpack(target, source)
    whole = np.empty((target.cols, target.rows), source.flat.dtype)
    unpack(target, Rows.of(whole))
    if whole[source.rows :].any() or whole[:, source.cols :].any():
        raise ValueError("padding is not zero")
    source.array()[:] = whole[: source.rows, : source.cols]
    return None


LAYOUTS: dict[str, Layout] = {layout.id: layout for layout in (MarlinU4B8(),)}
