"""What can be checked of a shard file without reading tensor data: header, identity, the places of tensors,
and what the format promises to small loaders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from marlin_convert.checkpoint.header import Header
from marlin_convert.checkpoint.store import header_of
from marlin_convert.checks.findings import Finding, Verification
from marlin_convert.checks.split import Split
from marlin_convert.documents.manifest import Manifest, Shard
from marlin_convert.errors import SourceError
from marlin_convert.storage.files import PAGE, digest


def check_shard(out: Path, manifest: Manifest, shard: Shard, split: Split, report: Verification) -> bool:
    """Size, header, identity and places of one shard. True where its data may be read."""
    path = out / shard.path
    problems = list(_shard_problems(path, manifest, shard, split))
    report.add(
        *(Finding(shard.path, problem, _layer(manifest, shard), rank=shard.rank) for problem in problems)
    )
    report.count(files=1)
    return not problems


def _shard_problems(path: Path, manifest: Manifest, shard: Shard, split: Split) -> Iterator[str]:
    try:
        header = header_of(path)
    except SourceError as error:
        # the advice of the reader is for a published file
        yield re.sub(r"[;,] fetch (it|the file) again$", "; make it again", str(error).split(": ", 1)[-1])
        return
    if header.size != shard.size:
        yield f"has {header.size} bytes, the manifest says {shard.size}"
        return
    expected = _identity(manifest, shard, split)
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
    if digest(len(header.raw).to_bytes(8, "little") + header.raw).hex() != shard.header:
        yield "the bytes of its header do not match their digest"
    joined = bytes.fromhex(shard.header + "".join(tensor.digest for tensor in shard.tensors))
    if digest(joined).hex() != shard.digest:
        yield "the manifest's digest of the file is not that of its parts"
    yield from _broken_promises(header, shard)
    yield from _read_otherwise(path, header)


def _read_otherwise(path: Path, header: Header) -> Iterator[str]:
    """What the reference reader of the safetensors package makes of the file: it must open it and see the
    same tensors, or ours is the only reader that can.
    """
    try:
        with safe_open(path, framework="numpy") as opened:
            names = opened.keys()
            slices = {name: opened.get_slice(name) for name in names}
            found = {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
            metadata = opened.metadata()
    except (SafetensorError, OSError) as error:
        yield f"the safetensors package does not open it: {error}"
        return
    if found != {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors}:
        yield "the safetensors package reads other names, dtypes or shapes in it"
    if metadata != header.metadata:
        yield "the safetensors package reads another __metadata__ in it"


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


def _identity(manifest: Manifest, shard: Shard, split: Split) -> dict[str, str]:
    """What the header's __metadata__ must say, from the manifest and the folder's name."""
    unit = next(unit for unit in manifest.units if unit.name == shard.unit)
    key, owned = "expert_range", "0:0"
    if shard.rank is not None and unit.routed:
        held = split.held(shard.rank)
        key, owned = "expert_range", f"{held.start}:{held.stop}"
        if split.slots is not None:
            placed = split.placed(unit)
            key, owned = "expert_slots", ",".join(str(placed[slot]) for slot in held)
    apart = {} if split.attn_tp is None else {"attn_tp": str(split.attn_tp)}
    if split.stages.count > 1:
        apart |= {"pp": str(split.stages.count), "stage": str(split.stages.of(unit.name))}
    return {
        "format": "marlin-convert",
        "format_version": str(split.version),
        "layout": manifest.layout_id,
        "source": manifest.source_id,
        "tp": str(split.tp),
        "ep": str(split.ep),
        **apart,
        "rank": "common" if shard.rank is None else str(shard.rank),
        "layer": shard.unit if unit.layer is None else str(unit.layer),
        key: owned,
    }


def _layer(manifest: Manifest, shard: Shard) -> int | None:
    return next((unit.layer for unit in manifest.units if unit.name == shard.unit), None)
