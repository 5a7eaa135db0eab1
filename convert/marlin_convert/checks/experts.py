"""The data of the routed experts: each expert's pieces read from its ranks, put together to the published
matrices, compared with their digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from marlin_convert.assemble import (
    Matrices,
    StoredSlice,
    assemble_expert,
    matrices_size,
    piece_of,
    read_planned,
)
from marlin_convert.checks.findings import Finding, on_some_rank
from marlin_convert.checks.published import Published
from marlin_convert.checks.split import Split
from marlin_convert.checks.units import UnitVerification
from marlin_convert.checks.values import count_values
from marlin_convert.layout.protocol import PROJECTIONS, ExpertShape, Layout, Role
from marlin_convert.storage.buffers import BufferPool, Bytes
from marlin_convert.storage.files import digest
from marlin_convert.storage.reads import Piece, PieceReader, plan_reads

#: a rank and a stacked tensor
Key = tuple[int, str]


@dataclass(frozen=True)
class StoredLayer:
    """The stacked tensors of one layer as the manifest has them, by rank and name without the prefix;
    `digests` are those of OUT's digests.bin, empty where that is damaged.
    """

    layer: int
    prefix: str
    layout: Layout
    shape: ExpertShape
    split: Split
    held: Mapping[Key, StoredSlice]
    digests: bytes

    def owned(self) -> list[int]:
        """The experts of all ranks that are there."""
        return sorted({expert for rank, _ in self.held for expert in self.split.held(rank)})

    def piece_digest(self, key: Key, local: int) -> bytes | None:
        """The recorded digest of a rank's expert, where it is known."""
        at = (self.held[key].tensor.experts or 0) + 16 * local
        return self.digests[at : at + 16] or None


