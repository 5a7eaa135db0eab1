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
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from marlin_convert.bench.layer import LoadedLayer, load_layer
from marlin_convert.bench.stats import Summary, summarize
from marlin_convert.errors import MachineError
from marlin_convert.extras import package_version
from marlin_convert.kernels.fused_moe import (
    Alignment,
    ReduceFlags,
    align,
    choose_block_size,
    fused_moe,
    grouped_gemm,
    make_workspace,
)
from marlin_convert.kernels.providers import Provider, load_for

TOKENS = (1, 9, 90, 330)
ROUTINGS = ("uniform", "skewed")
#: all calls of a graph together read at least this many times the L2 cache
L2_TIMES = 4
MAX_CALLS = 64
MIN_CALLS = 8
PROBE_BYTES = {"cuda": 4 << 30, "cpu": 32 << 20}


@dataclass(frozen=True)
class Row:
    """One line of the table; times in milliseconds, medians. `experts_hit` and `bytes` are means over the
    calls.

    `w13_ms` and `w2_ms` are the kernel alone with the alignment given; `fused_ms` is w13, silu, w2 and the
    sum over experts, `whole_ms` that and the alignment, all around the kernel in plain torch.
    `bandwidth_share` is the floor over w13 and w2 together. `error` is the relative difference of the fused
    result from that of the repeatable flags.
    """

    tokens: int
    routing: str
    use_atomic_add: bool
    block_size: int
    calls: int
    experts_hit: float
    bytes: float
    floor_ms: float
    w13_ms: float
    w2_ms: float
    fused_ms: float
    whole_ms: float
    spread: float
    bandwidth_share: float
    tokens_per_second: float
    error: float


@dataclass(frozen=True)
class _Call:
    """The inputs of one call of a graph."""

    x: Tensor
    c2: Tensor
    weights: Tensor
    ids: Tensor
    alignment: Alignment


