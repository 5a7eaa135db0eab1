"""One rank's shards as torch tensors on a device: whole files in large copies, each tensor a view of the
device's memory.

The ways to a GPU. `ring`: threads read into a few pinned buffers and copy from there. `direct`: the same,
with reads past the page cache. `auto`: `direct` for files that are not in the page cache, else `ring`.
`mapped`: the read-only mapping of a file is registered with CUDA piece by piece while earlier pieces copy. On
"cpu" the tensors are views of the mapping and nothing is copied.

This module loads without torch; its functions need it and say so where it is missing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from marlin_convert.arguments import items, refuse_odd, shown
from marlin_convert.documents.manifest import FusedTensor, Shard, StoredTensor
from marlin_convert.errors import MachineError, UsageError
from marlin_convert.extras import need_device, require
from marlin_convert.limits import usable_cores
from marlin_convert.shards.reader import Shards, open_shards
from marlin_convert.storage.files import PAGE
from marlin_convert.storage.page_cache import can_tell, resident_pages
from marlin_convert.storage.shard_file import is_filler

if TYPE_CHECKING:
    from torch import Tensor, dtype

PATHS = ("auto", "ring", "direct", "mapped")
#: bytes between the pages that are sampled to see whether a file is in the page cache
SAMPLE = 64 << 20
#: most threads that read, from the page cache and from a disk: the fastest numbers on an H200 machine of 16
#: cores
THREADS = 16
DIRECT_THREADS = 8
#: safetensors dtype -> name in torch
TORCH = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "BOOL": "bool",
}


@dataclass(repr=False)
class LoadedRank:
    """Tensors and fused views by name, the bytes copied, and seconds per step; `register` is part of
    `register and copy`.
    """

    tensors: dict[str, Tensor]
    path: str
    threads: int = 1
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __repr__(self) -> str:
        return f"LoadedRank({len(self.tensors)} tensors, path={self.path!r}, bytes={self.bytes})"


def load_rank(
    out: str | os.PathLike[str],
    rank: int,
    *,
    stage: int | None = None,
    device: str = "cuda",
    layers: Sequence[int] | None = None,
    units: Sequence[str] | None = None,
    path: str = "auto",
    threads: int | None = None,
) -> LoadedRank:
    """Open a rank of a converted folder, of one pipeline stage (None: of all), and bring it to a device;
    options, result and errors as `load_shards` has them.
    """
    shards = open_shards(out, rank, stage=stage)
    return load_shards(shards, device=device, layers=layers, units=units, path=path, threads=threads)


def load_shards(
    shards: Shards,
    *,
    device: str = "cuda",
    layers: Sequence[int] | None = None,
    units: Sequence[str] | None = None,
    path: str = "auto",
    threads: int | None = None,
) -> LoadedRank:
    """Bring a rank (or some `layers` of it, or `units`, such as `layer-001` and `top`) to a device.

    `path` is one of PATHS, `threads` how many read for ring and direct. On return all copies are complete, on
    every stream. Raises OutputError for damaged files, UsageError for an unknown rank, layer, unit, path or
    device and where torch is not installed, MachineError where CUDA or the disk fails.
    """
    refuse_odd(threads=threads, lists={"layers": layers})
    require("torch")
    import torch

    if layers is not None:
        if units is not None:
            raise UsageError("give layers or units, not both")
        units = [f"layer-{layer:03d}" for layer in layers]
    chosen = _chosen(shards, units)
    if not isinstance(path, str) or path not in PATHS:
        raise UsageError(f"path {shown(path)}: choose one of {', '.join(PATHS)}")
    begin = time.perf_counter()
    if need_device(device) == "cpu":
        return LoadedRank(host_tensors(shards, units), "host")
    for shard in chosen:
        shards.mapping(shard)  # checks size and identity before anything is copied
    path, threads = way(shards, chosen, path, threads)
    loaded = LoadedRank({}, path, threads)
    try:
        with torch.cuda.device(device):
            targets = {
                shard.path: torch.empty(shard.size, dtype=torch.uint8, device="cuda") for shard in chosen
            }
            loaded.seconds["open"] = time.perf_counter() - begin
            (_copy_mapped if path == "mapped" else _copy_ring)(shards, chosen, targets, loaded)
    except RuntimeError as error:
        raise MachineError(f"CUDA failed while rank {shards.rank} was being loaded: {error}") from error
    for shard in chosen:
        loaded.tensors |= views(shard, targets[shard.path])
    loaded.bytes = sum(shard.size for shard in chosen)
    loaded.seconds["total"] = time.perf_counter() - begin
    return loaded


def way(shards: Shards, chosen: Sequence[Shard], path: str, threads: int | None = None) -> tuple[str, int]:
    """How files are read, `auto` being decided, and with how many threads unless they are given."""
    if path == "auto":
        path = "ring" if in_page_cache(shards, chosen) else "direct"
    best = {"ring": THREADS, "direct": DIRECT_THREADS, "mapped": 1}[path]
    return path, 1 if path == "mapped" else threads or min(usable_cores(), best)


def host_tensors(shards: Shards, units: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Zero-copy torch tensors over the mapping, fused views included. They are read-only memory: writing to
    one ends the process. Raises as `load_shards` does.
    """
    require("torch")
    from marlin_convert.engines.mapped import flat_bytes

    return {
        name: tensor
        for shard in _chosen(shards, units)
        for name, tensor in views(shard, flat_bytes(shards.mapping(shard))).items()
    }


