"""`bench layout`: GB/s a core of the layout functions, against memcpy and hashing in the same run.

`repack and check` is what a conversion runs: words and scales of a batch repacked, inverted and compared,
part by part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from marlin_convert.documents.bench import LayoutBench, LayoutRow
from marlin_convert.layout import marlin
from marlin_convert.layout.batch import MarlinBatch, Move
from marlin_convert.layout.rows import RowView
from marlin_convert.storage.buffers import aligned_buffer
from marlin_convert.storage.files import digest

#: [out, in] of the slices that one rank of eight gets, and of the whole matrices
SHAPES = {
    "w13 slice (tp 8)": (256, 7168),
    "w2 slice (tp 8)": (7168, 256),
    "gate, whole": (2048, 7168),
    "down, whole": (7168, 2048),
}
GROUP = 32


def bench_layout(rounds: int) -> LayoutBench:
    """Run each function over random bytes on one core, in the cache and streaming from memory. Returns the
    report.
    """
    rows = (
        row
        for hot in (True, False)
        for name, (n, k) in SHAPES.items()
        for row in _shape(name, n, k, rounds, hot)
    )
    return LayoutBench(rounds, tuple(rows))


def _shape(name: str, n: int, k: int, rounds: int, hot: bool) -> list[LayoutRow]:
    """One shape: the same matrix again and again (`hot`), or 96 MB of them one after the other."""
    count = max((96 << 20) // (n * k // 2), 1)
    rng = np.random.default_rng(0)
    packed = _matrices(count, (n, k // 8), np.int32, rng)
    words = _matrices(count, (k // 16, 2 * n), np.int32, None)
    scale = _matrices(count, (n, k // GROUP), np.uint16, rng)
    marlin_scale = _matrices(count, (k // GROUP, n), np.uint16, None)
    rows = list(
        zip(
            _rows(packed, np.uint64),
            _rows(words, np.uint64),
            _rows(scale, np.uint16),
            _rows(marlin_scale, np.uint16),
            strict=True,
        )
    )
    weights = [Move(i, name, p, w, k) for i, (p, w, _, _) in enumerate(rows)]
    batch = MarlinBatch(weights, [Move(i, name, s, m, k) for i, (_, _, s, m) in enumerate(rows)], GROUP)
    weight_bytes, scale_bytes = count * n * k // 2, count * n * k // GROUP * 2
    jobs: list[tuple[str, int, Callable[..., object], list[tuple[Any, ...]]]] = [
        ("repack", weight_bytes, marlin.pack_weight_view, [(p, w) for p, w, _, _ in rows]),
        ("inverse and compare", weight_bytes, marlin.weight_differs, [(w, p) for p, w, _, _ in rows]),
        ("scales", scale_bytes, marlin.pack_scale_view, [(s, m, GROUP, k) for _, _, s, m in rows]),
        (
            "scales, inverse and compare",
            scale_bytes,
            marlin.scale_differs,
            [(m, s, GROUP, k) for _, _, s, m in rows],
        ),
        ("xxh3-128", weight_bytes, digest, [(p,) for p in packed]),
        ("inverse", weight_bytes, marlin.unpack_weight_view, [(w, p) for p, w, _, _ in rows]),
        ("repack and check", weight_bytes + scale_bytes, batch.pack, [(True,)]),
        (
            "memcpy",
            weight_bytes,
            np.copyto,
            [(w.reshape(-1), p.reshape(-1)) for p, w in zip(packed, words, strict=True)],
        ),
    ]
    results = []
    for job, size, run, calls in jobs:
        if hot and job == "repack and check":
            continue  # a batch does not fit the cache
        seconds = []
        for _ in range(rounds + 1):  # the first warms up
            begin = time.perf_counter()
            for i in range(len(calls)):
                run(*calls[0 if hot else i])
            seconds.append(time.perf_counter() - begin)
        seconds = seconds[1:]
        median, best = (size / one / 1e9 for one in (statistics.median(seconds), min(seconds)))
        results.append(LayoutRow(name, "in cache" if hot else "streaming", job, median, best))
    return results


def _rows(matrices: np.ndarray[Any, Any], dtype: type[np.generic]) -> list[RowView]:
    """Each of them in the memory they share, as elements of `dtype`."""
    flat, (count, rows, _) = matrices.reshape(-1).view(dtype), matrices.shape
    cols = flat.size // (count * rows)
    return [RowView(flat, i * rows * cols, cols, rows, cols) for i in range(count)]


def _matrices(
    count: int, shape: tuple[int, int], dtype: type[np.generic], rng: np.random.Generator | None
) -> np.ndarray[Any, Any]:
    """Matrices side by side in one buffer, as a batch of experts is."""
    size = count * shape[0] * shape[1] * np.dtype(dtype).itemsize
    buffer = aligned_buffer(size)
    buffer[:] = rng.integers(0, 256, size, np.uint8) if rng is not None else 0
    return buffer.view(dtype).reshape(count, *shape)
