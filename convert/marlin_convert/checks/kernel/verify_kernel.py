"""`verify --kernel`: the layers of a converted folder, one after the other.

This module loads without torch; what it calls needs it and says so where it is missing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from marlin_convert.arguments import refuse_odd
from marlin_convert.checks.kernel.kernel_report import KernelReport
from marlin_convert.checks.kernel.layer_files import (
    LayerFiles,
    Originals,
    originals_from_source,
    originals_restored,
)
from marlin_convert.checks.kernel.scope import CheckScope, expert_units
from marlin_convert.checks.published import open_same
from marlin_convert.checks.split import Split
from marlin_convert.documents.manifest import Manifest, Unit, read_manifest
from marlin_convert.errors import MachineError, UsageError
from marlin_convert.extras import require_for_kernel
from marlin_convert.kernels import TOKENS
from marlin_convert.kernels.providers import Provider, environment, load_for
from marlin_convert.kernels.quant_types import need_kernel_type
from marlin_convert.layout import get_layout
from marlin_convert.models.family import ModelConfig
from marlin_convert.progress import Progress, Tally
from marlin_convert.shards.kept_source import read_kept_source
from marlin_convert.shards.reader import Shards, open_shards


def verify_kernel(
    out: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    *,
    layers: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    experts: Sequence[int] | None = None,
    sample: int | None = None,
    tokens: Sequence[int] = TOKENS,
    device: str = "cuda",
    provider: str | None = None,
    progress: Progress | None = None,
) -> KernelReport:
    """Run the Marlin MoE kernel on converted shards against the dequantized originals.

    One-hot activations make the kernel read back every weight (all experts, or `experts`, or `sample` of
    them), compared bit for bit; random ones give each expert's error, and for `tokens` the fused MoE over all
    ranks. `device` "cpu" means the reference provider. Originals come from `source`, else are restored from
    all ranks' shards.

    Raises UsageError for a scope that is not there, a layout that the kernel does not read and where torch is
    not installed, MachineError where no kernel loads, SourceError for another source, OutputError.
    """
    lists = {"layers": layers, "ranks": ranks, "experts": experts, "tokens": tokens}
    refuse_odd(sample=sample, lists=lists, places={"out": out, "source": source})
    require_for_kernel(device)
    folder, manifest = Path(out), read_manifest(Path(out))
    need_kernel_type(manifest.layout_id)
    refuse_known_wrong(manifest)
    chosen = load_for(device, provider)
    opened = None if source is None else open_same(os.fspath(source), manifest)
    kept = read_kept_source(folder, manifest)
    model = kept.model
    ran: dict[str, Any] = {
        **environment(chosen, device),
        "layout": manifest.layout_id,
        "source": manifest.source_id,
        "tp": manifest.tp,
        "ep": manifest.ep,
    }
    report = KernelReport(model=chosen.device == "cpu", environment=ran)
    scope = CheckScope.of(manifest, model, ranks, experts, sample, tokens)
    units = expert_units(manifest, layers)
    if opened is None and manifest.ranks != tuple(range(manifest.tp)):
        raise UsageError(
            "not all ranks are in this folder, so the originals cannot be restored from it; give --source"
        )
    shards = {
        rank: open_shards(folder, rank, manifest)
        for rank in (manifest.ranks if opened is None else scope.ranks)
    }
    steps, size = scope.steps(manifest, Split.of(manifest.parallel, model), units)
    stage = "running the kernel's model" if report.model else "running the kernel"
    tally = Tally(stage, steps * size, [unit.name for unit in units], progress)
    for unit in units:
        tally.count(unit.name)
        report.step = partial(tally.count, unit.name, size)
        files = manifest_files(shards, manifest, unit, model)
        originals = (
            originals_from_source(opened, files)
            if opened is not None
            else originals_restored(files, kept.digests, report.findings.append)
        )
        check_layer(files, originals, chosen, device, scope, report)
    return report


def check_layer(
    files: LayerFiles,
    originals: Originals,
    provider: Provider,
    device: str,
    scope: CheckScope,
    report: KernelReport,
) -> None:
    """Check one layer into `report`."""
    import torch

    from marlin_convert.checks.kernel.layer_check import LayerCheck

    begin = time.perf_counter()
    try:
        with torch.inference_mode():
            LayerCheck(files, originals, provider, torch.device(device), scope, report).run()
    except torch.OutOfMemoryError as error:
        raise MachineError(
            f"the GPU has too little memory for a layer's shards ({error}); give fewer --ranks, or --tokens 0"
        ) from error
    report.layer_seconds[files.layer] = time.perf_counter() - begin
    report.seconds["total"] = sum(report.layer_seconds.values())


def refuse_known_wrong(manifest: Manifest) -> None:
    """Raise UsageError for a weight type that the kernel itself gets wrong, so that no one takes its error
    for ours.
    """
    layout = manifest.layout
    if not layout.symmetric and layout.num_bits == 4 and layout.group_size == 32:
        raise UsageError(
            "the kernel of sglang 0.5.12 to 0.5.23 computes asymmetric 4 bit at group 32 wrongly; there is"
            " nothing to check against"
        )


def manifest_files(
    shards: Mapping[int, Shards], manifest: Manifest, unit: Unit, model: ModelConfig
) -> LayerFiles:
    """A layer of a finished folder, as an engine would open it."""
    paths = {shard.rank: shard.path for shard in manifest.shards if shard.unit == unit.name}
    prefix = next(origin.tensor for origin in unit.tensors if origin.rule == "experts").rpartition(".")[0]
    split = Split.of(manifest.parallel, model)
    return LayerFiles(
        layer=unit.layer or 0,
        prefix=prefix,
        layout=get_layout(manifest.layout_id),
        shape=model.expert_shape(split.moe_tp),
        split=split,
        placed=split.placed(unit),
        stored=lambda rank, name, begin, count: shards[rank].read(name, begin, count),
        path=lambda rank: paths[rank],
    )
