"""What engines do today at each start, done well: read the published files, copy them through pinned memory,
repack on the GPU.

Whole-file sequential reads by many threads into pinned buffers, one large copy each, then the engine's own
repack op for every expert and the scale permutation in torch, into preallocated tensors. For expert
parallelism only the experts of the rank are read. Nothing else of an engine's start-up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marlin_convert.checkpoint.source import Source
from marlin_convert.engines.ring import PinnedRing
from marlin_convert.engines.torch_loader import torch_dtype
from marlin_convert.kernels.providers import Provider
from marlin_convert.layout.protocol import ExpertShape, Role
from marlin_convert.layout.scales import GROUPED
from marlin_convert.planning.units import expert_tensors
from marlin_convert.slicing import Topology
from marlin_convert.storage.reads import OpenFile, Piece, Run, plan_reads

ROLES = (Role.WEIGHT, Role.SCALE)


@dataclass(frozen=True)
class EngineLoad:
    """Seconds of the steps and bytes read."""

    seconds: dict[str, float]
    bytes: int


def engine_load(
    source: Source, layers: Sequence[int], rank: int, topology: Topology, provider: Provider, threads: int
) -> EngineLoad:
    """Load the routed experts (and whatever else lies in the same files, where whole files are read) of some
    layers of one rank.
    """
    owned = topology.expert_range(rank, source.model.experts)
    shape = source.model.expert_shape(topology.moe_tp)
    repack = _Repack(provider, shape, owned, topology.moe_tp_rank(rank))
    begin = time.perf_counter()
    ring = PinnedRing(threads)
    seconds = {"pin": time.perf_counter() - begin, "read and copy": 0.0, "repack": 0.0}
    total = 0
    for layer in layers:
        prefix = source.layer_prefix(layer) + source.model.experts_module
        names = [tensor.name for expert in owned for tensor in expert_tensors(prefix, expert, shape)]
        begin = time.perf_counter()
        pieces = _pieces(source, names, whole=topology.ep == 1)
        plan = plan_reads(pieces)
        device = torch.empty(plan.size, dtype=torch.uint8, device="cuda")
        _read_and_copy(source, plan.runs, device, ring)
        seconds["read and copy"] += time.perf_counter() - begin
        begin = time.perf_counter()
        repack.layer(device, _places(source, names, pieces, plan.places), prefix)
        torch.cuda.synchronize()
        seconds["repack"] += time.perf_counter() - begin
        total += sum(run.used - run.offset for run in plan.runs)
    seconds["total"] = sum(seconds.values())
    return EngineLoad(seconds, total)


def _pieces(source: Source, names: Sequence[str], whole: bool) -> list[Piece]:
    """All of the files that hold the tensors, or the tensors alone."""
    if not whole:
        return [
            Piece(
                source.tensors[name].file, source.tensors[name].entry.offset, source.tensors[name].entry.size
            )
            for name in names
        ]
    files = {source.tensors[name].file for name in names}
    return [
        Piece(header.file, header.data_start, header.size - header.data_start)
        for header in source.headers
        if header.file in files
    ]


def _places(
    source: Source, names: Sequence[str], pieces: Sequence[Piece], places: Sequence[int]
) -> dict[str, int]:
    """Where each tensor begins on the device."""
    if len(pieces) == len(names):
        return dict(zip(names, places, strict=True))
    starts = {piece.file: place - piece.offset for piece, place in zip(pieces, places, strict=True)}
    return {name: starts[source.tensors[name].file] + source.tensors[name].entry.offset for name in names}


def _read_and_copy(source: Source, runs: Sequence[Run], device: Tensor, ring: PinnedRing) -> None:
    files = {name: OpenFile(source.path(name), direct=False) for name in {run.file for run in runs}}
    try:
        ring.copy(
            part
            for run in runs
            for part in ring.parts(
                files[run.file], run.offset, device[run.at : run.at + run.used - run.offset]
            )
        )
    finally:
        for file in files.values():
            file.close()


@dataclass(frozen=True)
class _Repack:
    """Slice `index` of the experts `owned`, as an engine makes it of the published tensors on the GPU."""

    provider: Provider
    shape: ExpertShape
    owned: range
    index: int

    def layer(self, device: Tensor, places: dict[str, int], prefix: str) -> None:
        """Slice, transpose, repack and permute into the stacked tensors of the rank. `places`: where in
        `device` each tensor of the layer begins.
        """
        count, hidden, local = len(self.owned), self.shape.hidden, self.shape.local
        group = self.shape.scheme.group_size
        w13 = torch.empty((count, hidden // 16, 4 * local), dtype=torch.int32, device="cuda")
        s13 = torch.empty((count, hidden // group, 2 * local), dtype=torch.bfloat16, device="cuda")
        w2 = torch.empty((count, local // 16, 2 * hidden), dtype=torch.int32, device="cuda")
        s2 = torch.empty((count, local // group, hidden), dtype=torch.bfloat16, device="cuda")
        order = torch.from_numpy(GROUPED).to("cuda")

        def part(expert: int, projection: str, role: Role) -> Tensor:
            return self._slice(device[places[f"{prefix}.{expert}.{projection}.{role}"] :], projection, role)

        for i, expert in enumerate(self.owned):
            packed, scale = (
                torch.cat([part(expert, "gate_proj", role), part(expert, "up_proj", role)]) for role in ROLES
            )
            w13[i] = self.provider.repack(packed.t().contiguous(), None, hidden, 2 * local, 4)
            s13[i] = _permuted(scale, order)
            packed, scale = (part(expert, "down_proj", role) for role in ROLES)
            w2[i] = self.provider.repack(packed.t().contiguous(), None, local, hidden, 4)
            s2[i] = _permuted(scale, order)

    def _slice(self, data: Tensor, projection: str, role: Role) -> Tensor:
        """The rank's part of a published matrix that `data` begins with."""
        scheme = self.shape.scheme
        dtype = torch_dtype(scheme.dtype(role))
        out, cols = scheme.source_shape(role, *self.shape.matrix(projection))
        whole = data[: out * cols * dtype.itemsize].view(dtype).reshape(out, cols)
        rows, columns = self.shape.cut(projection).block(whole.shape, self.index)
        return whole[rows.start : rows.stop, columns.start : columns.stop]


def _permuted(scales: Tensor, order: Tensor) -> Tensor:
    """[N, G] to [G, N], the columns of each run of 64 in the kernel's order."""
    size_n, groups = scales.shape
    return scales.t().reshape(-1, size_n // 64, 64)[..., order].reshape(groups, size_n)
