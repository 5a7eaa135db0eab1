"""What is said of a matrix that the kernel reads differently: where, and what it looks as if it were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from marlin_convert.checks.findings import Finding
from marlin_convert.checks.kernel.dequantize import ExpertWeights, Pair
from marlin_convert.checks.kernel.diagnose import Samples, diagnose
from marlin_convert.checks.kernel.kernel_report import KernelReport
from marlin_convert.checks.kernel.layer_files import LayerFiles, Originals
from marlin_convert.checks.kernel.odd_scales import first_place, has_odd, value


@dataclass(frozen=True)
class Place:
    """Which matrix: `w13` or `w2` of an expert on a rank."""

    name: str
    rank: int
    expert: int


@dataclass
class WrongReads:
    """Findings of one layer. `near`: the experts at hand; `samples`: those met so far."""

    files: LayerFiles
    originals: Originals
    report: KernelReport
    near: Mapping[int, ExpertWeights] = field(default_factory=dict)
    samples: Samples = field(default_factory=Samples)
    _unnamed: list[tuple[int, Place, Tensor]] = field(default_factory=list)

    def add(self, place: Place, what: str, projection: str | None) -> None:
        """A finding about a matrix."""
        path = self.files.path(place.rank)
        self.report.findings.append(
            Finding(path, f"{place.name}: {what}", self.files.layer, place.expert, projection, place.rank)
        )

    def report_scales(self, place: Place, differ: Tensor, stored: Tensor, source: Tensor) -> None:
        """Stored scales [N, G] that differ from the source's where one of the two is not finite."""
        n, group = first_place(differ)
        projection, row = self._row(place.name, n, stored.shape[0])
        size, number = self.files.shape.scheme.group_size, int(differ.sum())
        some = "one stored scale is" if number == 1 else f"{number} stored scales are"
        self.add(
            place,
            f"{some} not as in the source, the first at row {row} of the slice, group {group} (inputs"
            f" {group * size} to {group * size + size - 1}): {value(stored[n, group])} where the original is"
            f" {value(source[n, group])}",
            projection,
        )

    def report_weights(self, place: Place, read: Tensor, want: Tensor, true: Pair, stored: Tensor) -> None:
        """Weights [N, K], padding included, that were read differently; `true` and `stored` have none."""
        differ = read != want
        n, k = first_place(differ)
        projection, row = self._row(place.name, n, want.shape[0])
        both = place.name == "w13" and bool(differ.reshape(2, -1).any(dim=1).all())
        local = self.files.shape.local
        seen = unpadded(read, place.name, local)
        looks = diagnose(seen, true, stored, place.name, lambda: self._others(place))
        if not looks:
            self._unnamed.append((len(self.report.findings), place, Samples.sample(read)))
        self.add(
            place,
            f"{self.report.reader} reads {int(differ.sum())} of {want.numel()} weights differently,"
            f"{' of gate_proj and of up_proj,' if both else ''} the first at row {row} of the slice, input"
            f" {k}: {read[n, k].item():g} where the original is"
            f" {want[n, k].item():g}" + (f"; it looks as if {looks}" if looks else ""),
            None if both else projection,
        )

    def name_exchanged(self) -> None:
        """At the end of a layer: say of which expert a matrix is that nothing else explained."""
        for index, place, sample in self._unnamed:
            expert = self.samples.whose(place.rank, place.name, place.expert, sample)
            if expert is not None:
                finding = self.report.findings[index]
                what = f"{finding.what}; it looks as if it is expert {expert}"
                self.report.findings[index] = replace(finding, what=what)

    def note_odd_source(self, expert: int, whole: ExpertWeights) -> bool:
        """Whether scales of the source are not finite; says which."""
        odd = {projection: scale for projection, scale in whole.scales.items() if has_odd(scale)}
        for projection, scale in odd.items():
            where = ~torch.isfinite(scale)
            row, group = first_place(where)
            number = int(where.sum())
            some = "one scale of the source is" if number == 1 else f"{number} scales of the source are"
            line = (
                f"layer {self.files.layer}, expert {expert}, {projection}: {some} not finite, the first at"
                f" row {row}, group {group}: {value(scale[row, group])}; no kernel can tell the weights of"
                " such a row apart, so the bits were compared, and it ran with another scale in their place"
            )
            if line not in self.report.skipped:  # an expert may be in several slots
                self.report.skipped.append(line)
        return bool(odd)

    def pair(self, name: str, rank: int, whole: ExpertWeights) -> Pair:
        """Codes and scales of a rank's slice."""
        moe_tp = self.files.split.moe_tp
        return whole.w13(rank % moe_tp, moe_tp) if name == "w13" else whole.w2(rank % moe_tp, moe_tp)

    def _row(self, name: str, n: int, rows: int) -> tuple[str, int]:
        """Projection and row in the slice of row `n` of a stored matrix."""
        if name == "w2":
            return "down_proj", n
        half = rows // 2
        return ("gate_proj", n) if n < half else ("up_proj", n - half)

    def _others(self, place: Place) -> Iterator[tuple[str, Pair]]:
        """What else a matrix might be: another rank's slice, or another expert of the batch or beside it."""
        name, rank, expert, moe_tp = place.name, place.rank, place.expert, self.files.split.moe_tp
        for index in range(moe_tp):
            if index != rank % moe_tp:
                other_rank = rank - rank % moe_tp + index
                yield f"the slice of rank {other_rank}", self.pair(name, index, self.near[expert])
        for other, whole in self.near.items():
            if other != expert:
                yield f"expert {other}", self.pair(name, rank, whole)
        held, placed = self.files.split.held(rank), self.files.placed
        beside = (slot + step for slot in held if placed[slot] == expert for step in (-1, 1))
        for slot in beside:
            if slot in held and placed[slot] not in self.near:
                original = self.originals(range(slot, slot + 1))[0]
                whole = ExpertWeights.load(original, self.near[expert].device)
                yield f"expert {placed[slot]}", self.pair(name, rank, whole)


def unpadded(matrix: Tensor, name: str, local: int) -> Tensor:
    """Without the padding: of w13 [2P, ...] the first `local` rows of each half, of w2 [..., P] the first
    columns.
    """
    if name == "w2":
        return matrix[:, :local]
    padded = matrix.shape[0] // 2
    return matrix if padded == local else torch.cat((matrix[:local], matrix[padded : padded + local]))
