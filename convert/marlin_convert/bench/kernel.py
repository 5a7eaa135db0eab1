"""`bench kernel`: the Marlin MoE kernel on one converted layer of one rank, at the token counts of
speculative decoding.

How times are taken on a GPU: a CUDA graph of several calls is replayed and timed with events; the median over
replays is divided by the number of calls. Weights are cold without flushing anything: each call in the graph
has a routing of its own with the experts relabelled at random, and there are so many calls that they read
several times the L2 cache between them. What a call must read (the words and scales of the experts it hits,
on average over the calls) over the device's memory bandwidth measured in the same run is the floor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from marlin_convert.bench.loaded_layer import LoadedLayer, load_layer
from marlin_convert.bench.timing import Timer
from marlin_convert.documents.bench import KernelBench, KernelRow
from marlin_convert.errors import MachineError
from marlin_convert.kernels import TOKENS
from marlin_convert.kernels.fused_moe import Routing, align, choose_block_size, fused_moe, make_workspace
from marlin_convert.kernels.gemm_call import Alignment, GemmCall, ReduceFlags
from marlin_convert.kernels.providers import Provider, environment, load_for

ROUTINGS = ("uniform", "skewed")
#: all calls of a graph together read at least this many times the L2 cache
L2_TIMES = 4
MAX_CALLS = 64
MIN_CALLS = 8


@dataclass(frozen=True)
class KernelSettings:
    """What is timed: a layer of a rank, at these numbers of tokens; the median of `rounds` replays on
    `device`, by the provider of this name or else the first that loads there.
    """

    layer: int
    rank: int = 0
    tokens: tuple[int, ...] = TOKENS
    rounds: int = 30
    device: str = "cuda"
    provider: str | None = None


@dataclass(frozen=True)
class _Call:
    """The inputs of one call of a graph: x of w13, c2 of w2."""

    x: Tensor
    c2: Tensor
    routing: Routing
    alignment: Alignment


def bench_kernel(
    out: str | os.PathLike[str],
    settings: KernelSettings,
    say: Callable[[str], None] = lambda text: None,
) -> KernelBench:
    """Time a converted layer of a rank. Returns the report.

    Raises UsageError for what is not in `out` and for a layout that the kernel does not read, MachineError
    where no kernel loads or memory does not suffice.
    """
    provider = load_for(settings.device, settings.provider)
    timer = Timer(torch.device(settings.device), settings.rounds)
    say(f"loading layer {settings.layer} of rank {settings.rank}")
    try:
        with torch.inference_mode():
            loaded = load_layer(out, settings.layer, settings.rank, settings.device)
            return _Bench(loaded, provider, timer).report(settings.tokens, say)
    except torch.OutOfMemoryError as error:
        raise MachineError(f"the GPU has too little memory for this layer and its bench ({error})") from error


class _Bench:
    """A layer, a provider and a device."""

    def __init__(self, layer: LoadedLayer, provider: Provider, timer: Timer) -> None:
        self._layer, self._provider, self._timer, self._device = layer, provider, timer, timer.device
        self._experts = layer.experts
        self._workspace = make_workspace(self._device)
        gpu = torch.cuda.get_device_properties(self._device) if timer.graphs else None
        self._l2 = 0 if gpu is None else int(gpu.L2_cache_size)
        self._generator = torch.Generator().manual_seed(1)

    def report(self, tokens: tuple[int, ...], say: Callable[[str], None]) -> KernelBench:
        """All rows and what they were measured with."""
        bandwidth = self._timer.memory_bandwidth()
        rows = []
        for count in tokens:
            for routing in ROUTINGS:
                say(f"{count} tokens, {routing} routing")
                rows += self._rows(count, routing, bandwidth.median)
        layer, manifest = self._layer, self._layer.manifest
        return KernelBench(
            layer=layer.layer,
            rank=layer.rank,
            tp=manifest.tp,
            ep=manifest.ep,
            experts=layer.num_experts,
            local_experts=len(layer.owned),
            top_k=layer.top_k,
            hidden=self._experts.w13.size_k,
            intermediate=self._experts.w2.size_k,
            group_size=manifest.group_size,
            expert_bytes=layer.expert_bytes,
            rounds=self._timer.rounds,
            memory_bandwidth=bandwidth.median,
            memory_bandwidth_spread=bandwidth.spread,
            l2_bytes=self._l2,
            environment={"device": self._device.type, "gpu": None, "cuda": None}
            | environment(self._provider, self._device),
            notes=tuple(self._notes()),
            rows=tuple(rows),
        )

    def _rows(self, tokens: int, routing: str, bandwidth: float) -> list[KernelRow]:
        layer = self._layer
        block_size = choose_block_size(tokens, layer.top_k, layer.num_experts)
        calls, hit = self._calls(tokens, routing, block_size)
        size = hit * layer.expert_bytes
        floor = size / bandwidth * 1e3
        rows = []
        repeatable: Tensor | None = None
        for atomic in (False, True):
            flags = ReduceFlags(use_atomic_add=atomic)
            w13 = self._timer.milliseconds([self._w13(call, flags) for call in calls])
            w2 = self._timer.milliseconds([self._w2(call, flags) for call in calls])
            fused = self._timer.milliseconds([self._fused(call, flags, aligned=True) for call in calls])
            whole = self._timer.milliseconds([self._fused(call, flags, aligned=False) for call in calls])
            result = self._fused(calls[0], flags, aligned=True)().float()
            repeatable = result if repeatable is None else repeatable
            error = float((result - repeatable).norm() / repeatable.norm().clamp_min(1e-30))
            kernel = w13.median + w2.median
            rows.append(
                KernelRow(
                    tokens=tokens,
                    routing=routing,
                    use_atomic_add=atomic,
                    block_size=block_size,
                    calls=len(calls),
                    experts_hit=hit,
                    bytes=size,
                    floor_ms=floor,
                    w13_ms=w13.median,
                    w2_ms=w2.median,
                    fused_ms=fused.median,
                    whole_ms=whole.median,
                    spread=max(part.spread for part in (w13, w2, fused, whole)),
                    bandwidth_share=floor / kernel if kernel else 0.0,
                    tokens_per_second=tokens / fused.median * 1e3 if fused.median else 0.0,
                    error=error,
                )
            )
        return rows

    def _calls(self, tokens: int, routing: str, block_size: int) -> tuple[list[_Call], float]:
        """Inputs of the calls of one graph, and how many of this rank's experts a call hits on average."""
        layer = self._layer
        first = self._routing(tokens, routing)
        size = max(self._hit(first), 1) * layer.expert_bytes
        graphs = self._timer.graphs
        count = min(max(-(-L2_TIMES * self._l2 // size), MIN_CALLS), MAX_CALLS) if graphs else 1
        all_ids = [first, *(self._routing(tokens, routing) for _ in range(count - 1))]
        calls = [self._call(ids, block_size) for ids in all_ids]
        return calls, sum(self._hit(ids) for ids in all_ids) / len(calls)

    def _call(self, ids: Tensor, block_size: int) -> _Call:
        """Random activations and weights for some ids [tokens, top_k]."""
        experts, on_device = self._experts, ids.to(self._device)
        x = torch.randn((ids.shape[0], experts.w13.size_k), generator=self._generator)
        c2 = torch.randn((ids.numel(), experts.w2.size_k), generator=self._generator)
        weights = torch.rand(ids.shape, generator=self._generator).to(self._device)
        alignment = align(on_device, len(self._layer.owned), block_size, experts.expert_map)
        x, c2 = (tensor.to(self._device, torch.bfloat16) for tensor in (x, c2))
        return _Call(x, c2, Routing(weights, on_device), alignment)

    def _routing(self, tokens: int, routing: str) -> Tensor:
        """int32 [tokens, top_k], distinct in a row: all experts alike, or their popularity by Zipf's law;
        labelled at random.
        """
        experts = self._layer.num_experts
        noise = -torch.log(
            -torch.log(torch.rand((tokens, experts), generator=self._generator).clamp(1e-12, 1 - 1e-7))
        )
        if routing == "skewed":
            noise -= torch.log(torch.arange(1, experts + 1))
        labels = torch.randperm(experts, generator=self._generator)
        return labels[noise.topk(self._layer.top_k, dim=1).indices].to(torch.int32)

    def _hit(self, ids: Tensor) -> int:
        used = torch.unique(ids)
        return int(((used >= self._layer.owned.start) & (used < self._layer.owned.stop)).sum())

    def _w13(self, call: _Call, flags: ReduceFlags) -> Callable[[], Tensor]:
        """The kernel alone, on w13."""
        top_k, workspace = self._layer.top_k, self._workspace
        gemm = GemmCall(call.x, self._experts.w13, call.alignment, workspace, top_k, flags=flags)
        return lambda: self._provider.gemm(gemm)

    def _w2(self, call: _Call, flags: ReduceFlags) -> Callable[[], Tensor]:
        """The kernel alone, on w2."""
        gemm = GemmCall(
            call.c2,
            self._experts.w2,
            call.alignment,
            self._workspace,
            top_k=1,
            topk_weights=call.routing.weights,
            flags=flags,
        )
        return lambda: self._provider.gemm(gemm)

    def _fused(self, call: _Call, flags: ReduceFlags, *, aligned: bool) -> Callable[[], Tensor]:
        """The whole routed MoE of one call; unless `aligned`, the alignment is made in it."""
        routing = replace(call.routing, alignment=call.alignment) if aligned else call.routing
        return lambda: fused_moe(
            self._provider, call.x, self._experts, routing, workspace=self._workspace, flags=flags
        )

    def _notes(self) -> list[str]:
        notes = [
            "silu, the sum over experts and the alignment are plain torch, several small kernels each; an"
            " engine's own are faster"
        ]
        whole = self._layer.expert_bytes * len(self._layer.owned)
        if not self._timer.graphs:
            notes.append(
                "on a CPU the provider is a model of the kernel: the times mean nothing, only the code path"
                " is exercised"
            )
        elif whole < 2 * self._l2:
            notes.append(
                "all experts of this layer nearly fit into the L2 cache: times are not those of weights read"
                " from memory"
            )
        return notes
