"""A matrix as rows in flat memory: what the compiled functions take, so that slices need neither copies nor
new compilations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from marlin_convert.slicing import Cut


class RowView(NamedTuple):
    """`rows` x `cols` elements of `flat`: element (r, c) is `flat[base + r * stride + c]`.

    A compiled function sees a contiguous one-dimensional array whatever the slice, which is what lets LLVM
    use vector loads.
    """

    flat: npt.NDArray[Any]
    base: int
    stride: int
    rows: int
    cols: int

    @staticmethod
    def of(array: npt.NDArray[Any]) -> RowView:
        """The rows of a 2-D array whose rows are contiguous (any distance between them).

        Raises ValueError for another shape or a column stride other than one element.
        """
        if (
            array.ndim != 2
            or (array.shape[1] > 1 and array.strides[1] != array.itemsize)
            or array.strides[0] % array.itemsize
        ):
            raise ValueError(
                f"need a 2-D array with contiguous rows, got shape {array.shape} with strides {array.strides}"
            )
        rows, cols = array.shape
        stride = array.strides[0] // array.itemsize if rows > 1 else cols
        if stride < cols:
            raise ValueError(f"need rows in ascending order, got strides {array.strides}")
        length = (rows - 1) * stride + cols if rows else 0
        flat = np.lib.stride_tricks.as_strided(
            array, (length,), (array.itemsize,), writeable=array.flags.writeable
        )
        return RowView(flat, 0, stride, rows, cols)

    @staticmethod
    def at(flat: npt.NDArray[Any], byte: int, rows: int, size: int) -> RowView:
        """A contiguous matrix of `size` bytes that begins at `byte`, a whole element, of flat memory."""
        cols = size // flat.itemsize // rows
        return RowView(flat, byte // flat.itemsize, cols, rows, cols)

    def part(self, row: int, rows: int, col: int, cols: int) -> RowView:
        """The `rows` x `cols` block that begins at (`row`, `col`)."""
        if not (0 <= row and row + rows <= self.rows and 0 <= col and col + cols <= self.cols):
            raise ValueError(
                f"block of {rows} x {cols} at ({row}, {col}) leaves a matrix of {self.rows} x {self.cols}"
            )
        return RowView(self.flat, self.base + row * self.stride + col, self.stride, rows, cols)

    def block(self, cut: Cut, index: int) -> RowView:
        """Slice `index` of the matrix."""
        rows, cols = cut.block((self.rows, self.cols), index)
        return self.part(rows.start, len(rows), cols.start, len(cols))

    def in_words(self) -> RowView:
        """The same memory in 64-bit words; base, stride and columns must fall on whole ones."""
        per = 8 // self.flat.itemsize
        flat = self.flat[: self.flat.size // per * per].view(np.uint64)
        return RowView(flat, self.base // per, self.stride // per, self.rows, self.cols // per)

    def array(self) -> npt.NDArray[Any]:
        """The same memory as a 2-D numpy view."""
        size = self.flat.itemsize
        return np.lib.stride_tricks.as_strided(
            self.flat[self.base :],
            (self.rows, self.cols),
            (self.stride * size, size),
            writeable=self.flat.flags.writeable,
        )
