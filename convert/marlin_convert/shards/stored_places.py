"""Where a source tensor is in a converted folder, or what of it is not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from marlin_convert.assemble import StoredSlice
from marlin_convert.layout.protocol import ExpertShape, Layout, Role, StackedTensor
from marlin_convert.slicing import Cut, Topology
from marlin_convert.words import count, ranges

#: a stored tensor by its rank
Held = Mapping[int, StoredSlice]


@dataclass(frozen=True)
class PlainSource:
    """A tensor that keeps its name: how it is cut, and one stored slice of each index, None where no rank
    that is here has it.
    """

    cut: Cut
    ranks: int
    slices: tuple[StoredSlice | None, ...]

    @property
    def absent(self) -> tuple[int, ...]:
        """Of each slice that is not here, a rank that has it."""
        if None not in self.slices:
            return ()
        holders = self.cut.holders(range(self.ranks))
        return tuple(holders[i][0] or 0 for i, stored in enumerate(self.slices) if stored is None)


@dataclass(frozen=True)
class StoredExperts:
    """The `experts` routed experts of a layer, and the one in each of its slots; `held` are their stacked
    tensors, by the name they have in the layout, then by rank.
    """

    layout: Layout
    shape: ExpertShape
    experts: int
    placed: Sequence[int]
    topology: Topology
    held: Mapping[str, Held]

    def homes(self, expert: int) -> list[tuple[int, int]]:
        """Of each slice of an expert, in order, the rank that has it, and which of its slots that is: of the
        first copy that is wholly here, where there are several.
        """
        copies = self._copies[expert]
        return next((copy for copy in copies if self._here.issuperset(rank for rank, _ in copy)), copies[0])

    @cached_property
    def _copies(self) -> dict[int, list[list[tuple[int, int]]]]:
        """What `homes` says of every copy of each expert."""
        copies: dict[int, list[list[tuple[int, int]]]] = {}
        for slot, expert in enumerate(self.placed):
            ranks = self.topology.owners(slot, len(self.placed))
            first = self.topology.expert_range(ranks[0], len(self.placed)).start
            copies.setdefault(expert, []).append([(rank, slot - first) for rank in ranks])
        return copies

    @cached_property
    def _here(self) -> frozenset[int]:
        """The ranks that are here."""
        return frozenset(rank for held in self.held.values() for rank in held)

    @cached_property
    def stacks(self) -> dict[tuple[str, Role], StackedTensor]:
        """By projection and role, the stacked tensor that a source matrix is in."""
        return {
            (projection, stack.role): stack
            for stack in self.layout.stacked(self.shape)
            for projection in stack.projections
        }


@dataclass(frozen=True)
class ExpertSource:
    """A tensor of a routed expert; `role` None is weight_shape, which is not stored."""

    layer: StoredExperts
    expert: int
    projection: str
    role: Role | None

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks that have slices of it and are not here."""
        role = self.role or Role.WEIGHT
        held = self.layer.held[self.layer.stacks[self.projection, role].name]
        return tuple(rank for rank, _ in self.layer.homes(self.expert) if rank not in held)


@dataclass(frozen=True)
class Missing:
    """Source tensors that are not, or not wholly, in a converted folder: the layers that are not there at
    all, ranks whose slices are wanted, and the tensors that stand outside of both.
    """

    tensors: tuple[str, ...]
    layers: tuple[int, ...]
    ranks: tuple[int, ...]
    others: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.tensors)

    def __str__(self) -> str:
        """What is not there, for people."""
        causes = []
        if self.layers:
            causes.append(f"layer{'s' * (len(self.layers) > 1)} {ranges(self.layers)}")
        if self.ranks:
            causes.append(f"the slices of rank{'s' * (len(self.ranks) > 1)} {ranges(self.ranks)}")
        if self.others:
            causes.append(f"{count(len(self.others), 'tensor')} outside the layers, such as {self.others[0]}")
        return " and ".join(causes)
