"""What `convert`, `download` and `inspect` print with --json."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from marlin_convert.documents.fields import Count, Ep, OneOrMore, Seconds, Text, Tp, about
from marlin_convert.documents.provenance import StageTimes


class ConvertResult(Struct, frozen=True):
    """What a run of `convert` did."""

    out: Annotated[Text, about("the converted folder")]
    units_made: Annotated[Count, about("units made now")]
    made_bytes: Annotated[Count, about("bytes of their shard files")]
    units_found: Annotated[Count, about("units that an earlier run had made")]
    output_bytes: Annotated[OneOrMore, about("bytes of all shard files")]
    seconds: Annotated[Seconds, about("from begin to end")]
    stages: StageTimes


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
    file_size: Annotated[OneOrMore, about("bytes of each")] = field(name="bytes of a file")


class InspectedFolder(Struct, frozen=True):
    """A converted folder."""

    layout: Annotated[Text, about("layout of the stacked tensors")]
    group_size: Annotated[OneOrMore, about("weights that share a scale")]
    tp: Tp
    ep: Ep
    ranks: Annotated[Text, about("how many of how many ranks are here")]
    complete: Annotated[bool, about("whether all of the model is here")]
    checks: Annotated[Text, about("none, exact or kernel")] = field(name="checks while converting")
    source: Annotated[Text, about("id, tensors and bytes of the source, in words")]
    bytes: Annotated[OneOrMore, about("bytes of all shard files")]
    units: Annotated[tuple[InspectedUnit, ...], about("every unit")]


class InspectedEntry(Struct, frozen=True):
    """A tensor of a file, by its header."""

    tensor: Annotated[str, about("name")]
    dtype: Annotated[Text, about("safetensors dtype")]
    shape: Annotated[str, about("extents, joined by x")]
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
    share: Annotated[Text, about("of all, in percent")]


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
    not_finite: Annotated[Count | None, about("how many values are infinite or no number")] = field(
        name="not finite", default=None
    )
    first: Annotated[tuple[float | None, ...] | None, about("the first four values")] = None