@dataclass(frozen=True)
class ExpertCheck:
    """Checks the experts of one layer, in memory of a pool."""

    pool: BufferPool
    reader: PieceReader
    published: Published
    report: UnitVerification
    stored: StoredLayer

    def check(self, expert: int) -> None:
        """Check one expert on all its ranks."""
        owners = self.stored.split.owners(expert)
        ranks = [rank for rank in owners if any(key[0] == rank for key in self.stored.held)]
        stored = self._where(expert, ranks)
        plan = plan_reads(list(stored.values()))
        # one buffer for what is stored and for the matrices: a fresh one costs as much time as the inverse
        with self.pool.take(plan.size + matrices_size(self.stored.shape)) as buffer:
            read = read_planned(self.reader, list(stored.values()), plan, buffer)
            self._check(expert, ranks, dict(zip(stored, read, strict=True)), buffer[plan.size :])

    def _check(self, expert: int, ranks: Sequence[int], pieces: Mapping[Key, Bytes], space: Bytes) -> None:
        """Check an expert's pieces, with `space` for its matrices."""
        stored, owners = self.stored, self.stored.split.owners(expert)
        damaged = {key for key, piece in pieces.items() if not self._is_recorded(expert, key, piece)}
        provable = len(ranks) == len(owners) or self.published.has_files
        self.report.count(size=sum(piece.nbytes for piece in pieces.values()))
        explained: set[Key] = set()
        if provable:
            explained = self._compare(expert, ranks, pieces, damaged, space)
        else:
            self.report.count(unproven=len(PROJECTIONS) * (1 + len(stored.shape.scheme.roles)))
        for rank, name in sorted(damaged - explained):
            hint = self._whose_piece((rank, name), pieces)
            self._add(expert, None, rank, f"{name}: the stored bytes do not match their digest{hint}")

    def _is_recorded(self, expert: int, key: Key, piece: Bytes) -> bool:
        recorded = self.stored.piece_digest(key, expert - self.stored.split.held(key[0]).start)
        return recorded in (None, digest(piece))

    def _where(self, expert: int, ranks: Sequence[int]) -> dict[Key, Piece]:
        """Where the stored bytes of one expert lie, per rank and stacked tensor."""
        found = {}
        for key in self.stored.held:
            if key[0] in ranks:
                local = expert - self.stored.split.held(key[0]).start
                found[key] = piece_of(self.stored.held[key], local, local + 1)
        return found

    def _compare(
        self,
        expert: int,
        ranks: Sequence[int],
        pieces: Mapping[Key, Bytes],
        damaged: set[Key],
        space: Bytes,
    ) -> set[Key]:
        """Compare the matrices with the source; counts what is right, reports what differs and returns which
        damaged pieces that explains.
        """
        stored, owners = self.stored, self.stored.split.owners(expert)
        slices = [
            {name: piece for (r, name), piece in pieces.items() if r == rank} if rank in ranks else None
            for rank in owners
        ]
        matrices, unclean = assemble_expert(
            stored.layout,
            stored.shape,
            slices,
            lambda p, role: self.published.whole(self._name(expert, p, role)),
            space,
        )
        self.report.count_values(count_values(matrices, expert))
        dirty = {owners[index] for index in unclean}
        for index, projections in unclean.items():
            for projection in projections:
                self._add(expert, projection, owners[index], "the padding is not zero")
        explained: set[Key] = set()
        for (projection, role), matrix in matrices.items():
            expected, found = self.published.digest(self._name(expert, projection, role)), digest(matrix)
            if expected is None:
                self._add(expert, projection, None, f"source/digests.bin has no digest of {role}")
            elif found == expected:
                self.report.count(proven=1)
            else:
                tensor = self._tensor_of(projection, role)
                culprits = {(rank, tensor) for rank in ranks if (rank, tensor) in damaged}
                explained |= culprits
                wrong = _Wrong(expert, projection, role, culprits or {(rank, tensor) for rank in dirty})
                self._report_wrong(wrong, ranks, pieces, matrices)
        self._check_shapes(expert)
        return explained

    def _report_wrong(
        self, wrong: _Wrong, ranks: Sequence[int], pieces: Mapping[Key, Bytes], matrices: Matrices
    ) -> None:
        """A finding for each rank whose slice is wrong, as far as that is known."""
        matrix = matrices[wrong.projection, wrong.role]
        hint = self.published.hint(self._name(wrong.expert, wrong.projection, wrong.role), digest(matrix))
        suspects: Sequence[int | None] = [rank for rank, _ in sorted(wrong.culprits)]
        if not hint and (swapped := self._swapped(wrong, ranks, matrices)):
            hint, suspects = ": gate and up are exchanged", sorted(swapped)
        for key in sorted(wrong.culprits):
            hint = hint or self._whose_piece(key, pieces)
        for suspect in suspects or self._differing_ranks(wrong, matrix, ranks):
            unknown = suspect is None and not self.published.has_files
            ask = "; on which rank, verify --source tells" if unknown else ""
            what = f"{wrong.role} differs from the source{hint}{ask}"
            self._add(wrong.expert, wrong.projection, suspect, what)

    def _tensor_of(self, projection: str, role: Role) -> str:
        """The stacked tensor that holds a role of a projection."""
        stacked = self.stored.layout.stacked(self.stored.shape)
        return next(t.name for t in stacked if t.role is role and projection in t.projections)

    def _differing_ranks(self, wrong: _Wrong, matrix: Bytes, ranks: Sequence[int]) -> Sequence[int | None]:
        """Which ranks' slices differ, where the source's files are there to tell; else only that one of them
        does.
        """
        owners = self.stored.split.owners(wrong.expert)
        if len(owners) == 1:
            return [ranks[0]]
        if not self.published.has_files:
            return [None]
        name = self._name(wrong.expert, wrong.projection, wrong.role)
        differs = matrix != self.published.whole(name).reshape(matrix.shape)
        parts = np.array_split(differs, len(owners), axis=1 if wrong.projection == "down_proj" else 0)
        return [rank for rank, part in zip(owners, parts, strict=True) if part.any()] or [None]

    def _swapped(self, wrong: _Wrong, ranks: Sequence[int], matrices: Matrices) -> frozenset[int]:
        """The ranks on which exchanging gate and up gives the source, if any do: the suspect ones, where none
        is known all of them or one alone.
        """
        if wrong.projection == "down_proj":
            return frozenset()
        known = frozenset(rank for rank, _ in wrong.culprits)
        tries = [known] if known else [frozenset(ranks), *(frozenset({rank}) for rank in ranks)]
        gate, up = (matrices[projection, wrong.role].copy() for projection in ("gate_proj", "up_proj"))
        for tried in tries:
            self._exchange(wrong.expert, tried, gate, up)
            if all(
                digest(matrix) == self.published.digest(self._name(wrong.expert, projection, wrong.role))
                for projection, matrix in (("gate_proj", gate), ("up_proj", up))
            ):
                return tried
            self._exchange(wrong.expert, tried, gate, up)  # back
        return frozenset()

    def _exchange(self, expert: int, ranks: Iterable[int], gate: Bytes, up: Bytes) -> None:
        """Exchange the slices of some ranks."""
        owners = self.stored.split.owners(expert)
        local = gate.shape[0] // len(owners)
        for rank in ranks:
            part = slice(owners.index(rank) * local, (owners.index(rank) + 1) * local)
            gate[part], up[part] = up[part].copy(), gate[part].copy()

    def _whose_piece(self, key: Key, pieces: Mapping[Key, Bytes]) -> str:
        """Whether a damaged piece is another expert's of the same tensor."""
        found = digest(pieces[key])
        for i, expert in enumerate(self.stored.split.held(key[0])):
            if self.stored.piece_digest(key, i) == found:
                return f": it holds the data of expert {expert}"
        return ""

    def _check_shapes(self, expert: int) -> None:
        """weight_shape is not stored: its value is made from the shape of weight_packed and compared by
        digest.
        """
        for projection in PROJECTIONS:
            expected = self.published.digest(self._name(expert, projection, "weight_shape"))
            shape = self.stored.shape.matrix(projection)
            shapes = [digest(np.array(shape, dtype).tobytes()) for dtype in (np.int32, np.int64)]
            if expected is None:
                continue
            if expected in shapes:
                self.report.count(proven=1)
            else:
                what = "weight_shape of the source is not the shape of weight_packed"
                self._add(expert, projection, None, what)

    def _name(self, expert: int, projection: str, kind: str) -> str:
        return f"{self.stored.prefix}.{expert}.{projection}.{kind}"

    def _add(self, expert: int, projection: str | None, rank: int | None, what: str) -> None:
        item = next(item for (r, _), item in self.stored.held.items() if rank is None or r == rank)
        path = item.shard.path if rank is not None else on_some_rank(item.shard.path)
        self.report.add(Finding(path, what, self.stored.layer, expert, projection, rank))


@dataclass(frozen=True)
class _Wrong:
    """A matrix that is not the source's, and the stored pieces that are known to be wrong."""

    expert: int
    projection: str
    role: Role
    culprits: set[Key]
