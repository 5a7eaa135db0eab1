"""What `inspect` shows: plain dictionaries, for tables and for JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from marlin_convert.checkpoint.store import header_of
from marlin_convert.documents.manifest import read_manifest
from marlin_convert.errors import UsageError
from marlin_convert.shards.reader import NUMPY, open_shards
from marlin_convert.storage.shard_file import is_filler


def describe_folder(out: Path) -> dict[str, Any]:
    """A converted folder, from its manifest."""
    manifest = read_manifest(out)
    units: dict[str, dict[str, Any]] = {}
    for shard in manifest.shards:
        row = units.setdefault(
            shard.unit, {"unit": shard.unit, "files": 0, "tensors": 0, "bytes of a file": shard.size}
        )
        row["files"] += 1
        row["tensors"] = sum(not is_filler(tensor.name) for tensor in shard.tensors)
    source = manifest.source
    return {
        "layout": manifest.layout_id,
        "group_size": manifest.group_size,
        "tp": manifest.tp,
        "ep": manifest.ep,
        "ranks": f"{len(manifest.ranks)} of {manifest.tp}",
        "complete": manifest.complete,
        "checks while converting": manifest.checks,
        "source": f"{source.id}, {source.tensors:,} tensors, {source.payload_bytes:,} bytes",
        "bytes": sum(shard.size for shard in manifest.shards),
        "units": list(units.values()),
    }


def describe_file(path: Path) -> dict[str, Any]:
    """A safetensors file, from its header."""
    header = header_of(path)
    tensors = [
        {
            "tensor": t.name,
            "dtype": t.dtype,
            "shape": "x".join(map(str, t.shape)),
            "offset": t.offset,
            "size": t.size,
        }
        for t in header.tensors
    ]
    return {"metadata": header.metadata, "bytes": header.size, "tensors": tensors}


def describe_tensor_of(out: Path, rank: int, name: str) -> dict[str, Any]:
    """A tensor or fused view of a rank of a converted folder."""
    for which in (rank, None):
        shards = open_shards(out, which)
        if name in shards.names() or name in shards.fused_names():
            return _describe(name, shards.dtype(name), shards[name])
    raise UsageError(
        f"{out} has no tensor {name} on rank {rank}; `marlin-convert inspect {out}` and its shard files list"
        " what there is"
    )


def describe_tensor_in(path: Path, name: str) -> dict[str, Any]:
    """A tensor of one file."""
    header = header_of(path)
    for entry in header.tensors:
        if entry.name == name:
            data = np.memmap(path, np.uint8, "r", entry.offset, (entry.size,))
            return _describe(
                name, entry.dtype, np.asarray(data).view(NUMPY[entry.dtype]).reshape(entry.shape)
            )
    raise UsageError(f"{path} has no tensor {name}; `marlin-convert inspect {path}` lists them")


def _describe(name: str, dtype: str, array: npt.NDArray[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tensor": name,
        "dtype": dtype,
        "shape": list(array.shape),
        "bytes": array.nbytes,
    }
    if name.endswith("weight_packed"):
        counts = code_histogram(array)
        total = max(int(counts.sum()), 1)
        found["codes"] = [
            {"code": code, "value": code - 8, "count": int(n), "share": f"{n / total:.4%}"}
            for code, n in enumerate(counts)
        ]
        return found
    values = as_float(dtype, array)
    if values is not None and values.size:
        found |= {
            "minimum": float(values.min()),
            "maximum": float(values.max()),
            "zeros": int((values == 0).sum()),
        }
        found |= {"not finite": int((~np.isfinite(values)).sum()), "first": values.reshape(-1)[:4].tolist()}
    return found


def code_histogram(words: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """How often each 4-bit code occurs; the same before and after repacking."""
    counts = np.zeros(16, np.int64)
    flat = words.reshape(-1).view(np.uint8)
    for begin in range(0, flat.size, 1 << 24):
        pairs = np.bincount(flat[begin : begin + (1 << 24)], minlength=256).reshape(16, 16)
        counts += pairs.sum(0) + pairs.sum(1)
    return counts


def as_float(dtype: str, array: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """Values as floats; bf16 from its bits."""
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return (
        array.astype(np.float64) if dtype in ("F16", "F32", "F64", "I8", "I16", "I32", "I64", "U8") else None
    )
