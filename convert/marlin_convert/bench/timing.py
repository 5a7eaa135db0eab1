"""How long a GPU takes: CUDA graphs of several runs, replayed between events. On a CPU, wall time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from marlin_convert.bench.stats import Summary, summarize

PROBE_BYTES = {"cuda": 4 << 30, "cpu": 32 << 20}


@dataclass(frozen=True)
class Timer:
    """Times runs on a device, `rounds` times each."""

    device: torch.device
    rounds: int

    @property
    def graphs(self) -> bool:
        """Whether runs are captured in CUDA graphs."""
        return self.device.type == "cuda"

    def milliseconds(self, runs: Sequence[Callable[[], object]]) -> Summary:
        """Of one run: all of them after one another, once a round, over their number."""
        return summarize([seconds * 1e3 for seconds in self._seconds(runs)])

    def memory_bandwidth(self) -> Summary:
        """Bytes a second of the device's memory: the better of a large copy (read and written together) and
        of a large reduction (read only).

        The kernel only reads its weights, and a copy alone can come out below what it reads them with.
        """
        size = PROBE_BYTES[self.device.type]
        source = torch.zeros(size // 4, dtype=torch.float32, device=self.device)
        target = torch.empty_like(source)
        copies = summarize([2 * size / one for one in self._alone(lambda: target.copy_(source))])
        reads = summarize([size / one for one in self._alone(lambda: torch.sum(source))])
        return max(copies, reads, key=lambda summary: summary.median)

    def _alone(self, run: Callable[[], object]) -> list[float]:
        """Seconds of single launches: long enough here that no graph is needed."""
        if not self.graphs:
            return self._seconds([run])
        return [self._between_events(1, run)[0] for _ in range(12)][2:]

    def _seconds(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        if not self.graphs:
            seconds = []
            for _ in range(self.rounds):
                begin = time.perf_counter()
                for run in runs:
                    run()
                seconds.append((time.perf_counter() - begin) / len(runs))
            return seconds
        graph = self._capture(runs)
        for _ in range(3):
            graph.replay()
        return [seconds / len(runs) for seconds in self._between_events(self.rounds, graph.replay)]

    def _capture(self, runs: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
        stream: Callable[..., Any] = torch.cuda.Stream
        side = stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            runs[0]()  # compiles, and allocates what later calls share
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for run in runs:
                run()
        return graph

    def _between_events(self, rounds: int, run: Callable[[], object]) -> list[float]:
        """Seconds on the GPU of each of `rounds` runs, which are waited for together."""
        make: Callable[..., Any] = torch.cuda.Event
        events = [(make(enable_timing=True), make(enable_timing=True)) for _ in range(rounds)]
        for begin, end in events:
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in events]
