"""The check of one layer: the kernel reads back every weight, multiplies random activations, and runs the
whole routed MoE.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from marlin_convert.checks.findings import Finding
from marlin_convert.checks.kernel import dequantize
from marlin_convert.checks.kernel.dequantize import ExpertWeights, Pair
from marlin_convert.checks.kernel.diagnose import diagnose
from marlin_convert.checks.kernel.fused_check import FusedCheck
from marlin_convert.checks.kernel.kernel_report import GEMM_TOLERANCE, KernelReport, Verdict
from marlin_convert.checks.kernel.layer_files import LayerFiles, Original, Originals
from marlin_convert.checks.kernel.scope import CheckScope
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
    _near: dict[int, ExpertWeights] = field(default_factory=dict)

    def run(self) -> None:
        """Check all experts in scope; results go to the report."""
        fused = self._fused()
        with Workers(4) as readers:
            for experts, original, pieces in self._steps(readers):
                with self._timed("dequantize"):
                    loaded = original.result()
                    weights = {e: ExpertWeights.load(loaded[i], self.device) for i, e in enumerate(experts)}
                    self._near = weights
                if fused is not None:
                    with self._timed("fused reference"):
                        for expert, whole in weights.items():
                            fused.add_reference(expert, whole)
                for rank, future in pieces.items():
                    with self._timed("read and copy"):
                        matrices = self._matrices(future.result(), len(experts))
                    self._check_rank(rank, experts, weights, matrices)
                    if fused is not None:
                        fused.keep(rank, experts, matrices)
        if fused is not None:
            with self._timed("fused"):
                fused.compare(self.provider, self.report)

    def _fused(self) -> FusedCheck | None:
        if not self.scope.tokens:
            return None
        if self.scope.experts is not None or self.scope.ranks != tuple(range(self.files.tp)):
            self.report.skipped.append(
                f"layer {self.files.layer}: the fused MoE needs all ranks and all experts"
            )
            return None
        return FusedCheck(self.files, self.device, self.scope.tokens, self.scope.top_k)

    def _steps(
        self, readers: Workers
    ) -> Iterator[tuple[range, Future[list[Original]], dict[int, Future[dict[str, Bytes]]]]]:
        """Batches of experts of one owner, the next one's bytes being read while one is checked."""
        ahead: list[tuple[range, Future[list[Original]], dict[int, Future[dict[str, Bytes]]]]] = []
        for experts in self._batches():
            ranks = [rank for rank in self.scope.ranks if experts.start in self.files.owned(rank)]
            if not ranks:
                continue
            futures = {rank: readers.submit(self.files.read, rank, experts) for rank in ranks}
            ahead.append((experts, readers.submit(self.originals, experts), futures))
            if len(ahead) == 2:
                yield ahead.pop(0)
        yield from ahead

    def _batches(self) -> Iterator[range]:
        """Runs of consecutive experts in scope, never across owners."""
        wanted = set(range(self.files.experts) if self.scope.experts is None else self.scope.experts)
        local = self.files.experts // self.files.ep
        for first in range(0, self.files.experts, local):
            run: list[int] = []
            for expert in range(first, first + local + 1):
                inside = expert in wanted and expert < first + local
                if inside:
                    run.append(expert)
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
        self, rank: int, experts: range, weights: dict[int, ExpertWeights], matrices: dict[str, Matrix]
    ) -> None:
        for name, matrix in matrices.items():
            expected = {expert: self._expected(name, rank, whole) for expert, whole in weights.items()}
            with self._timed("one-hot"):
                wrong = self._one_hot(name, rank, experts, expected, matrix)
            with self._timed("random"):
                errors = self._random(name, rank, experts, expected, matrix)
            for i, expert in enumerate(experts):
                relative, largest = errors[i]
                good = not wrong[i] and relative <= GEMM_TOLERANCE
                self.report.verdicts.append(
                    Verdict(self.files.layer, rank, expert, name, wrong[i], relative, largest, good)
                )
                self.report.step()
                if not (good or wrong[i]):
                    what = (
                        f"{name}: random activations give a relative error of {relative:.2e}, more than"
                        f" {GEMM_TOLERANCE:.2e}"
                    )
                    self.report.findings.append(self._finding(what, expert, name, rank))

    def _pair(self, name: str, rank: int, whole: ExpertWeights) -> Pair:
        index = rank % self.files.moe_tp
        return whole.w13(index, self.files.moe_tp) if name == "w13" else whole.w2(index, self.files.moe_tp)

    def _expected(self, name: str, rank: int, whole: ExpertWeights) -> Tensor:
        """bf16 [N, K] that the kernel must read, padding included."""
        padded = self.files.layout.padded(self.files.shape)
        matrix = dequantize.weight(*self._pair(name, rank, whole))
        return (
            dequantize.padded_w13(matrix, padded) if name == "w13" else dequantize.padded_w2(matrix, padded)
        )

    def _one_hot(
        self, name: str, rank: int, experts: range, expected: dict[int, Tensor], matrix: Matrix
    ) -> list[int]:
        """How many weights of each expert the kernel reads differently; findings for those."""
        counts: list[Tensor] = []
        seen = {}
        for start, read in read_back(self.provider, matrix):
            for i in range(read.shape[0]):
                want = expected[experts[start + i]]
                counts.append((read[i].t() != want).sum())
                if self.device.type == "cpu":
                    seen[start + i] = read[i].t()
        self.report.weights_read_back += sum(want.numel() for want in expected.values())
        wrong = [int(count) for count in torch.stack(counts).tolist()]  # the only wait for the device
        for i, count in enumerate(wrong):
            if count:
                read_again = seen.get(i)
                if read_again is None:
                    read_again = next(read_back(self.provider, matrix[i : i + 1]))[1][0].t()
                self._report_wrong(name, rank, experts[i], read_again, expected[experts[i]], count)
        return wrong

    def _report_wrong(
        self, name: str, rank: int, expert: int, read: Tensor, want: Tensor, count: int
    ) -> None:
        at = int((read != want).reshape(-1).int().argmax())
        n, k = divmod(at, want.shape[1])
        projection, row = name, n
        if name == "w13":
            half = want.shape[0] // 2
            projection, row = ("gate_proj", n) if n < half else ("up_proj", n - half)
        elif name == "w2":
            projection = "down_proj"
        pair = self._pair(name, rank, self._near[expert])
        local = self.files.shape.local
        true = read if local == self.files.layout.padded(self.files.shape) else _unpadded(read, name, local)
        looks = diagnose(true, pair, name, lambda: self._others(name, rank, expert))
        what = (
            f"{name}: {self.report.reader} reads {count} of {want.numel()} weights differently, the first at"
            f" row {row} of the slice, input {k}: {read[n, k].item():g} where the original is"
            f" {want[n, k].item():g}" + (f"; it looks as if {looks}" if looks else "")
        )
        self.report.findings.append(self._finding(what, expert, projection, rank))

    def _others(self, name: str, rank: int, expert: int) -> Iterator[tuple[str, Pair]]:
        """What else a matrix might be: another rank's slice, or another expert of the batch."""
        moe_tp = self.files.moe_tp
        for index in range(moe_tp):
            if index != rank % moe_tp:
                yield (
                    f"the slice of rank {rank - rank % moe_tp + index}",
                    self._pair(name, index, self._near[expert]),
                )
        for other, whole in self._near.items():
            if other != expert:
                yield f"expert {other}", self._pair(name, rank, whole)
        for other in (expert - 1, expert + 1):
            if other in self.files.owned(rank) and other not in self._near:
                original = self.originals(range(other, other + 1))[0]
                yield f"expert {other}", self._pair(name, rank, ExpertWeights.load(original, self.device))

    def _random(
        self, name: str, rank: int, experts: range, expected: dict[int, Tensor], matrix: Matrix
    ) -> list[tuple[float, float]]:
        """Relative error (norm) and largest absolute error of each expert for `ROWS` random rows each."""
        generator = torch.Generator().manual_seed(rank * 1_000_003 + experts.start)
        x = torch.randn((ROWS, matrix.size_k), generator=generator).to(self.device, torch.bfloat16)
        ids = torch.arange(len(experts), device=self.device).expand(ROWS, len(experts))
        alignment, workspace = align(ids, len(experts), 16), make_workspace(self.device)
        out = self.provider.gemm(GemmCall(x, matrix, alignment, workspace, top_k=len(experts)))
        out = out.reshape(ROWS, len(experts), -1)
        errors = []
        for i, expert in enumerate(experts):
            want = x.float() @ expected[expert].float().t()
            difference = out[:, i].float() - want
            norm = want.norm().clamp_min(1e-30)
            errors.append(torch.stack((difference.norm() / norm, difference.abs().max())))
        return [(float(relative), float(largest)) for relative, largest in torch.stack(errors).tolist()]

    def _finding(self, what: str, expert: int, projection: str, rank: int) -> Finding:
        return Finding(self.files.path(rank), what, self.files.layer, expert, projection, rank)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.report.seconds[stage] = self.report.seconds.get(stage, 0.0) + time.perf_counter() - begin


def _unpadded(read: Tensor, name: str, local: int) -> Tensor:
    if name == "w2":
        return read[:, :local]
    padded = read.shape[0] // 2
    return torch.cat((read[:local], read[padded : padded + local]))
