"""The data of the routed experts: each expert's pieces read from its ranks, inverted to the published
matrices, compared with their digests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from marlin_convert.buffers import aligned_buffer
from marlin_convert.checks.plain import Stored
from marlin_convert.checks.report import Finding, Report
from marlin_convert.files import digest
from marlin_convert.layout.protocol import PROJECTIONS, ExpertShape, Layout
from marlin_convert.layout.rows import Rows
from marlin_convert.reads import Piece, PieceReader, plan_reads

Bytes = npt.NDArray[np.uint8]
Matrices = dict[str, tuple[Bytes, Bytes]]


@dataclass(frozen=True)
class ExpertCheck:
    """What is needed to check experts of one layer.

    `held` maps (rank, stacked name) to the tensor; `owners(expert)` are the ranks that should hold it, in
    slice order. `piece_digest(rank, name, i)` is the recorded digest of local expert i, or None;
    `expected(name)` the source's digest or None; `source_bytes(name)` the source's bytes, or None without a
    source; `hint(name, digest)` what data of this digest in place of `name` tells.
    """

    reader: PieceReader
    layout: Layout
    shape: ExpertShape
    prefix: str
    layer: int
    held: Mapping[tuple[int, str], Stored]
    owners: Callable[[int], range]
    first: Callable[[int], int]
    piece_digest: Callable[[int, str, int], bytes | None]
    expected: Callable[[str], bytes | None]
    source_bytes: Callable[[str], Bytes] | None
    hint: Callable[[str, bytes], str]
    report: Report

    def check(self, expert: int) -> None:
        """Check one expert on all its ranks."""
        ranks = [rank for rank in self.owners(expert) if (rank, self._stacked()[0]) in self.held]
        pieces = self._read(expert, ranks)
        damaged = {
            key
            for key, piece in pieces.items()
            if self.piece_digest(*key, self._local(expert, key[0])) not in (None, digest(piece))
        }
        whole = len(ranks) == len(self.owners(expert))
        provable = whole or self.source_bytes is not None
        self.report.count(size=sum(piece.nbytes for piece in pieces.values()))
        wrong = self._compare(expert, ranks, pieces, damaged) if provable else {}
        self.report.count(proven=0 if not provable else 9, unproven=0 if provable else 9)
        explained = {key for what in wrong.values() for key in what}
        for rank, name in sorted(damaged - explained):
            hint = self._whose_piece(rank, name, pieces)
            self._add(
                expert,
                None,
                rank,
                f"{name.rpartition('.')[2]}: the stored bytes do not match their digest{hint}",
            )

    def _stacked(self) -> tuple[str, ...]:
        return tuple(f"{self.prefix}.{tensor.name}" for tensor in self.layout.stacked(self.shape))

    def _local(self, expert: int, rank: int) -> int:
        return expert - self.first(rank)

    def _read(self, expert: int, ranks: Sequence[int]) -> dict[tuple[int, str], Bytes]:
        """The stored bytes of one expert, per rank and stacked tensor."""
        wanted, keys = [], []
        for rank in ranks:
            for name in self._stacked():
                item = self.held[rank, name]
                size = item.tensor.size // item.tensor.shape[0]
                wanted.append(
                    Piece(item.shard.path, item.tensor.offset + self._local(expert, rank) * size, size)
                )
                keys.append((rank, name))
        plan = plan_reads(wanted)
        buffer = aligned_buffer(plan.size)
        files = {piece.file for piece in wanted}
        self.reader.open_files(files)
        try:
            self.reader.read(plan, buffer)
        finally:
            self.reader.close_files(files)
        return {
            key: buffer[at : at + piece.size]
            for key, at, piece in zip(keys, plan.places, wanted, strict=True)
        }

    def _restore(
        self, expert: int, ranks: Sequence[int], pieces: Mapping[tuple[int, str], Bytes]
    ) -> tuple[Matrices, set[int]]:
        """The published matrices of an expert; ranks that are not there are filled in from the source. Also
        the ranks whose padding is not zero.
        """
        matrices, dirty = {}, set()
        for projection in PROJECTIONS:
            out, inputs = self.shape.matrix(projection)
            packed, scale = (
                np.zeros((out, inputs // 2), np.uint8),
                np.zeros((out, inputs // self.shape.group_size * 2), np.uint8),
            )
            if self.source_bytes is not None and len(ranks) < len(self.owners(expert)):
                packed[:] = self.source_bytes(self._name(expert, projection, "weight_packed")).reshape(
                    packed.shape
                )
                scale[:] = self.source_bytes(self._name(expert, projection, "weight_scale")).reshape(
                    scale.shape
                )
            words_name, scales_name = self.layout.targets(projection)
            for rank in ranks:
                words = pieces[rank, f"{self.prefix}.{words_name}"].view(np.uint64)
                scales = pieces[rank, f"{self.prefix}.{scales_name}"].view(np.uint16)
                rows = {t.name: t.shape[0] for t in self.layout.stacked(self.shape)}
                w = Rows.of(words.reshape(rows[words_name], -1))
                s = Rows.of(scales.reshape(rows[scales_name], -1))
                index = self.owners(expert).index(rank)
                try:
                    self.layout.unpack(
                        self.shape,
                        projection,
                        index,
                        w,
                        s,
                        Rows.of(packed.view(np.uint64)),
                        Rows.of(scale.view(np.uint16)),
                    )
                except ValueError:
                    dirty.add(rank)
            matrices[projection] = (packed, scale)
        return matrices, dirty

    def _compare(
        self,
        expert: int,
        ranks: Sequence[int],
        pieces: Mapping[tuple[int, str], Bytes],
        damaged: set[tuple[int, str]],
    ) -> dict[tuple[str, str], set[tuple[int, str]]]:
        """Compare restored matrices with the source; reports what differs and returns which damaged pieces
        that explains.
        """
        matrices, dirty = self._restore(expert, ranks, pieces)
        for rank in dirty:
            self._add(expert, None, rank, "the padding is not zero")
        wrong: dict[tuple[str, str], set[tuple[int, str]]] = {}
        for projection, (packed, scale) in matrices.items():
            words_name, scales_name = self.layout.targets(projection)
            for kind, matrix, stacked in (
                ("weight_packed", packed, words_name),
                ("weight_scale", scale, scales_name),
            ):
                name = self._name(expert, projection, kind)
                expected, found = self.expected(name), digest(matrix)
                if expected is None:
                    self._add(expert, projection, None, f"source/digests.bin has no digest of {kind}")
                    continue
                if found == expected:
                    continue
                full = f"{self.prefix}.{stacked}"
                culprits = {(rank, full) for rank in ranks if (rank, full) in damaged}
                wrong[projection, kind] = culprits
                culprits = culprits or {(rank, full) for rank in dirty}
                hint = self.hint(name, found) or self._swapped(
                    expert, kind, ranks, matrices, projection, {r for r, _ in culprits}
                )
                for rank, stacked_name in sorted(culprits):
                    hint = hint or self._whose_piece(rank, stacked_name, pieces)
                suspects = [rank for rank, _ in sorted(culprits)] or self._differing_ranks(
                    expert, projection, kind, matrix, ranks
                )
                for suspect in suspects:
                    self._add(expert, projection, suspect, f"{kind} differs from the source{hint}")
        self._check_shapes(expert)
        return wrong

    def _differing_ranks(
        self, expert: int, projection: str, kind: str, matrix: Bytes, ranks: Sequence[int]
    ) -> Sequence[int | None]:
        """Which ranks' slices differ, where a source is there to tell; else only that one of them does."""
        if len(self.owners(expert)) == 1:
            return [ranks[0]]
        if self.source_bytes is None:
            return [None]
        differs = matrix != self.source_bytes(self._name(expert, projection, kind)).reshape(matrix.shape)
        parts = np.array_split(differs, len(self.owners(expert)), axis=self.shape.axis(projection))
        return [rank for rank, part in zip(self.owners(expert), parts, strict=True) if part.any()] or [None]

    def _swapped(
        self,
        expert: int,
        kind: str,
        ranks: Sequence[int],
        matrices: Matrices,
        projection: str,
        culprits: set[int],
    ) -> str:
        """Whether exchanging gate and up on the suspect ranks (all of them where none is known) gives the
        source.
        """
        if projection == "down_proj":
            return ""
        which = 0 if kind == "weight_packed" else 1
        gate, up = matrices["gate_proj"][which].copy(), matrices["up_proj"][which].copy()
        local = gate.shape[0] // len(self.owners(expert))
        for rank in culprits or set(ranks):
            at = self.owners(expert).index(rank) * local
            gate[at : at + local], up[at : at + local] = (
                up[at : at + local].copy(),
                gate[at : at + local].copy(),
            )
        names = [self._name(expert, p, kind) for p in ("gate_proj", "up_proj")]
        if all(digest(matrix) == self.expected(name) for matrix, name in zip((gate, up), names, strict=True)):
            return ": gate and up are exchanged"
        return ""

    def _whose_piece(self, rank: int, name: str, pieces: Mapping[tuple[int, str], Bytes]) -> str:
        """Whether a damaged piece is another expert's of the same tensor."""
        found = digest(pieces[rank, name])
        for i in range(self.held[rank, name].tensor.shape[0]):
            if self.piece_digest(rank, name, i) == found:
                return f": it holds the data of expert {self.first(rank) + i}"
        return ""

    def _check_shapes(self, expert: int) -> None:
        """weight_shape is not stored: what it must have said is made again and compared with its digest."""
        for projection in PROJECTIONS:
            name = self._name(expert, projection, "weight_shape")
            expected = self.expected(name)
            shapes = (
                digest(np.array(self.shape.matrix(projection), dtype).tobytes())
                for dtype in (np.int32, np.int64)
            )
            if expected is not None and expected not in shapes:
                self._add(
                    expert, projection, None, "weight_shape of the source is not the shape of weight_packed"
                )

    def _name(self, expert: int, projection: str, kind: str) -> str:
        return f"{self.prefix}.{expert}.{projection}.{kind}"

    def _add(self, expert: int, projection: str | None, rank: int | None, what: str) -> None:
        stored = next(item for (r, _), item in self.held.items() if rank is None or r == rank)
        path = stored.shard.path if rank is not None else stored.shard.path.split("/")[1]
        self.report.add(Finding(path, what, self.layer, expert, projection, rank))
