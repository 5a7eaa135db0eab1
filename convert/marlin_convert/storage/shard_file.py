"""The shard file: where each tensor goes and what the header says. Pure; the promises are in
schemas/README.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from marlin_convert.slicing import Rank, Topology
from marlin_convert.storage.files import PAGE

FORMAT: Final = "marlin-convert"
#: versions there are; the lowest that describes an output is its own
FORMAT_VERSIONS: Final = (1, 2)
PAD_PREFIX = "__pad__."
MAX_TENSORS = 1024
MAX_NAME = 127
#: bytes per element of the dtypes that safetensors has
DTYPE_SIZE = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to store: not yet placed."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * DTYPE_SIZE[self.dtype]


@dataclass(frozen=True)
class Placed:
    """A tensor in a file; `offset` counts from the start of the data, since the header's length depends on
    all of them.
    """

    spec: TensorSpec
    offset: int

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.offset + self.spec.size


@dataclass(frozen=True)
class FusedView:
    """Neighbours that may be read as one tensor, joined along the first dimension."""

    name: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class FileLayout:
    """Tensors in file order, fillers included, and the size of the data (whole pages)."""

    tensors: tuple[Placed, ...]
    fused: tuple[FusedView, ...]
    data_size: int


def is_filler(name: str) -> bool:
    """Whether a stored name is a filler's: zeros that belong to no index and no total."""
    return name.startswith(PAD_PREFIX)


def lay_out(specs: Sequence[tuple[TensorSpec, str | None]]) -> FileLayout:
    """Place tensors, given in load order with the name of the fused view each belongs to (or None).

    A fused view's members stay together and are placed as one block. Blocks of whole pages come first in load
    order; then the others, those of a page or more before the small ones, and these by element size. Each is
    aligned for its dtype. Raises ValueError for more tensors, longer names or more dimensions than small
    loaders take.
    """
    blocks: list[tuple[str | None, list[TensorSpec]]] = []
    for spec, fuse in specs:
        if fuse is not None and blocks and blocks[-1][0] == fuse:
            blocks[-1][1].append(spec)
        else:
            blocks.append((fuse, [spec]))
    sizes = {id(block): sum(spec.size for spec in block[1]) for block in blocks}

    def late(block: tuple[str | None, list[TensorSpec]]) -> tuple[bool, bool, int]:
        size = sizes[id(block)]
        whole = size % PAGE == 0
        small = size < PAGE
        return (not whole, small, -DTYPE_SIZE[block[1][0].dtype] if small else 0)

    placed: list[Placed] = []
    fillers = 0
    position = 0

    def fill_to(unit: int) -> None:
        nonlocal position, fillers
        if gap := -position % unit:
            placed.append(Placed(TensorSpec(f"{PAD_PREFIX}{fillers}", "U8", (gap,)), position))
            fillers += 1
            position += gap

    for block in sorted(blocks, key=late):
        fill_to(PAGE if sizes[id(block)] >= PAGE else DTYPE_SIZE[block[1][0].dtype])
        for spec in block[1]:
            placed.append(Placed(spec, position))
            position += spec.size
    fill_to(PAGE)
    fused = tuple(
        FusedView(name, tuple(spec.name for spec in members))
        for name, members in blocks
        if name and len(members) > 1
    )
    _check_limits(placed)
    return FileLayout(tuple(placed), fused, position)


def _check_limits(placed: Sequence[Placed]) -> None:
    if len(placed) > MAX_TENSORS:
        raise ValueError(
            f"{len(placed)} tensors in one file, more than the {MAX_TENSORS} a small loader takes"
        )
    for tensor in placed:
        name, shape = tensor.spec.name, tensor.spec.shape
        if (
            not 0 < len(name) <= MAX_NAME
            or not name.isascii()
            or not name.isprintable()
            or "\\" in name
            or '"' in name
        ):
            raise ValueError(
                f"the name {name!r} is not 1 to {MAX_NAME} ASCII characters without backslash or quote"
            )
        if len(shape) > 4 or not tensor.spec.size:
            raise ValueError(
                f"{name} has the shape {list(shape)}; a small loader takes at most 4 dimensions and nothing"
                " empty"
            )


def header_json(layout: FileLayout, metadata: dict[str, str]) -> bytes:
    """The header's JSON before padding, in file order."""
    document: dict[str, object] = {"__metadata__": metadata}
    for tensor in layout.tensors:
        spec = tensor.spec
        document[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [tensor.offset, tensor.end],
        }
    return json.dumps(document, separators=(",", ":")).encode("ascii")


def data_start(layout: FileLayout, metadatas: Iterable[dict[str, str]]) -> int:
    """Where data starts in all files of this layout: the whole pages that hold the length and the longest
    header.
    """
    longest = max(len(header_json(layout, metadata)) for metadata in metadatas)
    return -(-(8 + longest) // PAGE) * PAGE


def header_bytes(layout: FileLayout, metadata: dict[str, str], start: int) -> bytes:
    """The file's first `start` bytes: length and JSON, padded with spaces."""
    raw = header_json(layout, metadata)
    return (start - 8).to_bytes(8, "little") + raw + b" " * (start - 8 - len(raw))


#: how the JSON of our headers begins
MARK = b'{"__metadata__":{"format":"marlin-convert",'


def is_marked_shard(start: bytes) -> bool:
    """Whether a file that starts with these bytes is a shard of ours, whole or not."""
    return start[8 : 8 + len(MARK)] == MARK


def format_version(topology: Topology) -> Literal[1, 2]:
    """2 where a loader of version 1 would misread the files."""
    return 1 if topology.plain else 2


class Place(NamedTuple):
    """Which file it is: of what rank (None: common/), of what layer, by its number or name, and stage."""

    rank: Rank
    layer: str
    stage: int = 0


def metadata_of(
    source_id: str, layout_id: str, topology: Topology, place: Place, experts: Sequence[int]
) -> dict[str, str]:
    """The identity of a file of the routed `experts`; where a map places them they are named one by one, in
    the order of their slots.
    """
    key, owned = "expert_range", "0:0"
    if experts and topology.placement is not None:
        key, owned = "expert_slots", ",".join(map(str, experts))
    elif experts:
        owned = f"{experts[0]}:{experts[-1] + 1}"
    apart = {} if topology.attn_tp is None else {"attn_tp": str(topology.attn_tp)}
    apart |= {} if topology.pp == 1 else {"pp": str(topology.pp), "stage": str(place.stage)}
    return {
        "format": FORMAT,
        "format_version": str(format_version(topology)),
        "layout": layout_id,
        "source": source_id,
        "tp": str(topology.tp),
        "ep": str(topology.ep),
        **apart,
        "rank": "common" if place.rank is None else str(place.rank),
        "layer": place.layer,
        key: owned,
    }
