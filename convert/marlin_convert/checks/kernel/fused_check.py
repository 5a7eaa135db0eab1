"""The routed MoE of a layer, summed over all ranks, against the unsharded MoE of the originals in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from marlin_convert.checks.findings import Finding
from marlin_convert.checks.kernel.dequantize import ExpertWeights
from marlin_convert.checks.kernel.kernel_report import KernelReport
from marlin_convert.checks.kernel.layer_files import LayerFiles
from marlin_convert.documents.checks import FusedVerdict
from marlin_convert.kernels.fused_moe import (
    Experts,
    Routing,
    contiguous_expert_map,
    fused_moe,
    make_workspace,
    route,
)
from marlin_convert.kernels.gemm_call import Matrix
from marlin_convert.kernels.providers import Provider

#: Five roundings to bf16 lie between x and the result (w13, silu * up, w2, a rank's sum, and the two factors
#: of silu * up count twice): 5 * 2^-9.
FUSED_TOLERANCE = 5 * 2.0**-9


class FusedCheck:
    """Gathers the reference expert by expert and each rank's tensors as they pass, then runs all ranks."""

    def __init__(self, files: LayerFiles, device: torch.device, tokens: tuple[int, ...], top_k: int) -> None:
        self._files = files
        self._device = device
        generator = torch.Generator().manual_seed(files.layer)
        self._inputs: dict[int, tuple[Tensor, Routing]] = {}
        self._reference: dict[int, Tensor] = {}
        for count in tokens:
            x = torch.randn((count, files.shape.hidden), generator=generator).to(device, torch.bfloat16)
            logits = torch.randn((count, files.split.experts), generator=generator)
            routing = route(logits, torch.zeros(files.split.experts), top_k)
            self._inputs[count] = (x, Routing(routing.weights.to(device), routing.ids.to(device)))
            self._reference[count] = torch.zeros((count, files.shape.hidden), device=device)
        self._kept: dict[int, dict[str, Matrix]] = {}
        self._added: set[int] = set()
        self._copies: dict[int, list[int]] = {}
        for slot, expert in enumerate(files.placed):
            self._copies.setdefault(expert, []).append(slot)

    def add_reference(self, expert: int, whole: ExpertWeights) -> None:
        """Add an expert's share of the unsharded result, in float32; once, in however many slots it is."""
        if expert in self._added:
            return
        self._added.add(expert)
        gate, up, down = (
            whole.whole(projection).float() for projection in ("gate_proj", "up_proj", "down_proj")
        )
        for count, (x, routing) in self._inputs.items():
            tokens, choices = (routing.ids == expert).nonzero(as_tuple=True)
            if tokens.numel():
                rows = x[tokens].float()
                inner = torch.nn.functional.silu(rows @ gate.t()) * (rows @ up.t())
                self._reference[count].index_add_(
                    0, tokens, (inner @ down.t()) * routing.weights[tokens, choices].unsqueeze(1)
                )

    def keep(self, rank: int, slots: range, matrices: dict[str, Matrix]) -> None:
        """Keep a batch of a rank's tensors on the device until all are there."""
        owned = self._files.split.held(rank)
        kept = self._kept.setdefault(rank, {})
        for name, matrix in matrices.items():
            if name not in kept:
                kept[name] = matrix.map(lambda tensor: tensor.new_empty((len(owned), *tensor.shape[1:])))
            part = kept[name][slots.start - owned.start : slots.stop - owned.start]
            part.qweight.copy_(matrix.qweight)
            part.scales.copy_(matrix.scales)

    def compare(self, provider: Provider, report: KernelReport) -> None:
        """Run every rank's experts for each number of tokens and compare the sum over ranks."""
        workspace = make_workspace(self._device)
        ranks = [self._experts(rank, kept) for rank, kept in self._kept.items()]
        for count, (x, routing) in self._inputs.items():
            total = torch.zeros_like(self._reference[count])
            dispatched = Routing(routing.weights, self._slots(routing.ids))
            for experts in ranks:
                total += fused_moe(provider, x, experts, dispatched, workspace=workspace).float()
            reference = self._reference[count]
            error = float((total - reference).norm() / reference.norm().clamp_min(1e-30))
            ok = error <= FUSED_TOLERANCE
            report.fused.append(FusedVerdict(self._files.layer, count, error, FUSED_TOLERANCE, ok))
            if not ok:
                what = (
                    f"the fused MoE over all ranks has a relative error of {error:.2e} at {count} tokens,"
                    f" more than {FUSED_TOLERANCE:.2e}"
                )
                report.findings.append(Finding(f"layer-{self._files.layer:03d}", what, self._files.layer))

    def _slots(self, ids: Tensor) -> Tensor:
        """The slots that tokens go to: of an expert in several, each takes its turn."""
        if self._files.split.slots is None:
            return ids
        dispatched = ids.clone()
        for expert, slots in self._copies.items():
            chosen = (ids == expert).nonzero()
            for turn, slot in enumerate(slots):
                tokens, choices = chosen[turn :: len(slots)].unbind(1)
                dispatched[tokens, choices] = slot
        return dispatched

    def _experts(self, rank: int, kept: dict[str, Matrix]) -> Experts:
        owned, count = self._files.split.held(rank), self._files.split.count
        whole = len(owned) == count
        expert_map = None if whole else contiguous_expert_map(count, owned.start, owned.stop, self._device)
        return Experts(kept["w13"], kept["w2"], expert_map)
