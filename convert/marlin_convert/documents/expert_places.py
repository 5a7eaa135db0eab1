"""experts.json in a rank's folder: where each of its experts lies, for who moves or places single ones."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from marlin_convert.documents.fields import Digest, Number, Offset, Positive, TensorName, UnitName, about

EXPERTS_NAME = "experts.json"


class ExpertPlace(Struct, frozen=True):
    """An expert in a shard."""

    expert: Annotated[Number, about("its number in the model")]
    ranges: Annotated[
        tuple[tuple[Offset, Positive], ...],
        Meta(min_length=1),
        about("offset from the start of the file and bytes of its part of each stacked tensor, in order"),
    ]


class UnitExperts(Struct, frozen=True):
    """The experts of a layer on this rank."""

    unit: Annotated[UnitName, about("the unit")]
    file: Annotated[
        str, Meta(pattern="^layer-[0-9]{3,}\\.safetensors$"), about("the shard, in the same folder")
    ]
    tensors: Annotated[
        tuple[TensorName, ...], Meta(min_length=1), about("the stacked tensors, in file order")
    ]
    experts: Annotated[
        tuple[ExpertPlace, ...], Meta(min_length=1), about("in the order of the stacked tensors")
    ]


class ExpertPlaces(Struct, frozen=True):
    """The whole of experts.json."""

    format: Annotated[Literal["marlin-convert"], about("what wrote it")]
    format_version: Annotated[Literal[1, 2], about("version of the format")]
    source: Annotated[Digest, about("the source id, as in the header of every shard")]
    units: Annotated[tuple[UnitExperts, ...], about("the layers that have routed experts")]
