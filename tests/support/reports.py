"""Reports of the size of the whole Kimi-K2.6, made up."""

from __future__ import annotations

import numpy as np

from marlin_convert.checks.findings import Finding, Verification
from marlin_convert.checks.kernel.kernel_report import KernelReport, Verdict
from marlin_convert.checks.units import UnitVerification
from marlin_convert.checks.values import Counted
from marlin_convert.documents.checks import FusedVerdict
from marlin_convert.documents.identity import FileIdentity
from marlin_convert.documents.manifest import (
    ListedFile,
    Manifest,
    ManifestSource,
    Origin,
    Parallel,
    Shard,
    StoredLayout,
    StoredTensor,
    Unit,
)

LAYERS, EXPERTS = 61, 384
ZERO = "0" * 32


def path(rank: int, layer: int, tp: int = 8) -> str:
    """Where a layer's shard lies."""
    return f"rank-{rank:02d}-of-{tp:02d}/layer-{layer:03d}.safetensors"


def manifest(tp: int = 8, ranks: range | None = None, layers: range = range(LAYERS)) -> Manifest:
    """Of tp ranks: all or some."""
    here = range(tp) if ranks is None else ranks
    whole = here == range(tp) and layers == range(LAYERS)
    names = [f"layer-{layer:03d}" for layer in layers] + (["top", "common"] if whole else [])
    shards = [_shard(f"rank-{r:02d}-of-{tp:02d}", n, r) for n in names if n != "common" for r in here]
    units = (Unit(n, int(n[6:]) if n[6:].isdecimal() else None, (_origin(n),), ()) for n in names)
    return Manifest(
        format="marlin-convert",
        format_version=1,
        digest=ZERO,
        layout=StoredLayout("moe_wna16_marlin.u4b8", 4, 32, True),
        checks="exact",
        source=ManifestSource(
            id=ZERO,
            tensors=208550,
            payload_bytes=595148192736,
            files=(FileIdentity("model-00001-of-000064.safetensors", 1 << 30, ZERO, ZERO),),
            config=ZERO,
            quantization_config_at="text_config",
            not_copied=(),
        ),
        parallel=Parallel(tp, 1, tp, ZERO, None),
        ranks=tuple(here),
        layers=tuple(layers),
        complete=whole,
        model={"hidden_size": 7168, "num_hidden_layers": LAYERS, "softmax_scale": 0.1},
        units=tuple(units),
        shards=(*shards, *([_shard("common", "common", None)] if whole else [])),
        files=(ListedFile("config.json", 4096, ZERO),),
    )


def _origin(unit: str) -> Origin:
    return Origin(
        unit, "replicate" if unit in ("layer-000", "top", "common") else "experts", None, None, (unit,)
    )


def _shard(folder: str, unit: str, rank: int | None) -> Shard:
    size = 1_226_059_776
    tensor = StoredTensor(unit, "I32", (1,), 4096, size - 8192, ZERO)
    return Shard(f"{folder}/{unit}.safetensors", unit, rank, size, ZERO, ZERO, (tensor,), ())


def verification(
    of: Manifest, *findings: Finding, unread: int | None = None, ranks: range | None = None
) -> Verification:
    """What `verify` would say of it, of some ranks or all; nothing of layer `unread` was read."""
    report = Verification(files=len(of.shards) + 10)
    report.seconds = {"documents and headers": 2.5, "tensors": 2950.0, "total": 2952.5}
    for unit in of.units:
        shards = [s for s in of.shards if s.unit == unit.name and (ranks is None or s.rank in (None, *ranks))]
        part = UnitVerification(whole=report, unit=unit, shards=shards)
        if unit.layer == unread and unread is not None:
            part.read = False
            part.count(unproven=3470)
            continue
        part.count(size=sum(shard.size for shard in part.shards), proven=3470)
        part.busy = 90.0 + (unit.layer or 0) % 7
        if unit.tensors[0].rule == "experts":
            part.count_values(_values(unit.layer or 0))
    report.add(*findings)
    return report


def _values(layer: int) -> dict[str, Counted]:
    random = np.random.default_rng(layer)
    made = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        counted = Counted()
        codes = np.clip(np.round(random.normal(8, 2.6, 20000)), 0, 15).astype(np.int64)
        counted.bytes += np.bincount(codes[::2] + 16 * codes[1::2], minlength=256) * 1000
        scales = random.lognormal(-5.2, 0.35, 2000).astype(np.float32).view(np.uint32) >> 21
        counted.scales += np.bincount(scales.astype(np.int64), minlength=2048) * 500
        made[name] = counted
    return made


def kernel(
    of: Manifest, *findings: Finding, experts: range = range(EXPERTS), model: bool = False
) -> KernelReport:
    """What `verify --kernel` would say of it."""
    gpu = {} if model else {"gpu": "NVIDIA H200", "capability": "9.0", "cuda": "13.0"}
    named = "reference" if model else "sglang"
    report = KernelReport(
        model=model,
        environment={
            "provider": named,
            "torch": "2.13.0",
            "layout": of.layout_id,
            "source": ZERO,
            "tp": of.tp,
            "ep": of.ep,
            **gpu,
        },
        findings=list(findings),
        weights_read_back=1_014_686_023_680,
        seconds={"one-hot": 2000.0, "total": 3000.0},
    )
    bad = {(f.layer, f.expert, f.rank) for f in findings}
    for layer in of.layers[1:]:
        report.layer_seconds[layer] = 50.0
        errors = np.random.default_rng(layer).normal(0.00166, 0.00003, (of.tp, len(experts), 2))
        for rank in of.ranks:
            for at, expert in enumerate(experts):
                for which, projection in enumerate(("w13", "w2")):
                    wrong = (layer, expert, rank) in bad and which == 0
                    error = 0.21 if wrong else float(errors[rank, at, which])
                    report.verdicts.append(
                        Verdict(layer, rank, expert, projection, 28 * wrong, error, error * 3, not wrong)
                    )
        report.fused += [FusedVerdict(layer, n, 0.0021, 5 * 2.0**-9, True) for n in (1, 9, 90, 330)]
    return report
