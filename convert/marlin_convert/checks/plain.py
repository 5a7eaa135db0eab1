"""The data of tensors that keep their name: read from every rank, put together again, compared with the
source's digest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from marlin_convert.checks.report import Finding, Report
from marlin_convert.documents.manifest import Origin, Shard, StoredTensor
from marlin_convert.reads import Piece, PieceReader, plan_reads

Bytes = npt.NDArray[np.uint8]
#: bytes of one rank's rows read at a time
CHUNK = 8 << 20


@dataclass(frozen=True)
class Stored:
    """A tensor as one shard has it."""

    shard: Shard
    tensor: StoredTensor

    @property
    def rank(self) -> int:
        """Whose it is; 0 in common/."""
        return self.shard.rank or 0


Rows = Callable[[int, int], Bytes]
#: the tensor, and the hasher of its stored bytes, by rank (0 in common/)
Held = Mapping[int, Stored]
Hashers = Mapping[int, xxhash.xxh3_128]


def read_rows(reader: PieceReader, stored: Stored, begin: int, end: int) -> Bytes:
    """Rows `begin` to `end` of a stored tensor, [rows, bytes of a row]."""
    from marlin_convert.buffers import aligned_buffer

    row = stored.tensor.size // stored.tensor.shape[0]
    plan = plan_reads([Piece(stored.shard.path, stored.tensor.offset + begin * row, (end - begin) * row)])
    buffer = aligned_buffer(plan.size)
    reader.open_files([stored.shard.path])
    try:
        reader.read(plan, buffer)
    finally:
        reader.close_files([stored.shard.path])
    return buffer[plan.places[0] : plan.places[0] + (end - begin) * row].reshape(end - begin, row)


def check_plain(
    reader: PieceReader,
    origin: Origin,
    layer: int | None,
    held: Sequence[Stored],
    tp: int,
    expected: bytes | None,
    rows_of_source: Callable[[int, int], Bytes] | None,
    hint: Callable[[bytes], str],
    report: Report,
) -> None:
    """Check a tensor on all ranks that hold it.

    `held` is in rank order; `expected` the source's digest. Slices of ranks that are not there are taken from
    the source where there is one (`rows_of_source(begin, end)` gives rows of the whole tensor), else the
    tensor cannot be proven from OUT alone.
    """
    by_rank = {item.rank: item for item in held}
    stored_digests = {rank: xxhash.xxh3_128() for rank in by_rank}
    whole = xxhash.xxh3_128()
    provable = origin.axis is None or len(held) == tp or rows_of_source is not None
    if origin.axis == 1:
        _feed_columns(reader, by_rank, tp, rows_of_source, stored_digests, whole)
    elif origin.axis == 0:
        _feed_rows(reader, by_rank, tp, rows_of_source, stored_digests, whole)
    else:
        for item in held:
            _feed_rows(reader, {0: item}, 1, None, {0: stored_digests[item.rank]}, xxhash.xxh3_128())
    damaged = [item for item in held if stored_digests[item.rank].hexdigest() != item.tensor.digest]
    for item in damaged:
        report.add(_finding(item, origin, layer, "the stored bytes do not match their digest"))
    report.count(
        size=sum(item.tensor.size for item in held), proven=int(provable), unproven=int(not provable)
    )
    if expected is None:
        report.add(Finding("source/digests.bin", f"has no digest of {origin.tensor}", layer))
    if not provable or expected is None:
        return
    if origin.axis is None:
        wrong = [item for item in held if stored_digests[item.rank].digest() != expected]
        found = {item.rank: stored_digests[item.rank].digest() for item in wrong}
        for item in wrong:
            if item not in damaged:
                report.add(_finding(item, origin, layer, "differs from the source" + hint(found[item.rank])))
    elif whole.digest() != expected and not damaged:
        culprits = (
            []
            if rows_of_source is None
            else [item for item in held if _differs(reader, item, origin.axis, rows_of_source)]
        )
        told = hint(whole.digest())
        report.add(*(_finding(item, origin, layer, "differs from the source" + told) for item in culprits))
        if not culprits:
            what = f"{origin.tensor}, put together from all ranks, differs from the source{told}"
            report.add(Finding(held[0].shard.path, what, layer))


def _differs(
    reader: PieceReader, item: Stored, axis: int | None, rows_of_source: Callable[[int, int], Bytes]
) -> bool:
    """Whether a rank's slice differs from the source."""
    rows, rank = item.tensor.shape[0], item.rank
    width = item.tensor.size // rows
    step = max(CHUNK // width, 1)
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        first = rank * rows if axis == 0 else 0
        theirs = rows_of_source(first + begin, first + end)
        if not np.array_equal(
            read_rows(reader, item, begin, end),
            theirs if axis == 0 else theirs[:, rank * width : (rank + 1) * width],
        ):
            return True
    return False


def _finding(item: Stored, origin: Origin, layer: int | None, what: str) -> Finding:
    return Finding(item.shard.path, f"{origin.tensor}: {what}", layer, rank=item.shard.rank)


def _feed_rows(
    reader: PieceReader,
    by_rank: Held,
    tp: int,
    rows_of_source: Rows | None,
    stored_digests: Hashers,
    whole: xxhash.xxh3_128,
) -> None:
    """Slices lie one after the other."""
    rows = next(iter(by_rank.values())).tensor.shape[0]
    width = next(iter(by_rank.values())).tensor.size // rows
    step = max(CHUNK // width, 1)
    for rank in range(tp) if len(by_rank) > 1 or tp > 1 else by_rank:
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            if rank in by_rank:
                chunk = read_rows(reader, by_rank[rank], begin, end)
                stored_digests[rank].update(chunk.data)
            elif rows_of_source is not None:
                chunk = rows_of_source(rank * rows + begin, rank * rows + end)
            else:
                continue
            whole.update(chunk.data)


def _feed_columns(
    reader: PieceReader,
    by_rank: Held,
    tp: int,
    rows_of_source: Rows | None,
    stored_digests: Hashers,
    whole: xxhash.xxh3_128,
) -> None:
    """Slices lie side by side."""
    sample = next(iter(by_rank.values())).tensor
    rows, width = sample.shape[0], sample.size // sample.shape[0]
    step = max(CHUNK // (width * tp), 1)
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        joined = np.empty((end - begin, width * tp), np.uint8)
        if rows_of_source is not None and len(by_rank) < tp:
            joined[:] = rows_of_source(begin, end)
        for rank, item in by_rank.items():
            part = read_rows(reader, item, begin, end)
            stored_digests[rank].update(part.data)
            joined[:, rank * width : (rank + 1) * width] = part
        whole.update(joined.data)
