"""Everything that can be checked without reading tensor data: files, headers, identity, and each document
derived again from what it stands for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from marlin_convert.checkpoint.header import Header
from marlin_convert.checkpoint.quantization import rewritten
from marlin_convert.checkpoint.source import INDEX_NAME, Source
from marlin_convert.checkpoint.store import header_of
from marlin_convert.checks.origins import expected_origin
from marlin_convert.checks.report import Finding, Report
from marlin_convert.documents.codec import read, seal_holds, typed
from marlin_convert.documents.engine_files import (
    Index,
    IndexMetadata,
    QuantizationConfig,
    quantization_config,
)
from marlin_convert.documents.manifest import Manifest, Shard
from marlin_convert.errors import OutputError, SourceError
from marlin_convert.files import PAGE, digest, file_digest
from marlin_convert.shards.format import is_filler
from marlin_convert.shards.kept_source import ZEROS, KeptSource

UNLISTED = frozenset({"manifest.json", "provenance.json"})


def check_listed_files(out: Path, manifest: Manifest, report: Report) -> None:
    """Size and digest of every file beside the shards; nothing else lies in OUT; provenance.json is as it was
    written.
    """
    for file in manifest.files:
        try:
            size, value = file_digest(out / file.path)
        except OSError as error:
            report.add(Finding(file.path, f"cannot be read ({error.strerror})"))
            continue
        report.count(files=1, size=size)
        if (size, value) != (file.size, file.digest):
            report.add(
                Finding(
                    file.path,
                    f"{size} bytes with digest {value}, the manifest has {file.size} bytes with"
                    f" {file.digest}",
                )
            )
    known = {file.path for file in manifest.files} | {shard.path for shard in manifest.shards} | UNLISTED
    for folder, _, names in os.walk(out):
        for name in names:
            path = str((Path(folder) / name).relative_to(out))
            if (
                path not in known and path != ".gitattributes" and not path.startswith(".cache/huggingface/")
            ):  # which the hub's tools leave
                report.add(Finding(path, "is not in the manifest; move it away"))
    provenance = out / "provenance.json"
    if provenance.exists() and not seal_holds(provenance.read_bytes()):
        report.add(Finding("provenance.json", "its bytes do not match its own digest"))


def check_documents(manifest: Manifest, kept: KeptSource, out: Path, report: Report) -> None:
    """config.json, source id, indexes, origins: derived again and compared."""
    own = {file.path: file for file in manifest.files}
    identity = manifest.source.identity
    if identity.id != manifest.source_id or identity.config != xxhash.xxh3_128_hexdigest(kept.config_bytes):
        report.add(
            Finding("manifest.json", "source.id or source.config is not what the listed source files give")
        )
    for header, file in zip(kept.headers, identity.files, strict=True):
        if file.header != xxhash.xxh3_128_hexdigest(header.raw):
            report.add(
                Finding(f"source/headers/{header.file}.gz", "is not the header whose digest the manifest has")
            )
    if "config.json" not in own or not _is_rewritten(out / "config.json", manifest, kept):
        report.add(Finding("config.json", "is not the source's with the quantization_config of this format"))
    for unit in manifest.units:
        for origin in unit.tensors:
            if origin != expected_origin(origin.tensor, kept.model, manifest.tp):
                report.add(
                    Finding(
                        "manifest.json",
                        f"unit {unit.name} says of {origin.tensor} what the format does not: {origin}",
                        unit.layer,
                    )
                )
    for folder in sorted({shard.path.split("/")[0] for shard in manifest.shards}):
        _check_index(
            out, folder, [shard for shard in manifest.shards if shard.path.startswith(folder + "/")], report
        )


def _is_rewritten(path: Path, manifest: Manifest, kept: KeptSource) -> bool:
    """Whether a config.json is the source's but for the quantization_config, which has the values that the
    format demands, and may have more keys.
    """
    layout, quantization = manifest.layout, kept.model.quantization
    try:
        config = json.loads(path.read_bytes())
        section = config[quantization.found_at] if quantization.found_at else config
        own = section["quantization_config"]
        values = typed(own, QuantizationConfig, "config.json")
    except (OSError, ValueError, KeyError, TypeError, OutputError):
        return False
    return config == rewritten(kept.config, quantization, own) and values == quantization_config(
        layout.id, layout.num_bits, layout.group_size, layout.symmetric
    )


def _check_index(out: Path, folder: str, shards: list[Shard], report: Report) -> None:
    stored = {
        tensor.name: shard for shard in shards for tensor in shard.tensors if not is_filler(tensor.name)
    }
    size = sum(t.size for shard in shards for t in shard.tensors if not is_filler(t.name))
    expected = Index(IndexMetadata(size), {name: shard.path.split("/")[1] for name, shard in stored.items()})
    try:
        index = read((out / folder / INDEX_NAME).read_bytes(), Index, INDEX_NAME)
    except (OSError, OutputError):
        index = None
    if index != expected:
        report.add(Finding(f"{folder}/{INDEX_NAME}", "is not the index of the shards beside it"))


def check_small_files(out: Path, source: Source, report: Report) -> None:
    """The files beside the weights are the source's own."""
    names = {name: name for name in source.auxiliary} | (
        {"README.md": "source/README.md"} if source.readme is not None else {}
    )
    names |= {INDEX_NAME: f"source/{INDEX_NAME}"} if source.index_bytes is not None else {}
    for name, path in names.items():
        try:
            same = (out / path).read_bytes() == source.store.read(name)
        except OSError as error:
            report.add(Finding(path, f"cannot be read ({error.strerror})"))
            continue
        if not same:
            report.add(Finding(path, f"is not the source's {name}"))


