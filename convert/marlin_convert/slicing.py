"""Which part of a tensor a rank holds: the only place of this arithmetic.

Plan, jobs, reader and benches take their slices from here. The checks do not, on purpose: `checks` derives
again from the format page what belongs where, so that a mistake made here is found there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from marlin_convert.errors import UsageError

#: no engine runs more slices of one expert than this
MAX_MOE_TP = 64
#: ranks in all
MAX_TP = 4096

#: a rank, or None for common/
Rank = int | None


@dataclass(frozen=True)
class Placement:
    """Which routed expert is in each of a layer's `slots`, as load balancing places them, some more than
    once; `rows` is by layer.
    """

    slots: int
    rows: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class Topology:
    """`tp` ranks in all; the routed experts are split over `ep` groups of `moe_tp` ranks:
    rank = ep_rank * moe_tp + moe_tp_rank, as in SGLang. Attention and dense layers are cut into `attn_tp`
    slices, of which rank r holds slice r % attn_tp; None: into tp, as everything else that is cut. There are
    `tp` ranks for each of `pp` pipeline stages. Experts are in slots, of which each ep group has as many, one
    after the other: by `placement`, None being expert i in slot i.
    """

    tp: int
    ep: int
    attn_tp: int | None = None
    pp: int = 1
    placement: Placement | None = None

    @staticmethod
    def of(tp: int, ep: int, attn_tp: int | None = None, pp: int = 1) -> Topology:
        """A checked topology. Raises UsageError."""
        if tp < 1 or ep < 1 or tp % ep:
            raise UsageError(
                f"--ep {ep} does not divide --tp {tp}; tp is the number of all ranks, so tp 8 ep 8 is 8"
                " ranks, not 64"
            )
        if tp > MAX_TP:
            raise UsageError(f"--tp {tp}: at most {MAX_TP} ranks are supported")
        if tp // ep > MAX_MOE_TP:
            raise UsageError(
                f"--tp {tp} with --ep {ep} cuts each expert into {tp // ep} slices; at most {MAX_MOE_TP} are "
                "supported"
            )
        if attn_tp is not None and (attn_tp < 1 or tp % attn_tp):
            raise UsageError(
                f"--attn-tp {attn_tp} does not divide --tp {tp}: each of the attention's slices is on tp /"
                " attn-tp ranks"
            )
        if pp < 1:
            raise UsageError(f"--pp {pp}: there is at least one stage")
        return Topology(tp, ep, None if attn_tp == tp else attn_tp, pp)

    @property
    def moe_tp(self) -> int:
        """Slices of one expert."""
        return self.tp // self.ep

    def stages(self, layers: int) -> list[range]:
        """The layers of each stage, neighbours and as equal as can be: the last stages have one more where
        `layers` cannot be divided, as SGLang has it. Raises ValueError where a stage would have none.
        """
        size, rest = divmod(layers, self.pp)
        if not size:
            raise ValueError(f"{layers} layers are not enough for {self.pp} stages")
        sizes = (size + (stage >= self.pp - rest) for stage in range(self.pp))
        return [range(*pair) for pair in pairwise(accumulate(sizes, initial=0))]

    def ep_rank(self, rank: int) -> int:
        """The group of experts a rank owns."""
        return rank // self.moe_tp

    def moe_tp_rank(self, rank: int) -> int:
        """The slice of each of its experts a rank owns."""
        return rank % self.moe_tp

    @property
    def plain(self) -> bool:
        """Whether a loader of format version 1 reads such files right."""
        return self.attn_tp is None and self.pp == 1 and self.placement is None

    def expert_range(self, rank: int, slots: int) -> range:
        """The slots of a rank: its routed experts, where expert i is in slot i."""
        return span(slots, self.ep, self.ep_rank(rank))

    def owners(self, slot: int, slots: int) -> range:
        """The ranks that hold what is in a slot, in slice order."""
        group = slot // (slots // self.ep)
        return range(group * self.moe_tp, (group + 1) * self.moe_tp)

    def placed(self, layer: int, experts: int) -> Sequence[int]:
        """The routed expert in each slot of a layer."""
        return range(experts) if self.placement is None else self.placement.rows[layer]

    def held(self, rank: int, layer: int, experts: int) -> Sequence[int]:
        """The routed experts in a rank's slots of a layer, in their order."""
        placed = self.placed(layer, experts)
        own = self.expert_range(rank, len(placed))
        return placed[own.start : own.stop]


@dataclass(frozen=True)
class Cut:
    """How a tensor is divided: into `parts` equal slices along `axis`, each on `replicas` consecutive ranks
    (more than one where there are fewer slices than ranks, such as heads of keys and values), and from the
    first slice again where the ranks go on. `axis` None: whole, on every rank.
    """

    axis: int | None = None
    parts: int = 1
    replicas: int = 1

    def index(self, rank: Rank) -> int:
        """The slice a rank holds."""
        return 0 if self.axis is None or rank is None else rank // self.replicas % self.parts

    def holders(self, ranks: Sequence[Rank]) -> dict[int, tuple[Rank, ...]]:
        """Who of `ranks` holds which slice; slices that none of them holds are left out."""
        held: dict[int, list[Rank]] = {}
        for rank in ranks:
            held.setdefault(self.index(rank), []).append(rank)
        return {index: tuple(found) for index, found in held.items()}

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one slice of a tensor of `shape`."""
        return tuple(map(len, self.block(shape, 0)))

    def block(self, shape: Sequence[int], index: int) -> tuple[range, ...]:
        """Slice `index` of a tensor of `shape`, as a range of each axis."""
        return tuple(
            span(n, self.parts, index) if axis == self.axis else range(n) for axis, n in enumerate(shape)
        )


def span(extent: int, parts: int, index: int) -> range:
    """Slice `index` of `extent` things in `parts` equal slices. Raises ValueError where there is none."""
    size, rest = divmod(extent, parts)
    if rest or not 0 <= index < parts:
        raise ValueError(f"{extent} has no slice {index} of {parts} equal ones")
    return range(index * size, (index + 1) * size)
