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
from marlin_convert.checks.findings import Finding, Verification, on_some_rank
from marlin_convert.checks.published import Published
from marlin_convert.checks.split import Split
from marlin_convert.documents.manifest import Origin
from marlin_convert.storage.reads import PieceReader

DAMAGED = "the stored bytes do not match their digest"


@dataclass(frozen=True)
class PlainCheck:
    """Checks the tensors of a unit that keep their name."""

    reader: PieceReader
    published: Published
    report: Verification
    split: Split
    layer: int | None

    def check(self, origin: Origin, held: Sequence[StoredSlice]) -> None:
        """Check a tensor on all ranks that hold it; `held` is in rank order. Slices of ranks that are not
        there are taken from the source's files where there are some, else the tensor cannot be proven from
        OUT alone.
        """
        (name,) = origin.sources
        expected = self.published.digest(name)
        slices = {self._slice(origin, item) for item in held}
        all_here = origin.axis is None or len(slices) == self.split.slices(origin)
        provable = all_here or self.published.has_files
        if expected is None:
            self.report.add(Finding("source/digests.bin", f"has no digest of {origin.tensor}", self.layer))
        if origin.axis is None:
            wrong = sum(not self._check_copy(origin, item, expected) for item in held)
            right = not wrong
        else:
            right = self._check_slices(origin, held, expected if provable else None)
        proven = right and provable and expected is not None
        size = sum(item.tensor.size for item in held)
        self.report.count(size=size, proven=int(proven), unproven=int(not provable))

    def _check_copy(self, origin: Origin, item: StoredSlice, expected: bytes | None) -> bool:
        """Whether a tensor that is whole on a rank is right."""
        found = self._digest(item)
        if found.hex() != item.tensor.digest:
            self._add(item, origin, DAMAGED)
        elif expected is not None and found != expected:
            self._add(item, origin, "differs from the source" + self.published.hint(origin.sources[0], found))
        else:
            return True
        return False

    def _check_slices(self, origin: Origin, held: Sequence[StoredSlice], expected: bytes | None) -> bool:
        """Whether a tensor that is cut is right: all slices side by side must be the source's. Of a slice
        that is on several ranks the first is taken, and the others must be the same.
        """
        name, firsts = origin.sources[0], dict[int, StoredSlice]()
        for item in held:
            firsts.setdefault(self._slice(origin, item), item)
        fill = partial(self.published.rows, name) if self.published.has_files else None
        whole, hashers = xxhash.xxh3_128(), {index: xxhash.xxh3_128() for index in firsts}
        slices = [firsts.get(index) for index in range(self.split.slices(origin))]
        for chunk in stream_tensor(self.reader, slices, origin.axis, fill):
            whole.update(chunk.whole.data)
            for index, part in chunk.parts.items():
                hashers[index].update(part.data)
        found = {firsts[index].rank: hasher.digest() for index, hasher in hashers.items()}
        found |= {item.rank: self._digest(item) for item in held if item.rank not in found}
        damaged = [item for item in held if found[item.rank].hex() != item.tensor.digest]
        for item in damaged:
            self._add(item, origin, DAMAGED)
        if damaged:
            return False
        if expected is not None and whole.digest() != expected:
            hint = self.published.hint(name, whole.digest())
            culprits = [item for item in held if self._differs(origin, item)]
            for item in culprits:
                self._add(item, origin, "differs from the source" + hint)
            if culprits:
                return False
            what = f"{origin.tensor}, put together from all ranks, differs from the source{hint}"
            self.report.add(Finding(on_some_rank(held[0].shard.path), what, self.layer))
        right = expected in (None, whole.digest())
        for item in held:
            first = firsts[self._slice(origin, item)].rank
            if found[item.rank] != found[first]:
                self._add(item, origin, f"differs from what rank {first} has, and must be the same slice")
                right = False
        return right

    def _slice(self, origin: Origin, item: StoredSlice) -> int:
        return self.split.slice_of(item.rank, origin)

    def _digest(self, item: StoredSlice) -> bytes:
        """Of the stored bytes."""
        hasher = xxhash.xxh3_128()
        for chunk in stream_tensor(self.reader, [item], None):
            hasher.update(chunk.whole.data)
        return hasher.digest()

    def _differs(self, origin: Origin, item: StoredSlice) -> bool:
        """Whether a rank's slice differs from the source's files; False where there are none."""
        if not self.published.has_files:
            return False
        rows, width, index = item.tensor.shape[0], item.row_bytes, self._slice(origin, item)
        first = index * rows if origin.axis == 0 else 0
        step = max(CHUNK // width, 1)
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            theirs = self.published.rows(origin.sources[0], first + begin, first + end)
            if origin.axis == 1:
                theirs = theirs[:, index * width : (index + 1) * width]
            if not np.array_equal(read_rows(self.reader, item, begin, end), theirs):
                return True
        return False

    def _add(self, item: StoredSlice, origin: Origin, what: str) -> None:
        finding = Finding(item.shard.path, f"{origin.tensor}: {what}", self.layer, rank=item.shard.rank)
        self.report.add(finding)
