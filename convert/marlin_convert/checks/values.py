"""Which codes and scales the experts hold, counted while they are compared: a picture of the weights, not a
proof of them. Of each matrix some rows are counted, evenly spread, so that it costs a hundredth of the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from marlin_convert.documents.checks import CountedScale, CountedValues
from marlin_convert.layout.protocol import PROJECTIONS, Role
from marlin_convert.storage.buffers import Bytes

#: rows counted of a matrix, about; all where it has fewer
ROWS = 8
#: low bits of a bf16 that its bin leaves out: four bins for each power of two
SHIFT = 5
_SIGN, _NOT_FINITE = 0x8000 >> SHIFT, 0x7F80 >> SHIFT

Counts = npt.NDArray[np.int64]


@dataclass
class Counted:
    """Of one projection: `bytes` by pairs of codes, `scales` by the upper bits of the bf16, in matrices."""

    bytes: Counts = field(default_factory=lambda: np.zeros(256, np.int64))
    scales: Counts = field(default_factory=lambda: np.zeros(0x10000 >> SHIFT, np.int64))

    def document(self, projection: str) -> CountedValues:
        """For reports."""
        pairs = self.bytes.reshape(16, 16)
        positive, negative = self.scales[:_SIGN], self.scales[_SIGN:]
        finite = positive[:_NOT_FINITE] + negative[:_NOT_FINITE]
        return CountedValues(
            projection=projection,
            codes=tuple((pairs.sum(0) + pairs.sum(1)).tolist()),
            scales=tuple(CountedScale(bin_begin(i), int(finite[i])) for i in np.flatnonzero(finite).tolist()),
            negative=int(negative.sum()),
            not_finite=int(positive[_NOT_FINITE:].sum() + negative[_NOT_FINITE:].sum()),
        )


class ValueCounts:
    """Counts of the experts of one unit. Not for several threads at a time."""

    def __init__(self) -> None:
        self._counted: dict[str, Counted] = {}

    def add(self, other: Mapping[str, Counted]) -> None:
        """Take in what was counted of an expert."""
        for projection, counted in other.items():
            whole = self._counted.setdefault(projection, Counted())
            whole.bytes += counted.bytes
            whole.scales += counted.scales

    def document(self) -> tuple[CountedValues, ...]:
        """Each projection that was counted, in order."""
        return tuple(self._counted[name].document(name) for name in PROJECTIONS if name in self._counted)


def count_values(matrices: Mapping[tuple[str, Role], Bytes], expert: int) -> dict[str, Counted]:
    """Count rows of an expert's source matrices, uint8 [out, bytes of a row], other rows for each expert."""
    found: dict[str, Counted] = {}
    for (projection, role), matrix in matrices.items():
        counted = found.setdefault(projection, Counted())
        step = max(matrix.shape[0] // ROWS, 1)
        rows = np.ascontiguousarray(matrix[expert % step :: step])
        if role is Role.WEIGHT:
            counted.bytes += np.bincount(rows.reshape(-1), minlength=256)
        elif role is Role.SCALE:
            bins = rows.view(np.uint16).reshape(-1) >> SHIFT
            counted.scales += np.bincount(bins, minlength=counted.scales.size)
    return found


def bin_begin(index: int) -> float:
    """The smallest magnitude in a bin of scales."""
    return float(np.array([index << (16 + SHIFT)], np.uint32).view(np.float32)[0])