def bench_kernel(
    out: str | os.PathLike[str],
    *,
    layer: int,
    rank: int,
    tokens: Sequence[int] = TOKENS,
    rounds: int = 30,
    device: str = "cuda",
    provider: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Time a converted layer of a rank. Returns the report; its schema is schemas/bench-kernel.schema.json.

    Raises UsageError for what is not in `out`, MachineError where no kernel loads or memory does not suffice.
    """
    chosen = load_for(device, provider)
    say(f"loading layer {layer} of rank {rank}")
    try:
        with torch.inference_mode():
            loaded = load_layer(out, layer, rank, device)
            bench = _Bench(loaded, chosen, torch.device(device), rounds)
            return bench.report(tokens, say)
    except torch.OutOfMemoryError as error:
        raise MachineError(f"the GPU has too little memory for this layer and its bench ({error})") from error


class _Bench:
    """A layer, a provider and a device."""

    def __init__(self, layer: LoadedLayer, provider: Provider, device: torch.device, rounds: int) -> None:
        self._layer, self._provider, self._device, self._rounds = layer, provider, device, rounds
        self._graphs = device.type == "cuda"
        self._workspace = make_workspace(device)
        self._l2 = int(torch.cuda.get_device_properties(device).L2_cache_size) if self._graphs else 0
        self._generator = torch.Generator().manual_seed(1)

    def report(self, tokens: Sequence[int], say: Callable[[str], None]) -> dict[str, Any]:
        """All rows and what they were measured with."""
        bandwidth = self.memory_bandwidth()
        rows = []
        for count in tokens:
            for routing in ROUTINGS:
                say(f"{count} tokens, {routing} routing")
                rows += self._rows(count, routing, bandwidth.median)
        layer = self._layer
        return {
            "layer": layer.layer,
            "rank": layer.rank,
            "tp": layer.tp,
            "ep": layer.ep,
            "experts": layer.experts,
            "local_experts": layer.stop - layer.start,
            "top_k": layer.top_k,
            "hidden": layer.w13.size_k,
            "intermediate": layer.w2.size_k,
            "group_size": layer.group_size,
            "expert_bytes": layer.expert_bytes,
            "rounds": self._rounds,
            "memory_bandwidth": bandwidth.median,
            "memory_bandwidth_spread": bandwidth.spread,
            "l2_bytes": self._l2,
            "environment": self._environment(),
            "notes": self._notes(),
            "rows": [asdict(row) for row in rows],
        }

    def memory_bandwidth(self) -> Summary:
        """Bytes a second of the device's memory: the better of a large copy (read and written together) and
        of a large reduction (read only).

        The kernel only reads its weights, and a copy alone can come out below what it reads them with.
        """
        size = PROBE_BYTES[self._device.type]
        source = torch.zeros(size // 4, dtype=torch.float32, device=self._device)
        target = torch.empty_like(source)
        copies = summarize([2 * size / one for one in self._time_alone(lambda: target.copy_(source))])
        reads = summarize([size / one for one in self._time_alone(lambda: torch.sum(source))])
        return max(copies, reads, key=lambda summary: summary.median)

    def _time_alone(self, run: Callable[[], object]) -> list[float]:
        """Seconds of single launches: long enough here that no graph is needed."""
        if not self._graphs:
            return self._time([run])
        make: Callable[..., Any] = torch.cuda.Event
        seconds = []
        for _ in range(12):
            begin, end = make(enable_timing=True), make(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        return seconds[2:]

    def _rows(self, tokens: int, routing: str, bandwidth: float) -> list[Row]:
        layer, top_k = self._layer, self._layer.top_k
        block_size = choose_block_size(tokens, top_k, layer.experts)
        calls, hit = self._calls(tokens, routing, block_size)
        size = hit * layer.expert_bytes
        floor = size / bandwidth * 1e3
        rows = []
        repeatable: Tensor | None = None
        for atomic in (False, True):
            flags = ReduceFlags(use_atomic_add=atomic)
            w13, w2 = (
                self._median([self._gemm(call, name, flags) for call in calls]) for name in ("w13", "w2")
            )
            fused = self._median([self._fused(call, flags, call.alignment) for call in calls])
            whole = self._median([self._fused(call, flags, None) for call in calls])
            result = self._fused(calls[0], flags, calls[0].alignment)().float()
            repeatable = result if repeatable is None else repeatable
            error = float((result - repeatable).norm() / repeatable.norm().clamp_min(1e-30))
            kernel = w13.median + w2.median
            rows.append(
                Row(
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
        count = min(max(-(-L2_TIMES * self._l2 // size), MIN_CALLS), MAX_CALLS) if self._graphs else 1
        local, intermediate = layer.stop - layer.start, layer.w2.size_k
        calls, hits = [], 0
        for ids in [first, *(self._routing(tokens, routing) for _ in range(count - 1))]:
            hits += self._hit(ids)
            x = torch.randn((tokens, layer.w13.size_k), generator=self._generator).to(
                self._device, torch.bfloat16
            )
            c2 = torch.randn((tokens * layer.top_k, intermediate), generator=self._generator).to(
                self._device, torch.bfloat16
            )
            weights = torch.rand((tokens, layer.top_k), generator=self._generator).to(self._device)
            on_device = ids.to(self._device)
            calls.append(
                _Call(x, c2, weights, on_device, align(on_device, local, block_size, layer.expert_map))
            )
        return calls, hits / len(calls)

    def _routing(self, tokens: int, routing: str) -> Tensor:
        """int32 [tokens, top_k], distinct in a row: all experts alike, or their popularity by Zipf's law;
        labelled at random.
        """
        experts = self._layer.experts
        noise = -torch.log(
            -torch.log(torch.rand((tokens, experts), generator=self._generator).clamp(1e-12, 1 - 1e-7))
        )
        if routing == "skewed":
            noise -= torch.log(torch.arange(1, experts + 1))
        labels = torch.randperm(experts, generator=self._generator)
        return labels[noise.topk(self._layer.top_k, dim=1).indices].to(torch.int32)

    def _hit(self, ids: Tensor) -> int:
        used = torch.unique(ids)
        return int(((used >= self._layer.start) & (used < self._layer.stop)).sum())

    def _gemm(self, call: _Call, name: str, flags: ReduceFlags) -> Callable[[], Tensor]:
        """One call of the kernel alone."""
        first = name == "w13"

        def run() -> Tensor:
            return grouped_gemm(
                self._provider,
                call.x if first else call.c2,
                self._layer.w13 if first else self._layer.w2,
                call.alignment,
                call.weights,
                workspace=self._workspace,
                top_k=self._layer.top_k if first else 1,
                mul_topk_weights=not first,
                flags=flags,
            )

        return run

    def _fused(self, call: _Call, flags: ReduceFlags, alignment: Alignment | None) -> Callable[[], Tensor]:
        """The whole routed MoE of one call; the alignment is made anew where none is given."""
        layer = self._layer

        def run() -> Tensor:
            return fused_moe(
                self._provider,
                call.x,
                layer.w13.words,
                layer.w13.scales,
                layer.w2.words,
                layer.w2.scales,
                call.weights,
                call.ids,
                expert_map=layer.expert_map,
                alignment=alignment,
                workspace=self._workspace,
                flags=flags,
            )

        return run

    def _median(self, runs: Sequence[Callable[[], object]]) -> Summary:
        return summarize([seconds * 1e3 for seconds in self._time(runs)])

    def _time(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        """Seconds a run, once a round."""
        if not self._graphs:
            seconds = []
            for _ in range(self._rounds):
                begin = time.perf_counter()
                for run in runs:
                    run()
                seconds.append((time.perf_counter() - begin) / len(runs))
            return seconds
        graph = self._capture(runs)
        make: Callable[..., Any] = torch.cuda.Event
        events = [(make(enable_timing=True), make(enable_timing=True)) for _ in range(self._rounds)]
        for _ in range(3):
            graph.replay()
        for begin_event, end_event in events:
            begin_event.record()
            graph.replay()
            end_event.record()
        torch.cuda.synchronize(self._device)
        return [begin_event.elapsed_time(end_event) / 1e3 / len(runs) for begin_event, end_event in events]

    def _capture(self, runs: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
        stream: Callable[..., Any] = torch.cuda.Stream
        side = stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            runs[0]()  # compiles, and allocates what later calls share
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for run in runs:
                run()
        return graph

    def _environment(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "provider": self._provider.name,
            "torch": torch.__version__,
            "device": self._device.type,
            "gpu": None,
            "cuda": None,
        }
        if self._graphs:
            major, minor = torch.cuda.get_device_capability(self._device)
            found |= {
                "gpu": torch.cuda.get_device_name(self._device),
                "capability": f"{major}.{minor}",
                "cuda": torch.version.cuda,
            }
        for package in ("marlin-convert", "sglang", "sgl-kernel"):
            found[package] = package_version(package)
        return found

    def _notes(self) -> list[str]:
        notes = [
            "silu, the sum over experts and the alignment are plain torch, several small kernels each; an"
            " engine's own are faster"
        ]
        whole = self._layer.expert_bytes * (self._layer.stop - self._layer.start)
        if not self._graphs:
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


def plot(report: dict[str, Any], path: str) -> None:
    """Draw times over the floor for each token count. Raises MachineError where matplotlib is missing."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MachineError("--plot needs matplotlib: pip install '.[report]'") from error
    figure, axes = pyplot.subplots(1, len(ROUTINGS), figsize=(11, 4.5), sharey=True)
    for axis, routing in zip(axes, ROUTINGS, strict=True):
        rows = [row for row in report["rows"] if row["routing"] == routing and not row["use_atomic_add"]]
        counts = [row["tokens"] for row in rows]
        for key, label, style in (
            ("floor_ms", "floor: weights over memory bandwidth", "k--"),
            ("w13_ms", "w13", "o-"),
            ("w2_ms", "w2", "s-"),
            ("fused_ms", "w13, silu, w2, sum", "^-"),
        ):
            axis.plot(counts, [row[key] for row in rows], style, label=label)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=f"{routing} routing")
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.grid(True, which="both", alpha=0.3)
    axes[0].set_ylabel("ms")
    axes[0].legend()
    where = report["environment"]["gpu"] or "CPU model of the kernel (times mean nothing)"
    what = (
        f"layer {report['layer']}, rank {report['rank']}, tp {report['tp']}, ep {report['ep']}:"
        f" {report['local_experts']} experts"
    )
    figure.suptitle(f"{what}, {where}")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
