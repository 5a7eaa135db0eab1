"""Which pipeline stage has what, said again from schemas/README.md for the checks alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from marlin_convert.documents.manifest import Parallel, PipelineStage
from marlin_convert.models.family import ModelConfig

#: the number of a layer in the name of a tensor, or of a unit
IN_TENSOR, IN_UNIT = re.compile(r"(?:^|\.)layers\.([0-9]{1,9})\."), re.compile(r"layer-([0-9]{1,9})")


@dataclass(frozen=True)
class Stages:
    """`count` stages of a model that has `layers` layers."""

    count: int = 1
    layers: int = 0

    @property
    def beside(self) -> tuple[str, ...]:
        """The units of what every rank has beside layers."""
        return ("top",) if self.count == 1 else ("embed", "head")

    def of(self, unit: str) -> int:
        """The stage of a unit: embeddings and common/ are in the first, what is behind the layers is in the
        last. Each stage has as many layers, the last ones one more where they do not come out even.
        """
        layer = IN_UNIT.fullmatch(unit)
        if layer is None:
            return self.count - 1 if unit == "head" else 0
        few, more = divmod(self.layers, self.count)
        even = few * (self.count - more)
        number = int(layer[1])
        return number // few if number < even else self.count - more + (number - even) // (few + 1)

    def folder(self, unit: str) -> str:
        """What stands before the path of a shard of a unit."""
        if self.count == 1:
            return ""
        digits = max(2, len(str(self.count)))
        return f"stage-{self.of(unit):0{digits}d}-of-{self.count:0{digits}d}/"

    def unit_of(self, tensor: str, model: ModelConfig) -> str:
        """The unit that a stored tensor is of, by its name."""
        facts = model.family.facts
        if tensor.startswith(facts.common):
            return "common"
        if layer := IN_TENSOR.search(tensor):
            return f"layer-{int(layer[1]):03d}"
        return self.beside[0] if tensor.endswith(facts.embeddings) else self.beside[-1]

    def expected(self, common: bool) -> tuple[PipelineStage, ...]:
        """What each stage must have; `common` is whether the model has tensors that no rank owns."""
        stages: list[tuple[list[int], list[str]]] = [([], []) for _ in range(self.count)]
        for layer in range(self.layers):
            stages[self.of(f"layer-{layer:03d}")][0].append(layer)
        for unit in ("embed", "head", "common") if common else ("embed", "head"):
            stages[self.of(unit)][1].append(unit)
        return tuple(PipelineStage(tuple(layers), tuple(beside)) for layers, beside in stages)

    def wrong(self, parallel: Parallel, common: bool) -> Iterator[str]:
        """What a manifest says of the stages and must not."""
        if self.count == 1:
            return
        if self.count > self.layers:
            yield f"parallel.pp {self.count}, but the model has {self.layers} layers"
            return
        found: dict[int | str, list[int]] = {}
        for i, stage in enumerate(parallel.stages):
            for what in _named(stage):
                found.setdefault(what, []).append(i)
        expected = self.expected(common)
        for i, stage in enumerate(expected):
            for what in _named(stage):
                if (stages := found.get(what, [])) != [i]:
                    name = f"layer {what}" if isinstance(what, int) else what
                    where = f"the stages {', '.join(map(str, stages))}" if stages else "no stage"
                    yield f"that {name} is in {where}, it must be in stage {i} alone"
        if parallel.stages != expected:
            yield "parallel.stages that are not those of the format, or in another order"


def _named(stage: PipelineStage) -> tuple[int | str, ...]:
    return (*stage.layers, *stage.has)
