"""What `inspect` shows, for tables and for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from marlin_convert.checkpoint.store import header_of
from marlin_convert.documents.manifest import Manifest, read_manifest
from marlin_convert.documents.results import (
    Code,
    InspectedEntry,
    InspectedFile,
    InspectedFolder,
    InspectedSource,
    InspectedTensor,
    InspectedUnit,
)
from marlin_convert.errors import UsageError
from marlin_convert.shards.reader import NUMPY, open_shards
from marlin_convert.storage.reads import read_bytes
from marlin_convert.storage.shard_file import is_filler
from marlin_convert.words import count

#: bytes `size` of a tensor from byte `begin` of it
Read = Callable[[int, int], npt.NDArray[np.uint8]]
#: bytes whose codes are counted at a time
AT_A_TIME = 1 << 24


def describe_folder(out: Path) -> InspectedFolder:
    """A converted folder, from its manifest, and which of its shards are not there."""
    manifest = read_manifest(out)
    files = {
        unit.name: [shard for shard in manifest.shards if shard.unit == unit.name] for unit in manifest.units
    }
    source, lost = manifest.source, lost_shards(out, manifest)
    return InspectedFolder(
        layout=manifest.layout_id,
        group_size=manifest.group_size,
        tp=manifest.tp,
        ep=manifest.ep,
        attn_tp=manifest.parallel.attn_tp or manifest.tp,
        pp=manifest.parallel.pp,
        slots=manifest.parallel.slots,
        ranks=manifest.ranks,
        layers=manifest.layers,
        complete=manifest.complete and not lost,
        missing=tuple(sorted(lost)),
        checks=manifest.checks,
        source=InspectedSource(source.id, source.tensors, source.payload_bytes, source.repo, source.revision),
        bytes=sum(shard.size for shard in manifest.shards),
        units=tuple(
            InspectedUnit(
                name,
                len(shards),
                sum(not is_filler(tensor.name) for tensor in shards[-1].tensors),
                shards[0].size,
            )
            for name, shards in files.items()
            if shards
        ),
    )


def lost_shards(out: Path, manifest: Manifest) -> frozenset[str]:
    """Shards of a finished conversion that are gone or of another size. What is in them is for `verify` to
    say.
    """
    return frozenset(shard.path for shard in manifest.shards if not _is_there(out / shard.path, shard.size))


def _is_there(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def describe_file(path: Path) -> InspectedFile:
    """A safetensors file, from its header."""
    header = header_of(path)
    tensors = tuple(
        InspectedEntry(each.name, each.dtype, each.shape, each.offset, each.size) for each in header.tensors
    )
    return InspectedFile(header.metadata, header.size, tensors)


def describe_tensor_of(out: Path, rank: int, name: str) -> InspectedTensor:
    """A tensor or fused view of a rank of a converted folder."""
    known: list[str] = []
    for which in (rank, None):
        shards = open_shards(out, which)
        if name in shards:
            return _describe(name, shards.dtype(name), *shards.reader(name))
        known += [*shards.names(), *shards.fused_names()]
    raise UsageError(f"{out} has no tensor {name} on rank {rank} or in common/; {_like(name, known)}")


def describe_tensor_in(path: Path, name: str) -> InspectedTensor:
    """A tensor of one file."""
    entries = {entry.name: entry for entry in header_of(path).tensors}
    if (entry := entries.get(name)) is None:
        raise UsageError(f"{path} has no tensor {name}; {_like(name, list(entries))}")
    return _describe(
        name, entry.dtype, entry.shape, lambda begin, size: read_bytes(path, entry.offset + begin, size)
    )


def _like(name: str, known: list[str]) -> str:
    """Names that may have been meant: those that have the same words in them, else some."""
    last = name.rpartition(".")[2]
    near = get_close_matches(name, known, 3, 0.6) or [each for each in known if last in each][:3] or known[:3]
    return f"there is, for example, {', '.join(near)} ({count(len(known), 'name')} in all)"


def _describe(name: str, dtype: str, shape: tuple[int, ...], read: Read) -> InspectedTensor:
    """Read and not mapped: a file that is cut off meanwhile is an error, and does not end the process."""
    kind = np.dtype(NUMPY[dtype])
    tensor = InspectedTensor(name, dtype, shape, math.prod(shape) * kind.itemsize)
    if name.endswith("weight_packed"):
        parts = (
            read(begin, min(AT_A_TIME, tensor.bytes - begin)) for begin in range(0, tensor.bytes, AT_A_TIME)
        )
        counts = sum(map(code_histogram, parts), np.zeros(16, np.int64))
        total = max(int(counts.sum()), 1)
        codes = (Code(code, code - 8, int(n), int(n) / total) for code, n in enumerate(counts))
        return replace(tensor, codes=tuple(codes))
    values = as_float(dtype, read(0, tensor.bytes).view(kind).reshape(shape))
    if values is None or not values.size:
        return tensor
    return replace(
        tensor,
        minimum=float(values.min()),
        maximum=float(values.max()),
        zeros=int((values == 0).sum()),
        not_finite=int((~np.isfinite(values)).sum()),
        first=tuple(values.reshape(-1)[:4].tolist()),
    )


def code_histogram(words: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """How often each 4-bit code occurs; the same before and after repacking."""
    counts = np.zeros(16, np.int64)
    flat = words.reshape(-1).view(np.uint8)
    for begin in range(0, flat.size, AT_A_TIME):
        pairs = np.bincount(flat[begin : begin + AT_A_TIME], minlength=256).reshape(16, 16)
        counts += pairs.sum(0) + pairs.sum(1)
    return counts


def as_float(dtype: str, array: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """Values as floats; bf16 from its bits."""
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return (
        array.astype(np.float64) if dtype in ("F16", "F32", "F64", "I8", "I16", "I32", "I64", "U8") else None
    )
