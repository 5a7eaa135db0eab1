"""Everything that can be checked without reading tensor data: files, headers, identity, and each document
derived again from what it stands for.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import xxhash

from marlin_convert.checkpoint.index import INDEX_NAME
from marlin_convert.checkpoint.source import Source
from marlin_convert.checks.findings import STRAY, Finding, Verification
from marlin_convert.checks.origins import expected_origin
from marlin_convert.checks.part import Part
from marlin_convert.checks.split import Split
from marlin_convert.documents.bounds import INDEX, LISTED, bound_of
from marlin_convert.documents.codec import parse_json, read, typed
from marlin_convert.documents.engine_files import (
    Index,
    IndexMetadata,
    QuantizationConfig,
    quantization_config,
)
from marlin_convert.documents.manifest import Manifest, Shard
from marlin_convert.documents.provenance import NAME as PROVENANCE
from marlin_convert.documents.provenance import is_as_written
from marlin_convert.documents.records import LOCK, TURN, WORK
from marlin_convert.errors import OutputError
from marlin_convert.models.quantization import rewritten
from marlin_convert.shards.kept_source import DIGESTS, ZEROS, KeptSource
from marlin_convert.storage.files import file_digest, read_small
from marlin_convert.storage.shard_file import is_filler

UNLISTED = frozenset({"manifest.json", PROVENANCE, f"{WORK}/{LOCK}", f"{WORK}/{TURN}"})


def check_listed_files(out: Path, part: Part, kept: KeptSource, report: Verification) -> None:
    """Size and digest of every file beside the shards (of source/digests.bin, as `kept` was read from it);
    nothing else lies in OUT; provenance.json is as it was written.
    """
    manifest = part.manifest
    for file in manifest.files:
        if not part.has(file.path):
            continue
        try:
            size, value = (
                kept.digests_file
                if file.path == DIGESTS
                else file_digest(out / file.path, min(file.size, LISTED))
            )
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
                report.add(Finding(path, f"{STRAY}; move it away"))
    if (out / PROVENANCE).exists():
        try:
            whole = is_as_written(out)
        except OSError as error:
            report.add(Finding("provenance.json", f"cannot be read ({error.strerror})"))
        else:
            if not whole:
                report.add(Finding("provenance.json", "its bytes do not match its own digest"))


def check_documents(part: Part, kept: KeptSource, split: Split, out: Path, report: Verification) -> None:
    """config.json, source id, indexes, origins: derived again and compared."""
    manifest = part.manifest
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
            home = split.stages.unit_of(origin.tensor, kept.model)
            if home != unit.name:
                what = f"unit {unit.name} has {origin.tensor}, which is of {home}"
                report.add(Finding("manifest.json", what, unit.layer))
            if origin != expected_origin(origin.tensor, kept.model, split):
                report.add(
                    Finding(
                        "manifest.json",
                        f"unit {unit.name} says of {origin.tensor} what the format does not: {origin}",
                        unit.layer,
                    )
                )
    for folder in sorted({shard.folder for shard in part.shards}):
        _check_index(out, folder, [shard for shard in manifest.shards if shard.folder == folder], report)


def _is_rewritten(path: Path, manifest: Manifest, kept: KeptSource) -> bool:
    """Whether a config.json is the source's but for the quantization_config, which has the values that the
    format demands, and may have more keys.
    """
    layout, quantization = manifest.layout, kept.model.quantization
    try:
        config = parse_json(read_small(path, LISTED))
        section = config[quantization.found_at] if quantization.found_at else config
        own = section["quantization_config"]
        values = typed(own, QuantizationConfig, "config.json")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OutputError):
        return False
    return config == rewritten(kept.config, quantization, own) and values == quantization_config(
        layout.id, manifest.format_version, layout.num_bits, layout.group_size, layout.symmetric
    )


def _check_index(out: Path, folder: str, shards: list[Shard], report: Verification) -> None:
    stored = {
        tensor.name: shard for shard in shards for tensor in shard.tensors if not is_filler(tensor.name)
    }
    size = sum(t.size for shard in shards for t in shard.tensors if not is_filler(t.name))
    expected = Index(IndexMetadata(size), {name: shard.file for name, shard in stored.items()})
    try:
        index = read(read_small(out / folder / INDEX_NAME, INDEX), Index, INDEX_NAME)
    except (OSError, OutputError):
        index = None
    if index != expected:
        report.add(Finding(f"{folder}/{INDEX_NAME}", "is not the index of the shards beside it"))


def check_small_files(out: Path, source: Source, report: Verification) -> None:
    """The files beside the weights are the source's own."""
    names = {name: name for name in source.auxiliary} | (
        {"README.md": "source/README.md"} if source.readme is not None else {}
    )
    names |= {INDEX_NAME: f"source/{INDEX_NAME}"} if source.index_bytes is not None else {}
    for name, path in names.items():
        try:
            same = read_small(out / path, bound_of(name)) == source.store.read(name)
        except OSError as error:
            report.add(Finding(path, f"cannot be read ({error.strerror})"))
            continue
        if not same:
            report.add(Finding(path, f"is not the source's {name}"))


def check_coverage(manifest: Manifest, kept: KeptSource, split: Split, report: Verification) -> None:
    """Each source tensor is stored once or only checked, or lies outside the ranks and layers that were asked
    for.
    """
    covered = _covered(manifest, kept)
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
    _check_units(manifest, split, report)


def _covered(manifest: Manifest, kept: KeptSource) -> dict[str, int]:
    """How often each source tensor is said to be taken. Of a pattern no more names are made than the source
    has, but for one that it does not have.
    """
    patterns = Counter(
        pattern
        for unit in manifest.units
        for pattern in (*(name for origin in unit.tensors for name in origin.sources), *unit.checked)
    )
    covered = Counter[str]()
    for pattern, times in patterns.items():
        for expert in range(kept.model.experts if "{expert}" in pattern else 1):
            name = pattern.replace("{expert}", str(expert))
            covered[name] += times
            if name not in kept.entries:
                break
    return covered


def _check_units(manifest: Manifest, split: Split, report: Verification) -> None:
    """Every unit and every rank's shard of it is there."""
    names = {unit.name for unit in manifest.units}
    expected = {f"layer-{layer:03d}" for layer in manifest.layers}
    expected |= set(split.stages.beside) if manifest.complete else set()
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
