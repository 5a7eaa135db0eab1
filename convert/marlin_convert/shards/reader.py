"""Reading converted shards: numpy views over read-only mappings, nothing copied."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from marlin_convert.arguments import plain, refuse_odd
from marlin_convert.checkpoint.header import Header, read_header
from marlin_convert.documents.manifest import FusedTensor, Manifest, Shard, StoredTensor
from marlin_convert.documents.rank_manifest import of_stage, read_rank_manifest
from marlin_convert.errors import OutputError, SourceError, UsageError
from marlin_convert.storage.files import machine_errors, open_regular
from marlin_convert.storage.reads import ShortFileError, read_bytes, read_exactly
from marlin_convert.storage.shard_file import Place, is_filler, metadata_of
from marlin_convert.words import ranges

Array = npt.NDArray[np.generic]

#: bf16 has no numpy dtype: its bits come as uint16
NUMPY = {
    "BF16": np.uint16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "I32": np.int32,
    "I64": np.int64,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
    "BOOL": np.bool_,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
}


@dataclass(repr=False)
class Shards:
    """One rank's tensors by name. Files are mapped when first touched; views stay valid until `close`."""

    out: Path
    manifest: Manifest
    rank: int | None
    _where: dict[str, tuple[Shard, StoredTensor]]
    _fused: dict[str, tuple[Shard, FusedTensor]]
    _maps: dict[str, mmap.mmap] = field(default_factory=dict)
    _checked: set[str] = field(default_factory=set)

    def names(self, unit: str | None = None) -> list[str]:
        """Names in load order, of one unit (`layer-001`) or of all."""
        return [name for name, (shard, _) in self._where.items() if unit in (None, shard.unit)]

    def fused_names(self) -> list[str]:
        """Names of the fused views."""
        return list(self._fused)

    def __contains__(self, name: str) -> bool:
        return name in self._where or name in self._fused

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def keys(self) -> list[str]:
        """Names in load order, without those of fused views."""
        return list(self._where)

    def items(self) -> Iterator[tuple[str, Array]]:
        """Each tensor with its name, mapped when its turn comes."""
        return ((name, self[name]) for name in self._where)

    def __repr__(self) -> str:
        return f"Shards({str(self.out)!r}, rank={self.rank}, {len(self._where)} tensors)"

    def __getitem__(self, name: str) -> Array:
        """A tensor or a fused view as a read-only array; bf16 as uint16. KeyError for an unknown name."""
        if name in self._fused:
            shard, view = self._fused[name]
            return self._array(shard, view.dtype, view.shape, view.offset)
        shard, tensor = self._where[name]
        return self._array(shard, tensor.dtype, tensor.shape, tensor.offset)

    def layer(self, layer: int) -> dict[str, Array]:
        """All tensors and fused views of a layer."""
        unit = f"layer-{layer:03d}"
        return {
            name: self[name]
            for name in [
                *self.names(unit),
                *(name for name, (shard, _) in self._fused.items() if shard.unit == unit),
            ]
        }

    def expert(self, name: str, expert: int) -> Array:
        """One routed expert of a stacked tensor, by its number in the model; of several copies the first.
        Raises UsageError for one that this rank does not own.
        """
        stacked, held = self[name], self.manifest.held()(self._where[name][0])
        if expert not in held:
            raise UsageError(f"rank {self.rank} owns the experts {ranges(sorted(held))}, not {expert}")
        one: Array = stacked[held.index(expert)]
        return one

    def read(self, name: str, begin: int, count: int) -> npt.NDArray[np.uint8]:
        """The bytes of rows `begin` to `begin + count` of a tensor's first dimension, read and not mapped: an
        error of the disk is an exception here, where touching a mapping would end the process. Raises
        OutputError where the file is short, MachineError where it cannot be read.
        """
        shard, tensor = self._where[name]
        row = tensor.size // tensor.shape[0]
        return self._bytes(shard, tensor.offset + begin * row, count * row)

    def reader(self, name: str) -> tuple[tuple[int, ...], Callable[[int, int], npt.NDArray[np.uint8]]]:
        """The shape of a tensor or a fused view, and a function that reads `size` bytes from byte `begin` of
        it, as `read` does. KeyError for an unknown name.
        """
        shard, place = self._fused[name] if name in self._fused else self._where[name]
        return place.shape, lambda begin, size: self._bytes(shard, place.offset + begin, size)

    def _bytes(self, shard: Shard, offset: int, size: int) -> npt.NDArray[np.uint8]:
        path = self.out / shard.path
        try:
            if shard.path not in self._checked:
                os.close(self._opened(shard))
            return read_bytes(path, offset, size)
        except ShortFileError as error:
            raise OutputError(f"{error}; run verify") from error

    def dtype(self, name: str) -> str:
        """The safetensors dtype of a tensor."""
        return self._fused[name][1].dtype if name in self._fused else self._where[name][1].dtype

    def _array(self, shard: Shard, dtype: str, shape: tuple[int, ...], offset: int) -> Array:
        count = int(np.prod(shape))
        return np.frombuffer(self.mapping(shard), NUMPY[dtype], count, offset).reshape(shape)

    def shards(self) -> tuple[Shard, ...]:
        """The files of this rank."""
        return tuple(shard for shard in self.manifest.shards if shard.rank == self.rank)

    def mapping(self, shard: Shard) -> mmap.mmap:
        """The read-only mapping of a file, made after seeing that it is the one it should be. Where the file
        is cut off later, touching what is gone ends the process (SIGBUS); `read` raises instead.

        A short file would read as garbage, an exchanged one as another rank or layer. Raises OutputError.
        """
        if shard.path not in self._maps:
            descriptor = self._opened(shard)
            try:
                self._maps[shard.path] = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise OutputError(
                    f"{self.out / shard.path}: cannot be mapped ({error}); run verify"
                ) from error
            finally:
                os.close(descriptor)
        return self._maps[shard.path]

    def _opened(self, shard: Shard) -> int:
        """A descriptor of a file that has the size and the identity it should have. Raises OutputError."""
        path = self.out / shard.path
        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise OutputError(f"{path}: cannot be read ({error.strerror}); run verify") from error
        try:
            size = os.fstat(descriptor).st_size
            if size != shard.size:
                raise OutputError(f"{path} has {size} bytes, the manifest says {shard.size}; run verify")
            with machine_errors(f"reading {path}"):
                header = read_header(str(path), size, partial(read_exactly, descriptor, file=path))
            self._refuse_other(shard, header)
            self._refuse_other_tensors(shard, header)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, SourceError):
                raise OutputError(f"{error}; run verify") from error
            raise
        self._checked.add(shard.path)
        return descriptor

    def _refuse_other(self, shard: Shard, header: Header) -> None:
        """Raise OutputError for a file that was made for another place or another split: of these even the
        size may be the same.
        """
        manifest, parallel = self.manifest, self.manifest.parallel
        unit = next(unit for unit in manifest.units if unit.name == shard.unit)
        layer = unit.name if unit.layer is None else str(unit.layer)
        place = Place(shard.rank, layer, parallel.stage_of(unit) or 0)
        for key, expected in metadata_of(
            manifest.source_id, manifest.layout_id, manifest.topology, place, manifest.held()(shard)
        ).items():
            if (found := header.metadata.get(key)) != expected:
                raise OutputError(
                    f"{self.out / shard.path}: its header says {key} {found}, in this place it must be"
                    f" {expected}; run verify"
                )

    def _refuse_other_tensors(self, shard: Shard, header: Header) -> None:
        """Raise OutputError where the file's own header has tensors at other places than the manifest, by
        which they are read.
        """
        said, found = (
            [(each.name, each.dtype, each.shape, each.offset, each.size) for each in tensors]
            for tensors in (shard.tensors, header.tensors)
        )
        if said != found:
            raise OutputError(
                f"{self.out / shard.path}: its header lists other tensors than the manifest; run verify"
            )

    def close(self) -> None:
        """Unmap. Raises BufferError while views are still alive."""
        while self._maps:
            _, mapped = self._maps.popitem()
            mapped.close()

    def __enter__(self) -> Shards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._maps.clear()  # views may outlive the block: each map goes with its last one


def open_shards(
    out: str | os.PathLike[str],
    rank: int | None = 0,
    manifest: Manifest | None = None,
    stage: int | None = None,
) -> Shards:
    """Open a rank of a converted folder (None: common/), of one pipeline stage (None: of all). Its manifest
    is read unless it is given, the rank's own where it has one.

    Raises OutputError, or UsageError for a rank or a stage that is not there.
    """
    refuse_odd(places={"out": out}, least=0, rank=rank, stage=stage)
    rank, stage, folder = plain(rank), plain(stage), Path(out)
    manifest = manifest or read_rank_manifest(folder, rank, stage)
    manifest = manifest if stage is None else of_stage(manifest, stage)
    if rank is not None and rank not in manifest.ranks:
        raise UsageError(f"{out} has no rank {rank}; it has {', '.join(map(str, manifest.ranks))}")
    shards = [shard for shard in manifest.shards if shard.rank == rank]
    where = {
        tensor.name: (shard, tensor)
        for shard in shards
        for tensor in shard.tensors
        if not is_filler(tensor.name)
    }
    fused = {view.name: (shard, view) for shard in shards for view in shard.fused}
    return Shards(folder, manifest, rank, where, fused)
