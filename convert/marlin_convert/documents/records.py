"""What OUT/.work holds until a conversion is done, for the next run to continue; what `download` leaves."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from marlin_convert.documents.codec import read, write
from marlin_convert.documents.fields import (
    AttnTp,
    Checks,
    Digest,
    Ep,
    Number,
    Positive,
    Pp,
    RelativePath,
    TensorName,
    Text,
    Tp,
    UnitName,
    about,
)
from marlin_convert.documents.identity import SourceIdentity
from marlin_convert.errors import OutputError
from marlin_convert.storage.files import digest

#: the folder, inside OUT
WORK = ".work"
#: files in it that are locked, never read: by who writes in OUT, and for a moment by one of several that do
LOCK, TURN = "lock", "turn"


class JobOptions(Struct, frozen=True, omit_defaults=True):
    """What must be the same for a run to continue another."""

    format_version: Annotated[Positive, about("version of the format", enum=[1, 2])]
    layout: Annotated[Text, about("layout id")]
    rules: Annotated[Digest, about("xxh3-128 of the rule table")]
    tp: Tp
    ep: Ep
    ranks: Annotated[tuple[Number, ...], about("ranks asked for", uniqueItems=True)]
    layers: Annotated[tuple[Number, ...], about("layers asked for", uniqueItems=True)]
    complete: Annotated[bool, about("whether that is all")]
    verify: Annotated[Checks, about("what is proven while converting: none, exact or kernel")]
    attn_tp: AttnTp | None = None
    pp: Pp = 1
    expert_map: Annotated[Digest | None, about("stands for the placement of routed experts")] = None


class JobRecord(Struct, frozen=True):
    """job.json: what was begun."""

    format: Annotated[Literal["marlin-convert"], about("the mark by which a folder is known to be ours")]
    options: Annotated[JobOptions, about("what must be the same to continue")]
    identity: Annotated[SourceIdentity, about("the source, as in the manifest")]
    stamps: Annotated[
        dict[str, Annotated[list[Number], Meta(min_length=3, max_length=3)]],
        about("per source file its size, and the times of modification and of change in ns"),
    ]


class Removal(Struct, frozen=True):
    """removing.json: a conversion that is being removed."""

    format: Annotated[Literal["marlin-convert"], about("the mark by which a folder is known to be ours")]
    files: Annotated[tuple[RelativePath, ...], about("the files that are of it")]


class FinishedFile(Struct, frozen=True):
    """A written file."""

    rank: Annotated[Number | None, about("rank; null for common")]
    size: Annotated[Positive, about("bytes of the file")]
    header: Annotated[Digest, about("digest of its first 8 + H bytes")]
    tensors: Annotated[dict[TensorName, Digest], about("digest of each tensor, fillers included")]


class ExpertDigests(Struct, frozen=True, array_like=True):
    """Rank, stacked tensor, and its experts' digests joined, 16 bytes each."""

    rank: Number | None
    tensor: TensorName
    digests: bytes


class FinishedUnit(Struct, frozen=True):
    """A unit whose files are durable: all that the manifest needs of it."""

    name: Annotated[UnitName, about("the unit")]
    files: Annotated[tuple[FinishedFile, ...], Meta(min_length=1), about("one file a rank")]
    experts: Annotated[
        tuple[ExpertDigests, ...],
        about("rank, stacked tensor, and its experts' digests joined, in base64"),
    ]
    source: Annotated[dict[Text, Digest], about("digest of each source tensor that was read")]


class Record(Struct, frozen=True):
    """units/UNIT.json: a finished unit, and what tells that the file is whole."""

    digest: Annotated[Digest, about("xxh3-128 of the text in unit")]
    unit: Annotated[
        str,
        about(
            "the finished unit as JSON text",
            contentMediaType="application/json",
            contentSchema={"$ref": "#/$defs/FinishedUnit"},
        ),
    ]


def write_record(unit: FinishedUnit) -> bytes:
    """The bytes of a unit's record."""
    body = write(unit)
    return write(Record(digest(body).hex(), body.decode()))


def read_record(raw: bytes, where: str) -> FinishedUnit:
    """The unit of a record. Raises OutputError where it is not whole."""
    complaint = f"{where} is damaged"
    record = read(raw, Record, complaint)
    if digest(record.unit.encode()).hex() != record.digest:
        raise OutputError(f"{complaint} (its text does not match its digest)")
    return read(record.unit.encode(), FinishedUnit, complaint)


class DownloadRecord(Struct, frozen=True):
    """.marlin-convert-source.json beside downloaded files: where they come from."""

    repo: Annotated[Text, about("the hub repository")]
    revision: Annotated[Text, about("its commit")]
    files: Annotated[
        dict[RelativePath, tuple[Number, str | None]],
        about(
            "per file its bytes, and the sha256 that the hub publishes of it; of a small file git's digest"
        ),
    ]
