"""What engines read beside the shards: the quantization_config in config.json, and the index of a rank."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from marlin_convert.documents.fields import Bits, GroupSize, LayoutId, Positive, Symmetric, Text, about
from marlin_convert.storage.shard_file import FORMAT, FORMAT_VERSIONS


class QuantizationConfig(Struct, frozen=True):
    """Stands in config.json where the source had its own, and nowhere else."""

    quant_method: Annotated[
        Text, about("so that no engine takes the weights for something else", enum=[FORMAT])
    ]
    format: Annotated[LayoutId, about("layout id")]
    format_version: Annotated[Positive, about("version of the format", enum=[*FORMAT_VERSIONS])]
    bits: Bits
    group_size: GroupSize
    symmetric: Symmetric
    modules: Annotated[Text, about("what is quantized", enum=["routed_experts"])]


def quantization_config(
    layout_id: str, version: int, bits: int, group_size: int, symmetric: bool
) -> QuantizationConfig:
    """What stands in the output's config.json; literally in schemas/README.md."""
    return QuantizationConfig(FORMAT, layout_id, version, bits, group_size, symmetric, "routed_experts")


class IndexMetadata(Struct, frozen=True):
    """Sizes."""

    total_size: Annotated[Positive, about("bytes of all tensors, fillers not counted")]


class Index(Struct, frozen=True):
    """model.safetensors.index.json of a rank, or of common/."""

    metadata: Annotated[IndexMetadata, about("sizes")]
    weight_map: Annotated[
        dict[
            Annotated[Text, Meta(extra_json_schema={"not": {"pattern": "^__pad__\\."}})],
            Annotated[str, Meta(pattern="^(layer-[0-9]{3,}|top|embed|head|common)\\.safetensors$")],
        ],
        Meta(min_length=1),
        about("tensor to file in the same folder; fillers are not in it"),
    ]