def views(shard: Shard, data: Tensor) -> dict[str, Tensor]:
    """Tensors and fused views of a file whose bytes are `data`, flat uint8 on any device."""
    found = {}
    parts: list[StoredTensor | FusedTensor] = [*shard.tensors, *shard.fused]
    for part in parts:
        if not is_filler(part.name):
            kind = torch_dtype(part.dtype)
            size = kind.itemsize * int(np.prod(part.shape))
            found[part.name] = data[part.offset : part.offset + size].view(kind).reshape(part.shape)
    return found


def torch_dtype(name: str) -> dtype:
    """Torch's dtype for a safetensors one, such as `BF16`."""
    import torch

    found: dtype = getattr(torch, TORCH[name])
    return found


def in_page_cache(shards: Shards, chosen: Sequence[Shard]) -> bool:
    """Whether most of the files lies in the page cache, by a sample of their pages; True where the system
    does not tell. Not the first pages of a file: they have just been read for its header.
    """
    if not all(can_tell(shards.out / shard.path) for shard in chosen):
        return True
    places = [
        (shard, at)
        for shard in chosen
        for at in range(min(SAMPLE, shard.size) // 2 // PAGE * PAGE, shard.size, SAMPLE)
    ]
    sample = [resident_pages(shards.mapping(shard), at, 4 * PAGE) for shard, at in places]
    return bool(np.concatenate(sample).mean() > 0.5) if sample else True


def _chosen(shards: Shards, units: Sequence[str] | None) -> list[Shard]:
    """The files of some units, or of all."""
    if isinstance(units, str):
        raise UsageError(f'units is a list, such as ["{units}"]')
    names = () if units is None else items(units)
    if names is None or not all(isinstance(name, str) for name in names):
        raise UsageError(f'units is {shown(units)}; it must be a list of names, such as ["layer-001", "top"]')
    chosen = [shard for shard in shards.shards() if units is None or shard.unit in units]
    if units is not None and (absent := sorted(set(units) - {shard.unit for shard in chosen})):
        raise UsageError(f"{shards.out} has no {absent[0]} on rank {shards.rank}")
    return chosen


def _copy_mapped(
    shards: Shards, chosen: Sequence[Shard], targets: dict[str, Tensor], loaded: LoadedRank
) -> None:
    from marlin_convert.engines.mapped import copy_mapped

    loaded.seconds |= copy_mapped((shards.mapping(shard), targets[shard.path]) for shard in chosen)


def _copy_ring(
    shards: Shards, chosen: Sequence[Shard], targets: dict[str, Tensor], loaded: LoadedRank
) -> None:
    # and numba, which the other ways do without
    import torch

    from marlin_convert.engines.ranges import Copier, Range

    begin = time.perf_counter()
    copier = Copier(torch.device("cuda"), loaded.threads, loaded.path == "direct")
    loaded.seconds["pin"] = time.perf_counter() - begin
    begin = time.perf_counter()
    copier.copy([Range(shards.out / shard.path, 0, targets[shard.path]) for shard in chosen])
    loaded.seconds["copy"] = time.perf_counter() - begin
