"""The data of the routed experts: each expert's pieces read from its ranks, put together to the published
matrices, compared with their digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from marlin_convert.assemble import (
    Matrices,
    assemble_expert,
    matrices_size,
    read_planned,
)
from marlin_convert.checks.findings import Finding, on_some_rank
from marlin_convert.checks.published import Published
from marlin_convert.checks.stored_layer import Copy, Key, StoredLayer
from marlin_convert.checks.units import UnitVerification
from marlin_convert.checks.values import count_values
from marlin_convert.layout.protocol import PROJECTIONS, Role
from marlin_convert.storage.buffers import BufferPool, Bytes
from marlin_convert.storage.files import digest
from marlin_convert.storage.reads import PieceReader, plan_reads

#: a projection and a role
Matrix = tuple[str, Role]


@dataclass(frozen=True)
class ExpertCheck:
    """Checks the experts of one layer, in memory of a pool."""

    pool: BufferPool
    reader: PieceReader
    published: Published
    report: UnitVerification
    stored: StoredLayer

    def check(self, copies: Sequence[Copy]) -> None:
        """Check all copies of one expert, each by itself on all its ranks."""
        right = [self._check_copy(copy, copy is copies[0]) for copy in copies]
        proven = [found for found in right if found is not None]
        if len(proven) == len(copies):
            self.report.count(proven=len(frozenset.intersection(*proven)))
            self._check_shapes(copies[0])
        else:
            self.report.count(unproven=len(PROJECTIONS) * (1 + len(self.stored.shape.scheme.roles)))

    def _check_copy(self, copy: Copy, first: bool) -> frozenset[Matrix] | None:
        """The matrices that are right in a copy; None where not all of it is here to tell. The values of the
        `first` are counted.
        """
        ranks = [rank for rank in self.stored.owners(copy) if any(key[0] == rank for key in self.stored.held)]
        stored = self.stored.pieces(copy, ranks)
        plan = plan_reads(list(stored.values()))
        # one buffer for what is stored and for the matrices: a fresh one costs as much time as the inverse
        with self.pool.take(plan.size + matrices_size(self.stored.shape)) as buffer:
            read = read_planned(self.reader, list(stored.values()), plan, buffer)
            here = _Pieces(copy, ranks, dict(zip(stored, read, strict=True)))
            return self._check_pieces(here, buffer[plan.size :], first)

    def _check_pieces(self, here: _Pieces, space: Bytes, first: bool) -> frozenset[Matrix] | None:
        """Check a copy's pieces, with `space` for its matrices."""
        damaged = {key for key, piece in here.data.items() if not self._is_recorded(here.copy, key, piece)}
        self.report.count(size=sum(piece.nbytes for piece in here.data.values()))
        explained, right = set[Key](), None
        if len(here.ranks) == len(self.stored.owners(here.copy)) or self.published.has_files:
            matrices = self._matrices(here, space)
            if first:
                self.report.count_values(count_values(matrices, here.copy.expert))
            explained, right = self._compare(here, matrices, damaged)
        for key in sorted(damaged - explained):
            hint = self._whose_piece(key, here)
            self._add(here.copy, None, key[0], f"{key[1]}: the stored bytes do not match their digest{hint}")
        return right

    def _is_recorded(self, copy: Copy, key: Key, piece: Bytes) -> bool:
        return self.stored.digest(key, copy.slot) in (None, digest(piece))

    def _matrices(self, here: _Pieces, space: Bytes) -> Matrices:
        """The published matrices of a copy, put together from its pieces."""
        stored, owners = self.stored, self.stored.owners(here.copy)
        slices = [
            {name: piece for (r, name), piece in here.data.items() if r == rank}
            if rank in here.ranks
            else None
            for rank in owners
        ]
        matrices, unclean = assemble_expert(
            stored.layout,
            stored.shape,
            slices,
            lambda p, role: self.published.whole(stored.name(here.copy.expert, p, role)),
            space,
        )
        here.dirty.update(owners[index] for index in unclean)
        for index, projections in unclean.items():
            for projection in projections:
                self._add(here.copy, projection, owners[index], "the padding is not zero")
        return matrices

    def _compare(
        self, here: _Pieces, matrices: Matrices, damaged: Set[Key]
    ) -> tuple[set[Key], frozenset[Matrix]]:
        """Compare the matrices with the source and report what differs. Returns which damaged pieces that
        explains, and the matrices that are right.
        """
        explained, right = set[Key](), set[Matrix]()
        for (projection, role), matrix in matrices.items():
            expected = self.published.digest(self.stored.name(here.copy.expert, projection, role))
            if expected is None:
                self._add(here.copy, projection, None, f"source/digests.bin has no digest of {role}")
            elif digest(matrix) == expected:
                right.add((projection, role))
            else:
                tensor = self.stored.tensor_of(projection, role)
                culprits = {(rank, tensor) for rank in here.ranks if (rank, tensor) in damaged}
                explained |= culprits
                wrong = _Wrong(projection, role, culprits or {(rank, tensor) for rank in here.dirty})
                self._report_wrong(here, wrong, matrices)
        return explained, frozenset(right)

    def _report_wrong(self, here: _Pieces, wrong: _Wrong, matrices: Matrices) -> None:
        """A finding for each rank whose slice is wrong, as far as that is known."""
        matrix = matrices[wrong.projection, wrong.role]
        name = self.stored.name(here.copy.expert, wrong.projection, wrong.role)
        hint = self.published.hint(name, digest(matrix))
        suspects: Sequence[int | None] = [rank for rank, _ in sorted(wrong.culprits)]
        if not hint and (swapped := self._swapped(here, wrong, matrices)):
            hint, suspects = ": gate and up are exchanged", sorted(swapped)
        for key in sorted(wrong.culprits):
            hint = hint or self._whose_piece(key, here)
        for suspect in suspects or self._differing_ranks(here, name, matrix, wrong.projection):
            unknown = suspect is None and not self.published.has_files
            ask = "; on which rank, verify --source tells" if unknown else ""
            what = f"{wrong.role} differs from the source{hint}{ask}"
            self._add(here.copy, wrong.projection, suspect, what)

    def _differing_ranks(
        self, here: _Pieces, name: str, matrix: Bytes, projection: str
    ) -> Sequence[int | None]:
        """On which ranks the slices of a source tensor differ, where the source's files are there to tell;
        else only that one of them does.
        """
        owners = self.stored.owners(here.copy)
        if len(owners) == 1:
            return [here.ranks[0]]
        if not self.published.has_files:
            return [None]
        differs = matrix != self.published.whole(name).reshape(matrix.shape)
        parts = np.array_split(differs, len(owners), axis=1 if projection == "down_proj" else 0)
        return [rank for rank, part in zip(owners, parts, strict=True) if part.any()] or [None]

    def _swapped(self, here: _Pieces, wrong: _Wrong, matrices: Matrices) -> frozenset[int]:
        """The ranks on which exchanging gate and up gives the source, if any do: the suspect ones, where none
        is known all of them or one alone.
        """
        if wrong.projection == "down_proj":
            return frozenset()
        expert, known = here.copy.expert, frozenset(rank for rank, _ in wrong.culprits)
        tries = [known] if known else [frozenset(here.ranks), *(frozenset({rank}) for rank in here.ranks)]
        gate, up = (matrices[projection, wrong.role].copy() for projection in ("gate_proj", "up_proj"))
        for tried in tries:
            self._exchange(here.copy, tried, gate, up)
            if all(
                digest(matrix) == self.published.digest(self.stored.name(expert, projection, wrong.role))
                for projection, matrix in (("gate_proj", gate), ("up_proj", up))
            ):
                return tried
            self._exchange(here.copy, tried, gate, up)  # back
        return frozenset()

    def _exchange(self, copy: Copy, ranks: Iterable[int], gate: Bytes, up: Bytes) -> None:
        """Exchange the slices of some ranks."""
        owners = self.stored.owners(copy)
        local = gate.shape[0] // len(owners)
        for rank in ranks:
            part = slice(owners.index(rank) * local, (owners.index(rank) + 1) * local)
            gate[part], up[part] = up[part].copy(), gate[part].copy()

    def _whose_piece(self, key: Key, here: _Pieces) -> str:
        """Whether a damaged piece is another expert's of the same tensor."""
        expert = self.stored.whose(key, digest(here.data[key]))
        return "" if expert is None else f": it holds the data of expert {expert}"

    def _check_shapes(self, copy: Copy) -> None:
        """weight_shape is not stored: its value is made from the shape of weight_packed and compared by
        digest.
        """
        for projection in PROJECTIONS:
            expected = self.published.digest(self.stored.name(copy.expert, projection, "weight_shape"))
            shape = self.stored.shape.matrix(projection)
            shapes = [digest(np.array(shape, dtype).tobytes()) for dtype in (np.int32, np.int64)]
            if expected is None:
                continue
            if expected in shapes:
                self.report.count(proven=1)
            else:
                what = "weight_shape of the source is not the shape of weight_packed"
                self._add(copy, projection, None, what)

    def _add(self, copy: Copy, projection: str | None, rank: int | None, what: str) -> None:
        item = next(item for (r, _), item in self.stored.held.items() if rank is None or r == rank)
        path = item.shard.path if rank is not None else on_some_rank(item.shard.path)
        if self.stored.split.slots is not None:
            what = f"slot {copy.slot}: {what}"
        self.report.add(Finding(path, what, self.stored.layer, copy.expert, projection, rank))


@dataclass(frozen=True)
class _Pieces:
    """What is stored of a copy on the `ranks` that are here; on those that are `dirty` the padding is not
    zero.
    """

    copy: Copy
    ranks: Sequence[int]
    data: Mapping[Key, Bytes]
    dirty: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Wrong:
    """A matrix that is not the source's, and the stored pieces that are known to be wrong."""

    projection: str
    role: Role
    culprits: set[Key]
