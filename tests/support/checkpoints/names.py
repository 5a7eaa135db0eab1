"""Names, dtypes and shapes of the tensors of a Kimi-K2 checkpoint, and the files they are in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

Form = Literal["k26", "k2-thinking"]
ShapeDtype = Literal["I32", "I64"]

ITEM_SIZES = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8}
TEXT_PREFIX = {"k26": "language_model.", "k2-thinking": ""}


@dataclass(frozen=True)
class Dims:
    """The numbers that the shapes follow from. The defaults are small, and let tp be 1, 2, 4 or 8."""

    hidden: int = 256
    intermediate: int = 512
    moe_intermediate: int = 512
    layers: int = 3
    first_k_dense: int = 1
    experts: int = 16
    shared_experts: int = 1
    top_k: int = 4
    heads: int = 8
    nope: int = 32
    rope: int = 16
    v: int = 32
    q_lora: int = 64
    kv_lora: int = 64
    vocab: int = 512
    group: int = 32
    vt_hidden: int = 32
    vt_intermediate: int = 72
    vt_heads: int = 2
    vt_layers: int = 2
    patch: int = 4
    pos_height: int = 8
    pos_width: int = 8
    merge: int = 2

    def expert_shape(self, projection: str) -> tuple[int, int]:
        """Outputs and inputs of a projection of a routed expert."""
        if projection == "down":
            return self.hidden, self.moe_intermediate
        return self.moe_intermediate, self.hidden


SMALL = Dims()
FULL = Dims(
    hidden=7168,
    intermediate=18432,
    moe_intermediate=2048,
    layers=61,
    experts=384,
    top_k=8,
    heads=64,
    nope=128,
    rope=64,
    v=128,
    q_lora=1536,
    kv_lora=512,
    vocab=163840,
    vt_hidden=1152,
    vt_intermediate=4304,
    vt_heads=16,
    vt_layers=27,
    patch=14,
    pos_height=64,
    pos_width=64,
)


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint; expert tensors also say which expert's and projection's they are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layer: int = -1
    expert: int = -1
    projection: str = ""

    @property
    def nbytes(self) -> int:
        """Size of the payload."""
        return ITEM_SIZES[self.dtype] * prod(self.shape)


def plan_files(dims: Dims, form: Form = "k26", shape_dtype: ShapeDtype = "I32") -> list[list[Tensor]]:
    """The tensors of each file, in the order of names: one layer a file, then the top, projector and
    tower.
    """
    prefix = TEXT_PREFIX[form]
    files = [list(_layer(dims, layer, prefix, shape_dtype)) for layer in range(dims.layers)]
    files.append(list(_top(dims, prefix)))
    if form == "k26":
        return [*files, list(_projector(dims)), list(_tower(dims))]
    for layer, file in enumerate(files[:-1]):
        # 256 bytes a layer at full size, which is what K2-Thinking's files have over the text part of K2.6.
        file.append(Tensor(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq", "F32", (dims.rope,), layer))
    return files


def split_layer_files(files: list[list[Tensor]]) -> list[list[Tensor]]:
    """Cuts the first MoE layer in two files, through the middle of an expert.

    The cut falls between an expert's packed gate and its scale, so that not even one matrix is whole in a
    file.
    """
    at = next(i for i, file in enumerate(files) if any(t.expert >= 0 for t in file))
    middle = (max(t.expert for t in files[at]) + 1) // 2
    cut = (
        next(i for i, t in enumerate(files[at]) if t.expert == middle and t.name.endswith("weight_packed"))
        + 1
    )
    return [*files[:at], files[at][:cut], files[at][cut:], *files[at + 1 :]]


def _layer(dims: Dims, layer: int, prefix: str, shape_dtype: ShapeDtype) -> Iterator[Tensor]:
    base = f"{prefix}model.layers.{layer}."
    for name, shape in _attention_shapes(dims).items():
        yield Tensor(f"{base}{name}.weight", "BF16", shape, layer)
    if layer < dims.first_k_dense:
        yield from _mlp(f"{base}mlp.", layer, dims.hidden, dims.intermediate)
        return
    yield Tensor(f"{base}mlp.gate.weight", "BF16", (dims.experts, dims.hidden), layer)
    yield Tensor(f"{base}mlp.gate.e_score_correction_bias", "F32", (dims.experts,), layer)
    yield from _mlp(
        f"{base}mlp.shared_experts.", layer, dims.hidden, dims.shared_experts * dims.moe_intermediate
    )
    for expert in range(dims.experts):
        for projection in ("gate", "up", "down"):
            rows, columns = dims.expert_shape(projection)
            stem = f"{base}mlp.experts.{expert}.{projection}_proj."
            of = (layer, expert, projection)
            yield Tensor(f"{stem}weight_packed", "I32", (rows, columns // 8), *of)
            yield Tensor(f"{stem}weight_scale", "BF16", (rows, columns // dims.group), *of)
            yield Tensor(f"{stem}weight_shape", shape_dtype, (2,), *of)


def _attention_shapes(dims: Dims) -> dict[str, tuple[int, ...]]:
    return {
        "input_layernorm": (dims.hidden,),
        "self_attn.q_a_proj": (dims.q_lora, dims.hidden),
        "self_attn.q_a_layernorm": (dims.q_lora,),
        "self_attn.q_b_proj": (dims.heads * (dims.nope + dims.rope), dims.q_lora),
        "self_attn.kv_a_proj_with_mqa": (dims.kv_lora + dims.rope, dims.hidden),
        "self_attn.kv_a_layernorm": (dims.kv_lora,),
        "self_attn.kv_b_proj": (dims.heads * (dims.nope + dims.v), dims.kv_lora),
        "self_attn.o_proj": (dims.hidden, dims.heads * dims.v),
        "post_attention_layernorm": (dims.hidden,),
    }


def _mlp(base: str, layer: int, hidden: int, intermediate: int) -> Iterator[Tensor]:
    yield Tensor(f"{base}gate_proj.weight", "BF16", (intermediate, hidden), layer)
    yield Tensor(f"{base}up_proj.weight", "BF16", (intermediate, hidden), layer)
    yield Tensor(f"{base}down_proj.weight", "BF16", (hidden, intermediate), layer)


def _top(dims: Dims, prefix: str) -> Iterator[Tensor]:
    yield Tensor(f"{prefix}model.embed_tokens.weight", "BF16", (dims.vocab, dims.hidden))
    yield Tensor(f"{prefix}model.norm.weight", "BF16", (dims.hidden,))
    yield Tensor(f"{prefix}lm_head.weight", "BF16", (dims.vocab, dims.hidden))


def _biased(name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", "BF16", shape)
    yield Tensor(f"{name}.bias", "BF16", shape[:1])


def _projector(dims: Dims) -> Iterator[Tensor]:
    merged = dims.vt_hidden * dims.merge**2
    yield from _biased("mm_projector.pre_norm", (dims.vt_hidden,))
    yield from _biased("mm_projector.proj.0", (merged, merged))
    yield from _biased("mm_projector.proj.2", (dims.hidden, merged))


def _tower(dims: Dims) -> Iterator[Tensor]:
    width = dims.vt_hidden
    yield from _biased("vision_tower.patch_embed.proj", (width, 3, dims.patch, dims.patch))
    yield Tensor("vision_tower.patch_embed.pos_emb.weight", "BF16", (dims.pos_height, dims.pos_width, width))
    for block in range(dims.vt_layers):
        base = f"vision_tower.encoder.blocks.{block}."
        yield from _biased(f"{base}norm0", (width,))
        yield from _biased(f"{base}norm1", (width,))
        yield from _biased(f"{base}wqkv", (3 * width, width))
        yield from _biased(f"{base}wo", (width, width))
        yield from _biased(f"{base}mlp.fc0", (dims.vt_intermediate, width))
        yield from _biased(f"{base}mlp.fc1", (width, dims.vt_intermediate))
    yield from _biased("vision_tower.encoder.final_layernorm", (width,))
