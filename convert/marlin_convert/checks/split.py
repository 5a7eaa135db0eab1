"""Who holds what, said again from schemas/README.md for the checks alone.

Conversions go by `slicing` and `planning`, of which nothing is used here: a mistake made there is found here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from marlin_convert.checks.stages import Stages
from marlin_convert.documents.manifest import Origin, Parallel, Unit
from marlin_convert.models.family import ModelConfig


@dataclass(frozen=True)
class Split:
    """`tp` ranks, over `ep` groups of which the model's `experts` routed experts are spread; attention and
    dense layers are cut into `attn_tp` slices, None being tp. So in each of `stages`.
    Where a map places experts there are as many `slots` of them in a layer; without it slot i has expert i.
    """

    tp: int
    ep: int
    experts: int
    attn_tp: int | None = None
    stages: Stages = field(default_factory=Stages)
    slots: int | None = None

    @staticmethod
    def of(parallel: Parallel, model: ModelConfig) -> Split:
        """As a manifest says it."""
        stages = Stages(parallel.pp, model.layers)
        return Split(parallel.tp, parallel.ep, model.experts, parallel.attn_tp, stages, parallel.slots)

    @property
    def version(self) -> int:
        """The format version that such a folder has."""
        plain = self.attn_tp is None and self.stages.count == 1 and self.slots is None
        return 1 if plain else 2

    @property
    def moe_tp(self) -> int:
        """Slices of one expert."""
        return self.tp // self.ep

    @property
    def count(self) -> int:
        """Slots of a layer."""
        return self.experts if self.slots is None else self.slots

    @property
    def local(self) -> int:
        """Slots of a rank."""
        return self.count // self.ep

    def placed(self, unit: Unit) -> Sequence[int]:
        """The expert in each slot of a layer."""
        return range(self.experts) if unit.slots is None else unit.slots

    def held(self, rank: int) -> range:
        """The slots of a rank."""
        first = rank // self.moe_tp * self.local
        return range(first, first + self.local)

    def owners(self, slot: int) -> range:
        """The ranks that hold slices of what is in a slot, in slice order."""
        group = slot // self.local
        return range(group * self.moe_tp, (group + 1) * self.moe_tp)

    def group(self, parts: str) -> int:
        """The ranks that share a tensor cut into `parts`: tp or attn_tp."""
        return self.attn_tp or self.tp if parts == "attn_tp" else self.tp

    def slices(self, origin: Origin) -> int:
        """Into how many slices a tensor that keeps its name is cut: one for each rank of its group, or fewer
        where each is on several ranks in a row.
        """
        return self.group(origin.parts or "") // origin.replicas

    def slice_of(self, rank: int, origin: Origin) -> int:
        """The slice that a rank holds: as long as there are ranks, the group's slices come again."""
        return rank // origin.replicas % self.slices(origin)

    def folder(self, rank: int | None, unit: str) -> str:
        """The folder of a rank's shard of a unit inside OUT, None being no rank's."""
        stage = self.stages.folder(unit)
        if rank is None:
            return f"{stage}common"
        digits = max(2, len(str(self.tp)))
        return f"{stage}rank-{rank:0{digits}d}-of-{self.tp:0{digits}d}"
