"""The routed experts of a layer as a manifest has them: in which slots, on which ranks, of which digests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from marlin_convert.assemble import StoredSlice, piece_of
from marlin_convert.checks.split import Split
from marlin_convert.layout.protocol import ExpertShape, Layout, Role
from marlin_convert.storage.reads import Piece

#: a rank and a stacked tensor
Key = tuple[int, str]


class Copy(NamedTuple):
    """An expert in a slot; where a map places experts, one may be in several."""

    expert: int
    slot: int


@dataclass(frozen=True)
class StoredLayer:
    """The stacked tensors of one layer, by rank and name without the prefix; `placed` is the expert in each
    slot, `digests` are those of OUT's digests.bin, empty where that is damaged.
    """

    layer: int
    prefix: str
    layout: Layout
    shape: ExpertShape
    split: Split
    placed: Sequence[int]
    held: Mapping[Key, StoredSlice]
    digests: bytes

    def owned(self) -> list[list[Copy]]:
        """The copies of each expert of which something is on the ranks that are there, in the order of the
        experts.
        """
        slots = sorted({slot for rank, _ in self.held for slot in self.split.held(rank)})
        copies: dict[int, list[Copy]] = {}
        for slot in slots:
            copies.setdefault(self.placed[slot], []).append(Copy(self.placed[slot], slot))
        return [copies[expert] for expert in sorted(copies)]

    def owners(self, copy: Copy) -> range:
        """The ranks that should hold a copy, in slice order."""
        return self.split.owners(copy.slot)

    def pieces(self, copy: Copy, ranks: Iterable[int]) -> dict[Key, Piece]:
        """Where the bytes of a copy lie on some of its ranks, per rank and stacked tensor."""
        on = set(ranks)
        local = {rank: copy.slot - self.split.held(rank).start for rank in on}
        held = [(key, stored) for key, stored in self.held.items() if key[0] in on]
        return {key: piece_of(stored, local[key[0]], local[key[0]] + 1) for key, stored in held}

    def digest(self, key: Key, slot: int) -> bytes | None:
        """The recorded digest of what is in a rank's slot, where it is known."""
        at = (self.held[key].tensor.experts or 0) + 16 * (slot - self.split.held(key[0]).start)
        return self.digests[at : at + 16] or None

    def whose(self, key: Key, found: bytes) -> int | None:
        """The expert of which a rank's stacked tensor has a piece with that digest, by what is recorded."""
        slots = self.split.held(key[0])
        return next((self.placed[slot] for slot in slots if self.digest(key, slot) == found), None)

    def tensor_of(self, projection: str, role: Role) -> str:
        """The stacked tensor that holds a role of a projection."""
        stacked = self.layout.stacked(self.shape)
        return next(t.name for t in stacked if t.role is role and projection in t.projections)

    def name(self, expert: int, projection: str, kind: str) -> str:
        """The name of a source tensor of an expert."""
        return f"{self.prefix}.{expert}.{projection}.{kind}"
