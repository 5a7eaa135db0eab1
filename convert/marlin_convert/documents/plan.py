"""What `plan --json` prints: the files that a conversion would write, and their sizes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from marlin_convert.documents.fields import (
    AttnTp,
    Count,
    Dtype,
    Ep,
    Offset,
    OneOrMore,
    Pp,
    Shape,
    ShardPath,
    ShardSize,
    Share,
    TensorName,
    Text,
    Tp,
    UnitName,
    about,
)
from marlin_convert.documents.identity import Commit, QuantizationAt, Repo
from marlin_convert.documents.manifest import OptionalPadding


class PlanSource(Struct, frozen=True, omit_defaults=True):
    """The checkpoint."""

    label: Annotated[Text, about("the source as it was given")]
    files: Annotated[OneOrMore, about("weight files")]
    tensors: Annotated[OneOrMore, about("tensors")]
    payload_bytes: Annotated[OneOrMore, about("bytes of all tensors")]
    quantization_config_at: QuantizationAt
    repo: Repo = None
    revision: Commit = None


class PlanBytes(Struct, frozen=True, omit_defaults=True):
    """Sizes."""

    output: Annotated[OneOrMore, about("all shard files")]
    rank: Annotated[OneOrMore, about("tensors that one rank loads")]
    fetched: Annotated[Count | None, about("of a repository: bytes that come over the wire")] = None
    staged: Annotated[Count | None, about("of them, most at a time with --free-source")] = None


class PlanProspect(Struct, frozen=True):
    """What convert would do in OUT now. Rates are those of a short measurement."""

    action: Annotated[
        Text,
        about("what it would do there", enum=["new", "continue", "repair", "replace", "done"]),
    ]
    units: Annotated[Count, about("units that are left to make")]
    read: Annotated[Count, about("source bytes that they are made of")]
    written: Annotated[Count, about("bytes of their files")]
    needed: Annotated[Count, about("bytes of space that it takes, documents and fetched files included")]
    free: Annotated[Count, about("free space there, with what goes away before")]
    read_rate: Annotated[Share | None, about("bytes a second of the source; null where not measured")]
    write_rate: Annotated[Share | None, about("bytes a second of the place; null where not measured")]
    seconds: Annotated[Share | None, about("about what it takes where the disk decides")]


class PlanResources(Struct, frozen=True):
    """What convert would take of this machine unless it is told, and which limit decided that."""

    threads: Annotated[OneOrMore, about("worker threads")]
    threads_by: Annotated[Text, about("what decided them: cores, a control group's file or ulimit")]
    memory: Annotated[Count, about("bytes for buffers")]
    memory_by: Annotated[Text, about("what decided them: threads, available memory, a file or ulimit")]


class PlanTensor(Struct, frozen=True):
    """A tensor of each of a unit's files."""

    name: Annotated[TensorName, about("name; __pad__.N is a filler")]
    dtype: Annotated[Dtype, about("safetensors dtype")]
    shape: Annotated[Shape, about("shape in each file")]
    offset: Annotated[Offset, about("from the start of the file")]
    size: Annotated[OneOrMore, about("bytes")]
    rule: Annotated[Text, about("how it is cut; filler for what only fills a page")]


class PlanView(Struct, frozen=True):
    """Neighbours that may be read as one tensor."""

    name: Annotated[TensorName, about("name of the view")]
    members: Annotated[tuple[TensorName, ...], Meta(min_length=2), about("tensors it is made of")]


class PlanUnit(Struct, frozen=True):
    """What the files of a unit hold."""

    unit: Annotated[UnitName, about("the unit")]
    paths: Annotated[tuple[ShardPath, ...], Meta(min_length=1), about("its file for each rank")]
    file_size: Annotated[ShardSize, about("bytes of each")]
    tensors: Annotated[tuple[PlanTensor, ...], Meta(min_length=1), about("in file order")]
    fused: Annotated[tuple[PlanView, ...], about("tensors that may be read as one")]


class Plan(Struct, frozen=True):
    """Everything that a conversion with these options would write."""

    source: Annotated[PlanSource, about("the checkpoint")]
    layout: Annotated[Text, about("layout of the stacked tensors")]
    tp: Tp
    ep: Ep
    attn_tp: AttnTp
    pp: Pp
    slots: Annotated[OneOrMore, about("slots of a layer's routed experts: as many as experts without a map")]
    moe_tp: Annotated[OneOrMore, about("slices of one expert")]
    ranks: Annotated[tuple[Count, ...], about("ranks that would be made", uniqueItems=True)]
    layers: Annotated[tuple[Count, ...], about("layers that would be made", uniqueItems=True)]
    complete: Annotated[bool, about("whether that is all there is")]
    padding: OptionalPadding
    bytes: Annotated[PlanBytes, about("sizes")]
    resources: Annotated[PlanResources, about("what convert would take of this machine")]
    units: Annotated[tuple[PlanUnit, ...], Meta(min_length=1), about("what each unit's files hold")]
    copied: Annotated[tuple[Text, ...], about("small files that are copied")]
    left_out: Annotated[tuple[Text, ...], about("what is not")]
    notes: Annotated[tuple[Text, ...], about("what a person should know")]
    convert: Annotated[
        PlanProspect | None,
        about("what convert would do in OUT now; null where no place is given or it refuses"),
    ]
    refusal: Annotated[
        Text | None, about("why convert would refuse, with what plan's exit code is; null where it would not")
    ]
