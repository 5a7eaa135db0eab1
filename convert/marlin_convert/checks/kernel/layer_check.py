"""The check of one layer: the kernel reads back every weight, multiplies random activations, and runs the
whole routed MoE.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from marlin_convert.checks.kernel import dequantize
from marlin_convert.checks.kernel.dequantize import ExpertWeights, Pair
from marlin_convert.checks.kernel.fused_check import FusedCheck
from marlin_convert.checks.kernel.kernel_report import GEMM_TOLERANCE, KernelReport, Verdict
from marlin_convert.checks.kernel.layer_files import LayerFiles, Original, Originals
from marlin_convert.checks.kernel.odd_scales import OddScales, finite, stored_scales
from marlin_convert.checks.kernel.scope import CheckScope
from marlin_convert.checks.kernel.wrong_reads import Place, WrongReads, unpadded
from marlin_convert.kernels.fused_moe import align, make_workspace
from marlin_convert.kernels.gemm_call import GemmCall, Matrix
from marlin_convert.kernels.one_hot import read_back
from marlin_convert.kernels.providers import Provider
from marlin_convert.kernels.quant_types import need_kernel_type
from marlin_convert.storage.buffers import Bytes
from marlin_convert.threads import Workers

#: experts read and copied together
BATCH = 8
#: random rows that each expert gets in the GEMM checks
ROWS = 16


@dataclass
class LayerCheck:
    """Checks one layer with one provider."""

    files: LayerFiles
    originals: Originals
    provider: Provider
    device: torch.device
    scope: CheckScope
    report: KernelReport
    #: experts of the batch with a scale in the source that is not finite
    _odd: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._wrong = WrongReads(self.files, self.originals, self.report)

    def run(self) -> None:
        """Check all experts in scope; results go to the report."""
        fused = self._fused()
        with Workers(4) as readers:
            for slots, original, pieces in self._steps(readers):
                experts = self.files.experts(slots)
                with self._timed("dequantize"):
                    loaded = original.result()
                    weights = {e: ExpertWeights.load(loaded[i], self.device) for i, e in enumerate(experts)}
                    self._wrong.near = weights
                    self._odd = {e for e, raw in weights.items() if self._wrong.note_odd_source(e, raw)}
                if fused is not None:
                    with self._timed("fused reference"):
                        for expert, whole in weights.items():
                            fused.add_reference(expert, whole.finite() if expert in self._odd else whole)
                for rank, future in pieces.items():
                    with self._timed("read and copy"):
                        matrices = self._matrices(future.result(), len(experts))
                    self._check_rank(rank, experts, weights, matrices)
                    if fused is not None:
                        fused.keep(rank, slots, {name: _runnable(each) for name, each in matrices.items()})
        self._wrong.name_exchanged()
        if fused is not None:
            with self._timed("fused"):
                fused.compare(self.provider, self.report)

    def _fused(self) -> FusedCheck | None:
        if not self.scope.tokens:
            return None
        if self.scope.experts is not None or self.scope.ranks != tuple(range(self.files.split.tp)):
            self.report.skipped.append(
                f"layer {self.files.layer}: the fused MoE needs all ranks and all experts"
            )
            return None
        return FusedCheck(self.files, self.device, self.scope.tokens, self.scope.top_k)

    def _steps(
        self, readers: Workers
    ) -> Iterator[tuple[range, Future[list[Original]], dict[int, Future[dict[str, Bytes]]]]]:
        """Batches of slots of one owner, the next one's bytes being read while one is checked."""
        ahead: list[tuple[range, Future[list[Original]], dict[int, Future[dict[str, Bytes]]]]] = []
        for slots in self._batches():
            ranks = [rank for rank in self.scope.ranks if slots.start in self.files.split.held(rank)]
            if not ranks:
                continue
            futures = {rank: readers.submit(self.files.read, rank, slots) for rank in ranks}
            ahead.append((slots, readers.submit(self.originals, slots), futures))
            if len(ahead) == 2:
                yield ahead.pop(0)
        yield from ahead

    def _batches(self) -> Iterator[range]:
        """Runs of consecutive slots with experts in scope, never across owners."""
        split, placed = self.files.split, self.files.placed
        wanted = set(range(split.experts) if self.scope.experts is None else self.scope.experts)
        for first in range(0, split.count, split.local):
            run: list[int] = []
            for slot in range(first, first + split.local + 1):
                inside = slot < first + split.local and placed[slot] in wanted
                if inside:
                    run.append(slot)
                if run and (not inside or len(run) == BATCH):
                    yield range(run[0], run[-1] + 1)
                    run = []

    def _matrices(self, stored: dict[str, Bytes], count: int) -> dict[str, Matrix]:
        """w13 and w2 of a batch on the device."""
        tensors = {}
        for tensor in self.files.layout.stacked(self.files.shape):
            data = torch.from_numpy(stored[tensor.name]).to(self.device)
            tensors[tensor.name] = data.view(
                torch.int32 if tensor.dtype == "I32" else torch.bfloat16
            ).reshape(count, *tensor.shape)
        kind = need_kernel_type(self.files.layout.id)
        return {
            name: Matrix(tensors[f"{name}_weight_packed"], tensors[f"{name}_weight_scale"], kind)
            for name in ("w13", "w2")
        }

    def _check_rank(
        self,
        rank: int,
        experts: Sequence[int],
        weights: dict[int, ExpertWeights],
        matrices: dict[str, Matrix],
    ) -> None:
        for name, matrix in matrices.items():
            places = [Place(name, rank, expert) for expert in experts]
            odd = (~torch.isfinite(matrix.scales).flatten(1).all(1)).tolist()
            compared = [
                self._compare_scales(place, weights[place.expert], matrix.scales[i], odd[i])
                for i, place in enumerate(places)
            ]
            pairs = [pair for pair, _ in compared]
            expected = [self._expected(name, pair) for pair in pairs]
            run = _runnable(matrix)
            with self._timed("one-hot"):
                wrong = self._one_hot(places, pairs, expected, run)
            with self._timed("random"):
                errors = self._random(places, expected, run)
            for i, place in enumerate(places):
                self._wrong.samples.add(rank, name, place.expert, expected[i])
                relative, largest = errors[i]
                count = wrong[i] + compared[i][1] * self.files.shape.scheme.group_size
                good = not count and relative <= GEMM_TOLERANCE
                self.report.verdicts.append(
                    Verdict(self.files.layer, rank, place.expert, name, count, relative, largest, good)
                )
                self.report.step()
                if not (good or count):
                    what = (
                        f"random activations give a relative error of {relative:.2e}, more than"
                        f" {GEMM_TOLERANCE:.2e}"
                    )
                    self._wrong.add(place, what, name)

    def _compare_scales(
        self, place: Place, raw: ExpertWeights, stored: Tensor, odd: bool
    ) -> tuple[Pair, int]:
        """Codes and scales of the slice as the kernel must read them, and how many scales that are not finite
        are wrong. stored: bf16 [G, N], `odd` where some of them are not finite.
        """
        codes, source = self._wrong.pair(place.name, place.rank, raw)
        if not (odd or place.expert in self._odd):
            return (codes, source), 0
        shape, w13 = self.files.shape, place.name == "w13"
        padded, group = self.files.layout.padded(shape), shape.scheme.group_size
        whole = (
            dequantize.padded_w13(source, padded) if w13 else dequantize.padded_w2(source, padded // group)
        )
        found = stored_scales(stored)
        compared = OddScales.compare(found, whole)
        count = int(compared.differ.sum())
        if count:
            self._wrong.report_scales(place, compared.differ, found, whole)
        width = source.shape[0] // 2 if w13 else source.shape[1]
        return (codes, unpadded(compared.expected, place.name, width)), count

    def _expected(self, name: str, pair: Pair) -> Tensor:
        """bf16 [N, K] that the kernel must read, padding included."""
        padded = self.files.layout.padded(self.files.shape)
        matrix = dequantize.weight(*pair)
        return (
            dequantize.padded_w13(matrix, padded) if name == "w13" else dequantize.padded_w2(matrix, padded)
        )

    def _one_hot(
        self, places: Sequence[Place], pairs: Sequence[Pair], expected: Sequence[Tensor], matrix: Matrix
    ) -> list[int]:
        """How many weights of each expert the kernel reads differently; findings for those."""
        counts: list[Tensor] = []
        seen = {}
        for start, read in read_back(self.provider, matrix):
            for i in range(read.shape[0]):
                counts.append((read[i].t() != expected[start + i]).sum())
                if self.device.type == "cpu":
                    seen[start + i] = read[i].t()
        self.report.weights_read_back += sum(want.numel() for want in expected)
        wrong = [int(count) for count in torch.stack(counts).tolist()]  # the only wait for the device
        for i, count in enumerate(wrong):
            if count:
                read_again = seen.get(i)
                if read_again is None:
                    read_again = next(read_back(self.provider, matrix[i : i + 1]))[1][0].t()
                codes, scale = pairs[i]
                width = scale.shape[0] // 2 if places[i].name == "w13" else scale.shape[1]
                stored = unpadded(stored_scales(matrix.scales[i]), places[i].name, width)
                self._wrong.report_weights(places[i], read_again, expected[i], (codes, scale), stored)
        return wrong

    def _random(
        self, places: Sequence[Place], expected: Sequence[Tensor], matrix: Matrix
    ) -> list[tuple[float, float]]:
        """Relative error (norm) and largest absolute error of each expert for `ROWS` random rows each."""
        generator = torch.Generator().manual_seed(places[0].rank * 1_000_003 + places[0].expert)
        x = torch.randn((ROWS, matrix.size_k), generator=generator).to(self.device, torch.bfloat16)
        ids = torch.arange(len(places), device=self.device).expand(ROWS, len(places))
        alignment, workspace = align(ids, len(places), 16), make_workspace(self.device)
        out = self.provider.gemm(GemmCall(x, matrix, alignment, workspace, top_k=len(places)))
        out = out.reshape(ROWS, len(places), -1)
        errors = []
        for i, matrix_of in enumerate(expected):
            want = x.float() @ matrix_of.float().t()
            difference = out[:, i].float() - want
            norm = want.norm().clamp_min(1e-30)
            errors.append(torch.stack((difference.norm() / norm, difference.abs().max())))
        return [(float(relative), float(largest)) for relative, largest in torch.stack(errors).tolist()]

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.report.seconds[stage] = self.report.seconds.get(stage, 0.0) + time.perf_counter() - begin


def _runnable(matrix: Matrix) -> Matrix:
    """With finite scales."""
    return replace(matrix, scales=finite(matrix.scales))
