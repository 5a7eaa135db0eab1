"""manifest.json as read: typed, checked for form, its own digest checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from marlin_convert.errors import OutputError, UsageError
from marlin_convert.files import digest
from marlin_convert.shards.format import FORMAT, FORMAT_VERSION

NO_DIGEST = "0" * 32

T = TypeVar("T")


def sealed(document: dict[str, Any]) -> bytes:
    """JSON that carries the digest of its own bytes, taken with 32 zeros in its place; `digest` stands third,
    after the format.
    """
    head = {"format": FORMAT, "format_version": FORMAT_VERSION, "digest": NO_DIGEST}
    raw = json.dumps(head | document, separators=(",", ":")).encode("ascii")
    return raw.replace(NO_DIGEST.encode(), digest(raw).hex().encode(), 1)


def seal_holds(raw: bytes) -> bool:
    """Whether a sealed document is as it was written."""
    key = b'"digest":"'
    at = raw.find(key) + len(key)
    return (
        at >= len(key)
        and digest(raw[:at] + NO_DIGEST.encode() + raw[at + 32 :]).hex().encode() == raw[at : at + 32]
    )


def quantization_config(layout_id: str, num_bits: int, group_size: int, symmetric: bool) -> dict[str, Any]:
    """What stands in the output's config.json; literally in schemas/README.md."""
    return {
        "quant_method": FORMAT,
        "format": layout_id,
        "format_version": FORMAT_VERSION,
        "bits": num_bits,
        "group_size": group_size,
        "symmetric": symmetric,
        "modules": "routed_experts",
    }


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a shard; `offset` from the start of the file, `experts` the place of its digests in
    digests.bin.
    """

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
    """The manifest of a converted folder. Raises OutputError where there is none, or it is damaged or of
    another version.
    """
    path = out / "manifest.json"
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        if not out.is_dir():
            raise UsageError(f"{out} is not a folder") from None
        if (out / "config.json").exists() and not any(out.glob("rank-*")):
            raise UsageError(
                f"{out} is no conversion; if it is the published checkpoint, give the output folder instead"
            ) from None
        what = (
            "its conversion has not finished: run the same convert command again"
            if (out / ".work").exists()
            else "is it a converted folder?"
        )
        raise OutputError(f"{out} has no manifest.json; {what}") from None
    except OSError as error:
        raise OutputError(f"{path}: cannot be read ({error.strerror})") from error
    if not seal_holds(raw):
        raise OutputError(
            f"{path}: its bytes do not match its own digest: it was damaged or edited; make OUT again:"
            " convert with --overwrite"
        )
    return parse_manifest(raw, path)


def parse_manifest(raw: bytes, path: Path) -> Manifest:
    """The typed manifest of `raw`. Raises OutputError."""
    try:
        document = json.loads(raw, object_pairs_hook=_unique)
        found = f"{document['format']} version {document['format_version']!r}"
        if found != f"{FORMAT} version {FORMAT_VERSION}":
            raise OutputError(f"{path}: it is {found}, this program reads {FORMAT} version {FORMAT_VERSION}")
        return _manifest(document)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise OutputError(f"{path}: not a manifest of this format ({error!r})") from error


def _manifest(document: dict[str, Any]) -> Manifest:
    """All that is used, each of its type. Keys that a later release added are left alone."""
    parallel, layout, source, model = (
        _mapping(document[key]) for key in ("parallel", "layout", "source", "model")
    )
    tp, ep = _number(parallel["tp"]), _number(parallel["ep"])
    if not ep or not tp or tp % ep or not _number(layout["group_size"]):
        raise ValueError(f"tp {tp}, ep {ep}, group size {layout['group_size']}")
    if type(document["complete"]) is not bool:
        raise TypeError("complete is not true or false")
    units, shards = _each(_unit, document["units"]), _each(_shard, document["shards"])
    names = [unit.name for unit in units]
    if len(set(names)) != len(names) or not {shard.unit for shard in shards} <= set(names):
        raise ValueError("units and the units of shards do not go together")
    return Manifest(
        document=document,
        tp=tp,
        ep=ep,
        ranks=_numbers(document["ranks"]),
        layers=_numbers(document["layers"]),
        complete=document["complete"],
        checks=_text(document["checks"]),
        layout_id=_text(layout["id"]),
        group_size=_number(layout["group_size"]),
        source_id=_text(source["id"]),
        model=model,
        units=units,
        shards=shards,
        files=tuple(
            ListedFile(_path(file["path"]), _number(file["size"]), _text(file["digest"]))
            for file in document["files"]
        ),
    )


def _unit(unit: dict[str, Any]) -> UnitInfo:
    layer = None if unit["layer"] is None else _number(unit["layer"])
    return UnitInfo(
        _text(unit["name"]), layer, _each(_origin, unit["tensors"]), _each(_text, unit["checked"])
    )


def _origin(tensor: dict[str, Any]) -> Origin:
    axis = None if tensor["axis"] is None else _number(tensor["axis"])
    parts = None if tensor["parts"] is None else _text(tensor["parts"])
    return Origin(_text(tensor["tensor"]), _text(tensor["rule"]), axis, parts, _each(_text, tensor["from"]))


def _shard(shard: dict[str, Any]) -> Shard:
    rank = None if shard["rank"] is None else _number(shard["rank"])
    tensors, fused = _each(_stored, shard["tensors"]), _each(_fused, shard["fused"])
    return Shard(
        _path(shard["path"]),
        _text(shard["unit"]),
        rank,
        _number(shard["size"]),
        _digest(shard["header"]),
        _digest(shard["digest"]),
        tensors,
        fused,
    )


def _stored(tensor: dict[str, Any]) -> StoredTensor:
    experts = _number(tensor["experts"]) if "experts" in tensor else None
    return StoredTensor(
        _text(tensor["name"]),
        _text(tensor["dtype"]),
        _numbers(tensor["shape"]),
        _number(tensor["offset"]),
        _number(tensor["size"]),
        _digest(tensor["digest"]),
        experts,
    )


def _fused(view: dict[str, Any]) -> FusedTensor:
    members = _each(_text, view["members"])
    return FusedTensor(
        _text(view["name"]), _text(view["dtype"]), _numbers(view["shape"]), _number(view["offset"]), members
    )


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{str(value)[:40]!r} where an object should be")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise TypeError(f"{str(value)[:40]!r} where a number should be")
    return value


def _each(read: Callable[[Any], T], value: Any) -> tuple[T, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{str(value)[:40]!r} where a list should be")
    return tuple(map(read, value))


def _numbers(value: Any) -> tuple[int, ...]:
    return _each(_number, value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} where a text should be")
    return value


def _digest(value: Any) -> str:
    if len(bytes.fromhex(_text(value))) != 16:
        raise ValueError(f"{value!r} where a digest should be")
    return str(value)


def _path(value: Any) -> str:
    if not _text(value) or ".." in value.split("/") or value.startswith("/"):
        raise ValueError(f"the path {value!r} leaves the folder")
    return str(value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key stands twice")
    return document
