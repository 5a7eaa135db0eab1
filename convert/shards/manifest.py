"""manifest.json as read: typed, checked for form, its own digest checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.errors import OutputError
from convert.files import digest
from convert.shards.format import FORMAT, FORMAT_VERSION

NO_DIGEST = "0" * 32


def sealed(document: dict[str, Any]) -> bytes:
    """JSON that carries the digest of its own bytes, taken with 32 zeros in its place; `digest` stands third, after the format."""
    head = {"format": FORMAT, "format_version": FORMAT_VERSION, "digest": NO_DIGEST}
    raw = json.dumps(head | document, separators=(",", ":")).encode("ascii")
    return raw.replace(NO_DIGEST.encode(), digest(raw).hex().encode(), 1)


def seal_holds(raw: bytes) -> bool:
    """Whether a sealed document is as it was written."""
    key = b'"digest":"'
    at = raw.find(key) + len(key)
    return at >= len(key) and digest(raw[:at] + NO_DIGEST.encode() + raw[at + 32 :]).hex().encode() == raw[at : at + 32]


def quantization_config(layout_id: str, num_bits: int, group_size: int, symmetric: bool) -> dict[str, Any]:
    """What stands in the output's config.json; literally in schemas/README.md."""
    return {
        "quant_method": FORMAT, "format": layout_id, "format_version": FORMAT_VERSION, "bits": num_bits,
        "group_size": group_size, "symmetric": symmetric, "modules": "routed_experts",
    }  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a shard; `offset` from the start of the file, `experts` the place of its digests in digests.bin."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int
    digest: str
    experts: int | None = None


@dataclass(frozen=True)
class FusedTensor:
    """Neighbours that may be read as one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class Shard:
    """One shard file; `rank` None is common/."""

    path: str
    unit: str
    rank: int | None
    size: int
    header: str
    digest: str
    tensors: tuple[StoredTensor, ...]
    fused: tuple[FusedTensor, ...]


@dataclass(frozen=True)
class Origin:
    """How a stored tensor came to be; `sources` may hold `{expert}`."""

    tensor: str
    rule: str
    axis: int | None
    parts: str | None
    sources: tuple[str, ...]


@dataclass(frozen=True)
class UnitInfo:
    """The origins of a unit's tensors, and the source tensors that are only checked."""

    name: str
    layer: int | None
    tensors: tuple[Origin, ...]
    checked: tuple[str, ...]


@dataclass(frozen=True)
class ListedFile:
    """A file beside the shards."""

    path: str
    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """The whole manifest; `document` is the JSON as it stands."""

    document: dict[str, Any]
    tp: int
    ep: int
    ranks: tuple[int, ...]
    layers: tuple[int, ...]
    complete: bool
    checks: str
    layout_id: str
    group_size: int
    source_id: str
    model: dict[str, Any]
    units: tuple[UnitInfo, ...]
    shards: tuple[Shard, ...]
    files: tuple[ListedFile, ...]


def read_manifest(out: Path) -> Manifest:
    """The manifest of a converted folder. Raises OutputError where there is none, or it is damaged or of another version."""
    path = out / "manifest.json"
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        what = "its conversion has not finished: run the same convert command again" if (out / ".work").exists() else "is it a converted folder?"
        raise OutputError(f"{out} has no manifest.json; {what}") from None
    except OSError as error:
        raise OutputError(f"{path}: cannot be read ({error.strerror})") from error
    if not seal_holds(raw):
        raise OutputError(f"{path}: its bytes do not match its own digest: it was damaged or edited; convert again")
    return parse_manifest(raw, path)


def parse_manifest(raw: bytes, path: Path) -> Manifest:
    """The typed manifest of `raw`. Raises OutputError."""
    try:
        document = json.loads(raw, object_pairs_hook=_unique)
        found = f"{document['format']} version {document['format_version']}"
        if found != f"{FORMAT} version {FORMAT_VERSION}":
            raise OutputError(f"{path}: it is {found}, this program reads {FORMAT} version {FORMAT_VERSION}")
        return Manifest(
            document=document, tp=document["parallel"]["tp"], ep=document["parallel"]["ep"], ranks=tuple(document["ranks"]),
            layers=tuple(document["layers"]), complete=document["complete"], checks=document["checks"], layout_id=document["layout"]["id"],
            group_size=document["layout"]["group_size"], source_id=document["source"]["id"], model=document["model"],
            units=tuple(_unit(unit) for unit in document["units"]), shards=tuple(_shard(shard) for shard in document["shards"]),
            files=tuple(ListedFile(**file) for file in document["files"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise OutputError(f"{path}: not a manifest of this format ({error!r})") from error


def _unit(unit: dict[str, Any]) -> UnitInfo:
    origins = (Origin(t["tensor"], t["rule"], t["axis"], t["parts"], tuple(t["from"])) for t in unit["tensors"])
    return UnitInfo(unit["name"], unit["layer"], tuple(origins), tuple(unit["checked"]))


def _shard(shard: dict[str, Any]) -> Shard:
    tensors = tuple(StoredTensor(**(t | {"shape": tuple(t["shape"])})) for t in shard["tensors"])
    fused = tuple(FusedTensor(**(v | {"shape": tuple(v["shape"]), "members": tuple(v["members"])})) for v in shard["fused"])
    return Shard(shard["path"], shard["unit"], shard["rank"], shard["size"], shard["header"], shard["digest"], tensors, fused)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key stands twice")
    return document
