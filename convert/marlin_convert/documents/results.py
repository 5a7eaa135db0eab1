"""What `convert`, `download`, `inspect` and `diff` print with --json."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from marlin_convert.documents.fields import (
    AttnTp,
    Checks,
    Count,
    Digest,
    Ep,
    OneOrMore,
    Pp,
    Seconds,
    Share,
    Slots,
    Text,
    Tp,
    about,
)
from marlin_convert.documents.identity import Commit, Repo
from marlin_convert.documents.provenance import StageTimes


class ConvertResult(Struct, frozen=True):
    """What a run of `convert` or `reshard` did."""

    out: Annotated[Text, about("the converted folder")]
    action: Annotated[Text, about("new, continue, repair, replace, or done: nothing was to do")]
    units_made: Annotated[Count, about("units made now")]
    made_bytes: Annotated[Count, about("bytes of their shard files")]
    units_found: Annotated[Count, about("units that an earlier run had made")]
    output_bytes: Annotated[OneOrMore, about("bytes of all shard files")]
    seconds: Annotated[Seconds, about("from begin to end")]
    stages: StageTimes
    waiting: Annotated[
        tuple[Count, ...],
        about("with --shard, the shares whose units are not made yet; without any OUT is finished"),
    ]


class DownloadResult(Struct, frozen=True):
    """What lies in a folder after `download`."""

    repo: Annotated[Text, about("the hub repository")]
    revision: Annotated[Text, about("its commit")]
    folder: Annotated[Text, about("where the files are")]
    files: Annotated[dict[Text, Count], about("name and bytes of each file")]


class InspectedUnit(Struct, frozen=True):
    """The files of one unit."""

    unit: Annotated[Text, about("the unit")]
    files: Annotated[OneOrMore, about("its files")]
    tensors: Annotated[OneOrMore, about("tensors of each, fillers not counted")]
    file_size: Annotated[OneOrMore, about("bytes of each")]


class InspectedSource(Struct, frozen=True, omit_defaults=True):
    """What a folder was made from."""

    id: Annotated[Digest, about("source id")]
    tensors: Annotated[OneOrMore, about("its tensors")]
    payload_bytes: Annotated[OneOrMore, about("bytes of all of them")]
    repo: Repo = None
    revision: Commit = None


class InspectedFolder(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A converted folder."""

    layout: Annotated[Text, about("layout of the stacked tensors")]
    group_size: Annotated[OneOrMore, about("weights that share a scale")]
    tp: Tp
    ep: Ep
    attn_tp: AttnTp
    pp: Pp
    slots: Slots | None = None
    ranks: Annotated[tuple[Count, ...], about("ranks that are here", uniqueItems=True)]
    layers: Annotated[tuple[Count, ...], about("layers that are here", uniqueItems=True)]
    complete: Annotated[bool, about("whether all of the model is here")]
    missing: Annotated[tuple[Text, ...], about("shards that are gone or of another size")]
    checks: Annotated[Checks, about("what was proven while converting")]
    source: InspectedSource
    bytes: Annotated[OneOrMore, about("bytes of all shard files")]
    units: Annotated[tuple[InspectedUnit, ...], about("every unit")]


class InspectedEntry(Struct, frozen=True):
    """A tensor of a file, by its header."""

    tensor: Annotated[str, about("name")]
    dtype: Annotated[Text, about("safetensors dtype")]
    shape: Annotated[tuple[Count, ...], about("extents")]
    offset: Annotated[Count, about("first byte, from the start of the file")]
    size: Annotated[Count, about("bytes")]


class InspectedFile(Struct, frozen=True):
    """A safetensors file."""

    metadata: Annotated[dict[str, str], about("the header's __metadata__")]
    bytes: Annotated[OneOrMore, about("bytes of the file")]
    tensors: Annotated[tuple[InspectedEntry, ...], about("in file order")]


class Code(Struct, frozen=True):
    """How often a 4 bit code occurs."""

    code: Annotated[int, Meta(ge=0, le=15), about("as stored")]
    value: Annotated[int, Meta(ge=-8, le=7), about("what it stands for, before the scale")]
    count: Annotated[Count, about("how often")]
    share: Annotated[Share, about("of all, from 0 to 1")]


class InspectedTensor(Struct, frozen=True, omit_defaults=True):
    """One tensor. Packed weights have `codes`, others the rest; null stands for what is not finite."""

    tensor: Annotated[str, about("name")]
    dtype: Annotated[Text, about("safetensors dtype")]
    shape: Annotated[tuple[Count, ...], about("extents")]
    bytes: Annotated[Count, about("bytes")]
    codes: Annotated[tuple[Code, ...] | None, about("all sixteen")] = None
    minimum: Annotated[float | None, about("smallest value")] = None
    maximum: Annotated[float | None, about("largest value")] = None
    zeros: Annotated[Count | None, about("how many values are zero")] = None
    not_finite: Annotated[Count | None, about("how many values are infinite or no number")] = None
    first: Annotated[tuple[float | None, ...] | None, about("the first four values")] = None


class DifferingPart(Struct, frozen=True, omit_defaults=True):
    """What two conversions differ in."""

    path: Annotated[Text, about("the shard or document; `source` for a source tensor")]
    what: Annotated[
        Text,
        about("how", enum=["differs", "only in the first", "only in the second"]),
    ]
    tensor: Annotated[Text | None, about("the tensor, where it is one")] = None
    experts: Annotated[
        tuple[int, ...] | None, about("of a stacked tensor the experts, numbered as in the source")
    ] = None
    keys: Annotated[tuple[Text, ...] | None, about("of manifest.json the keys that differ")] = None


class Differences(Struct, frozen=True):
    """What `diff` finds in two converted folders."""

    one: Annotated[Text, about("the first folder")]
    other: Annotated[Text, about("the second")]
    by: Annotated[Text, about("what was compared", enum=["shards", "source tensors"])]
    same: Annotated[bool, about("whether nothing differs")]
    compared: Annotated[Count, about("how many of them")]
    parts: Annotated[tuple[DifferingPart, ...], about("what differs")]

    def __bool__(self) -> bool:
        return self.same
