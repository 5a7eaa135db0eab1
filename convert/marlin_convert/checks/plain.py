"""The data of tensors that keep their name: read from every rank, put together again, compared with the
source's digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from marlin_convert.assemble import CHUNK, StoredSlice, read_rows, stream_tensor
from marlin_convert.checks.published import Published
from marlin_convert.checks.report import Finding, Report
from marlin_convert.documents.manifest import Origin
from marlin_convert.reads import PieceReader


@dataclass(frozen=True)
class PlainCheck:
    """Checks the tensors of a unit that keep their name, for `tp` ranks."""

    reader: PieceReader
    published: Published
    report: Report
    tp: int
    layer: int | None

    def check(self, origin: Origin, held: Sequence[StoredSlice]) -> None:
        """Check a tensor on all ranks that hold it; `held` is in rank order. Slices of ranks that are not
        there are taken from the source's files where there are some, else the tensor cannot be proven from
        OUT alone.
        """
        (name,) = origin.sources
        expected = self.published.digest(name)
        provable = origin.axis is None or len(held) == self.tp or self.published.has_files
        self.report.count(
            size=sum(item.tensor.size for item in held), proven=int(provable), unproven=int(not provable)
        )
        if expected is None:
            self.report.add(Finding("source/digests.bin", f"has no digest of {origin.tensor}", self.layer))
        if origin.axis is None:
            for item in held:
                self._check_copy(origin, item, expected)
        else:
            self._check_slices(origin, held, expected if provable else None)

    def _check_copy(self, origin: Origin, item: StoredSlice, expected: bytes | None) -> None:
        """A tensor that is whole on a rank."""
        hasher = xxhash.xxh3_128()
        for chunk in stream_tensor(self.reader, [item], None):
            hasher.update(chunk.whole.data)
        if hasher.hexdigest() != item.tensor.digest:
            self._add(item, origin, "the stored bytes do not match their digest")
        elif expected is not None and hasher.digest() != expected:
            hint = self.published.hint(origin.sources[0], hasher.digest())
            self._add(item, origin, "differs from the source" + hint)

    def _check_slices(self, origin: Origin, held: Sequence[StoredSlice], expected: bytes | None) -> None:
        """A tensor that is cut: all slices side by side must be the source's."""
        name, by_rank = origin.sources[0], {item.rank: item for item in held}
        fill = partial(self.published.rows, name) if self.published.has_files else None
        whole, stored = xxhash.xxh3_128(), {rank: xxhash.xxh3_128() for rank in by_rank}
        slices = [by_rank.get(rank) for rank in range(self.tp)]
        for chunk in stream_tensor(self.reader, slices, origin.axis, fill):
            whole.update(chunk.whole.data)
            for rank, part in chunk.parts.items():
                stored[rank].update(part.data)
        damaged = [item for item in held if stored[item.rank].hexdigest() != item.tensor.digest]
        for item in damaged:
            self._add(item, origin, "the stored bytes do not match their digest")
        if damaged or expected is None or whole.digest() == expected:
            return
        hint = self.published.hint(name, whole.digest())
        culprits = [item for item in held if self._differs(origin, item)]
        for item in culprits:
            self._add(item, origin, "differs from the source" + hint)
        if not culprits:
            what = f"{origin.tensor}, put together from all ranks, differs from the source{hint}"
            self.report.add(Finding(held[0].shard.path, what, self.layer))

    def _differs(self, origin: Origin, item: StoredSlice) -> bool:
        """Whether a rank's slice differs from the source's files; False where there are none."""
        if not self.published.has_files:
            return False
        rows, width, rank = item.tensor.shape[0], item.row_bytes, item.rank
        first = rank * rows if origin.axis == 0 else 0
        step = max(CHUNK // width, 1)
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            theirs = self.published.rows(origin.sources[0], first + begin, first + end)
            if origin.axis == 1:
                theirs = theirs[:, rank * width : (rank + 1) * width]
            if not np.array_equal(read_rows(self.reader, item, begin, end), theirs):
                return True
        return False

    def _add(self, item: StoredSlice, origin: Origin, what: str) -> None:
        finding = Finding(item.shard.path, f"{origin.tensor}: {what}", self.layer, rank=item.shard.rank)
        self.report.add(finding)