def check_coverage(manifest: Manifest, kept: KeptSource, report: Report) -> None:
    """Each source tensor is stored once or only checked, or lies outside the ranks and layers that were asked
    for.
    """
    covered: dict[str, int] = {}
    experts = range(kept.model.experts)
    for unit in manifest.units:
        for pattern in [source for origin in unit.tensors for source in origin.sources] + list(unit.checked):
            for name in (
                (pattern.replace("{expert}", str(e)) for e in experts)
                if "{expert}" in pattern
                else (pattern,)
            ):
                covered[name] = covered.get(name, 0) + 1
    for name, value in kept.digests.items():
        times = covered.pop(name, 0)
        if times > 1:
            report.add(Finding("manifest.json", f"{name} is stored {times} times"))
        elif times == 0 and (manifest.complete or value != ZEROS):
            report.add(Finding("manifest.json", f"{name} of the source is stored nowhere"))
        elif times == 1 and value == ZEROS and manifest.complete:
            report.add(Finding("source/digests.bin", f"has no digest of {name}"))
    for name in covered:
        report.add(
            Finding("manifest.json", f"a tensor is said to come from {name}, which the source does not have")
        )
    _check_units(manifest, report)


def _check_units(manifest: Manifest, report: Report) -> None:
    """Every unit and every rank's shard of it is there."""
    names = {unit.name for unit in manifest.units}
    expected = {f"layer-{layer:03d}" for layer in manifest.layers} | ({"top"} if manifest.complete else set())
    if missing := expected - names:
        report.add(Finding("manifest.json", f"unit {min(missing)} is missing"))
    per_unit = {
        name: sorted(shard.rank for shard in manifest.shards if shard.unit == name and shard.rank is not None)
        for name in names
    }
    if "common" in names and sum(shard.unit == "common" for shard in manifest.shards) != 1:
        report.add(Finding("manifest.json", "unit common has no shard, or more than one"))
    for name, ranks in per_unit.items():
        if name != "common" and ranks != sorted(manifest.ranks):
            report.add(
                Finding(
                    "manifest.json",
                    f"unit {name} has shards of the ranks {ranks}, not of {list(manifest.ranks)}",
                )
            )
    if manifest.complete and manifest.ranks != tuple(range(manifest.tp)):
        report.add(Finding("manifest.json", "says it is complete, but not all ranks are there"))


