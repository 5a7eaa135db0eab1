"""The values that documents are made of, with their ranges, for readers and schemas alike."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from marlin_convert.documents.bounds import MAX_SLOTS
from marlin_convert.slicing import MAX_TP


def about(description: str, **schema: Any) -> Meta:
    """What a key means, for its schema; more keywords go into the schema as they are, and bind the writer
    alone: what a reader does with another value is for its code to say.
    """
    return Meta(description=description, extra_json_schema=schema or None)


#: sizes, offsets, counts: sums of a few of them stay in 64 bits
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
Positive = Annotated[int, Meta(ge=1, lt=1 << 62)]
Tp = Annotated[int, Meta(ge=1, le=MAX_TP), about("ranks in all")]
Ep = Annotated[int, Meta(ge=1, le=MAX_TP), about("groups of ranks that the routed experts are split over")]
AttnTp = Annotated[
    int,
    Meta(ge=1, le=MAX_TP),
    about("slices of attention and of dense layers; rank r holds slice r % attn_tp"),
]
Pp = Annotated[int, Meta(ge=1, le=MAX_TP), about("pipeline stages, each with all tp ranks")]
Slots = Annotated[
    int,
    Meta(ge=1, le=MAX_SLOTS),
    about("where a map places experts: slots of a layer's routed experts, ep groups of as many"),
]
#: of reports, which are only written
Count = Annotated[int, Meta(ge=0)]
OneOrMore = Annotated[int, Meta(ge=1)]
#: xxh3-128
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
Text = Annotated[str, Meta(min_length=1)]
#: a file's place in a folder, which it does not leave
RelativePath = Annotated[str, Meta(pattern=r"^(?!/)(?!([^\x00]*/)?\.\.(/|$))[^\x00]+$")]
#: the names of this release; a reader goes by what stands there
UnitName = Annotated[Text, Meta(extra_json_schema={"pattern": "^(layer-[0-9]{3,}|top|embed|head|common)$"})]
ShardPath = Annotated[
    RelativePath,
    Meta(
        extra_json_schema={
            "allOf": [
                {
                    "pattern": "^(stage-[0-9]{2,}-of-[0-9]{2,}/)?(common|rank-[0-9]{2,}-of-[0-9]{2,})"
                    "/(layer-[0-9]{3,}|top|embed|head|common)\\.safetensors$"
                }
            ]
        }
    ),
]
TensorName = Annotated[str, Meta(min_length=1, max_length=127, pattern=r'^[^\\"]*$')]
#: as safetensors names them
Dtype = Annotated[
    str, Meta(pattern="^(BOOL|U8|I8|F8_E4M3|F8_E5M2|I16|U16|F16|BF16|I32|U32|F32|I64|U64|F64)$")
]
#: the values of this release; a reader goes by what stands there
LayoutId = Annotated[Text, Meta(extra_json_schema={"enum": ["moe_wna16_marlin.u4b8"]})]
Bits = Annotated[Positive, about("bits of a weight", enum=[4])]
GroupSize = Annotated[Positive, about("weights that share a scale", enum=[32, 64, 128])]
Symmetric = Annotated[bool, about("no zero points", enum=[True])]
Shape = Annotated[tuple[Positive, ...], Meta(max_length=4)]
Seconds = Annotated[float, Meta(ge=0)]
#: a ratio, a mean or an error
Share = Annotated[float, Meta(ge=0)]
#: from the start of a shard, behind its header
Offset = Annotated[int, Meta(ge=4096, lt=1 << 62)]
ShardSize = Annotated[int, Meta(ge=8192, lt=1 << 62, multiple_of=4096)]
Checks = Annotated[str, Meta(pattern="^(none|exact|kernel)$")]
