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
from marlin_convert.kernels.providers import Provider
from marlin_convert.layout.protocol import ExpertShape
from marlin_convert.layout.scales import GROUPED
from marlin_convert.planning.units import expert_tensors
from marlin_convert.reads import OpenFile, Piece, Run, plan_reads
from marlin_convert.slicing import Topology


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
    shape = source.model.expert_shape(topology.moe_tp)
    owned = topology.expert_range(rank, source.model.experts)
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
        places = _places(source, names, pieces, plan.places)
        _repack(device, places, prefix, owned, shape, topology.moe_tp_rank(rank), provider)
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


def _repack(
    device: Tensor,
    places: dict[str, int],
    prefix: str,
    owned: range,
    shape: ExpertShape,
    index: int,
    provider: Provider,
) -> None:
    """Slice, transpose, repack and permute as an engine does, into the stacked tensors of the rank."""
    local_size, hidden, group = shape.local, shape.hidden, shape.scheme.group_size
    w13 = torch.empty((len(owned), hidden // 16, 4 * local_size), dtype=torch.int32, device="cuda")
    s13 = torch.empty((len(owned), hidden // group, 2 * local_size), dtype=torch.bfloat16, device="cuda")
    w2 = torch.empty((len(owned), local_size // 16, 2 * hidden), dtype=torch.int32, device="cuda")
    s2 = torch.empty((len(owned), local_size // group, hidden), dtype=torch.bfloat16, device="cuda")
    order = torch.from_numpy(GROUPED).to("cuda")

    def matrix(expert: int, projection: str, kind: str) -> Tensor:
        out, inputs = shape.matrix(projection)
        at = places[f"{prefix}.{expert}.{projection}.{kind}"]
        cols, dtype = (
            (inputs // 8, torch.int32) if kind == "weight_packed" else (inputs // group, torch.bfloat16)
        )
        data = device[at : at + out * cols * dtype.itemsize]
        whole = data.view(dtype).reshape(out, cols)
        rows, columns = shape.cut(projection).block(whole.shape, index)
        return whole[rows.start : rows.stop, columns.start : columns.stop]

    def permuted(scales: Tensor) -> Tensor:
        return (
            scales.t()
            .reshape(-1, scales.shape[0] // 64, 64)[..., order]
            .reshape(scales.shape[1], scales.shape[0])
        )

    none = torch.empty(0, dtype=torch.int32, device="cuda")
    for i, expert in enumerate(owned):
        packed = torch.cat([matrix(expert, p, "weight_packed") for p in ("gate_proj", "up_proj")])
        w13[i] = provider.repack(packed.t().contiguous(), none, hidden, 2 * local_size, 4)
        s13[i] = permuted(torch.cat([matrix(expert, p, "weight_scale") for p in ("gate_proj", "up_proj")]))
        w2[i] = provider.repack(
            matrix(expert, "down_proj", "weight_packed").t().contiguous(), none, local_size, hidden, 4
        )
        s2[i] = permuted(matrix(expert, "down_proj", "weight_scale"))