def check_shard(out: Path, manifest: Manifest, shard: Shard, experts: int, report: Report) -> bool:
    """Size, header, identity and places of one shard. True where its data may be read."""
    path = out / shard.path
    problems = list(_shard_problems(path, manifest, shard, experts))
    report.add(
        *(Finding(shard.path, problem, _layer(manifest, shard), rank=shard.rank) for problem in problems)
    )
    report.count(files=1)
    return not problems


def _shard_problems(path: Path, manifest: Manifest, shard: Shard, experts: int) -> Iterator[str]:
    try:
        header = header_of(path)
    except SourceError as error:
        yield str(error)
        return
    if header.size != shard.size:
        yield f"has {header.size} bytes, the manifest says {shard.size}"
        return
    expected = _identity(manifest, shard, experts)
    for key in sorted(expected.keys() | header.metadata.keys()):
        if header.metadata.get(key) != expected.get(key):
            yield (
                f"its header says {key} {header.metadata.get(key)}, in this place it must be"
                f" {expected.get(key)}: was it moved or exchanged?"
            )
    if [(t.name, t.dtype, t.shape, t.offset, t.size) for t in header.tensors] != [
        (t.name, t.dtype, t.shape, t.offset, t.size) for t in shard.tensors
    ]:
        yield "its header lists other tensors than the manifest"
        return
    with path.open("rb") as file:
        if digest(file.read(header.data_start)).hex() != shard.header:
            yield "the bytes of its header do not match their digest"
    joined = bytes.fromhex(shard.header + "".join(tensor.digest for tensor in shard.tensors))
    if digest(joined).hex() != shard.digest:
        yield "the manifest's digest of the file is not that of its parts"
    yield from _broken_promises(header, shard)


def _broken_promises(header: Header, shard: Shard) -> Iterator[str]:
    """What the format promises to small loaders."""
    if header.data_start % PAGE or header.size % PAGE:
        yield (
            f"data starts at {header.data_start} and the file ends at {header.size}; both must be multiples"
            f" of {PAGE}"
        )
    follows = {name: view.members[i - 1] for view in shard.fused for i, name in enumerate(view.members) if i}
    before = ""
    for tensor in header.tensors:
        if tensor.size >= PAGE and tensor.offset % PAGE and follows.get(tensor.name) != before:
            yield f"{tensor.name} starts at {tensor.offset}, off a page"
        before = tensor.name
    by_name = {tensor.name: tensor for tensor in header.tensors}
    for view in shard.fused:
        members = [by_name[name] for name in view.members if name in by_name]
        size = sum(member.size for member in members)
        end = members[-1].offset + members[-1].size if members else 0
        rows = sum(member.shape[0] for member in members)
        if (
            len(members) < 2
            or view.offset != members[0].offset
            or end - view.offset != size
            or view.shape != (rows, *members[0].shape[1:])
        ):
            yield f"the fused view {view.name} is not what its members give"


def _identity(manifest: Manifest, shard: Shard, experts: int) -> dict[str, str]:
    """What the header's __metadata__ must say, from the manifest and the folder's name."""
    unit = next(unit for unit in manifest.units if unit.name == shard.unit)
    routed = shard.rank is not None and any(origin.rule == "experts" for origin in unit.tensors)
    local = experts // manifest.ep
    group = (shard.rank or 0) // (manifest.tp // manifest.ep)
    return {
        "format": "marlin-convert",
        "format_version": "1",
        "layout": manifest.layout_id,
        "source": manifest.source_id,
        "tp": str(manifest.tp),
        "ep": str(manifest.ep),
        "rank": "common" if shard.rank is None else str(shard.rank),
        "layer": shard.unit if unit.layer is None else str(unit.layer),
        "expert_range": f"{group * local}:{(group + 1) * local}" if routed else "0:0",
    }


def _layer(manifest: Manifest, shard: Shard) -> int | None:
    return next((unit.layer for unit in manifest.units if unit.name == shard.unit), None)
