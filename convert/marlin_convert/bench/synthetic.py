"""A checkpoint of MoE layers of full size with random weights, for benches: real widths, as many
layers and experts as asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from marlin_convert.checkpoint.index import INDEX_NAME
from marlin_convert.layout.protocol import ExpertShape
from marlin_convert.models.family import ModelConfig, Scope, parse_config
from marlin_convert.models.kimi_k2 import PUBLISHED
from marlin_convert.planning.units import expert_tensors
from marlin_convert.storage.shard_file import DTYPE_SIZE

#: random bytes that all tensors are cut from
BLOCK = 64 << 20


def config(layers: int, experts: int) -> dict[str, Any]:
    """A config.json with the published widths and a small vocabulary, without dense layers and vision."""
    weights = {
        "num_bits": 4,
        "group_size": 32,
        "type": "int",
        "strategy": "group",
        "symmetric": True,
        "dynamic": False,
        "actorder": None,
    }
    return PUBLISHED | {
        "num_hidden_layers": layers,
        "first_k_dense_replace": 0,
        "n_routed_experts": experts,
        "vocab_size": 1024,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": weights}},
            "ignore": [],
        },
    }


def make_layers(folder: Path, layers: int, experts: int) -> int:
    """Write the checkpoint; returns its bytes. One file a layer and one for the top, in the order of the
    reference writer.
    """
    folder.mkdir(parents=True)
    document = config(layers, experts)
    model = parse_config(document)
    (folder / "config.json").write_text(json.dumps(document))
    block = np.random.default_rng(0).integers(0, 1 << 63, BLOCK // 8, np.int64).view(np.uint8)
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(layers + 1):
        name = f"model-{number + 1:05d}-of-{layers + 1:06d}.safetensors"
        tensors = list(_layer(model, number) if number < layers else _plain(model, "", "top"))
        total += _write(folder / name, tensors, model.expert_shape(), block)
        weight_map |= {tensor: name for tensor, _, _ in tensors}
    (folder / INDEX_NAME).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
    return total


Tensor = tuple[str, str, tuple[int, ...]]


def _layer(model: ModelConfig, layer: int) -> Iterator[Tensor]:
    prefix = f"model.layers.{layer}."
    module = prefix + model.experts_module
    yield from _plain(model, prefix, "layer", "moe")
    for expert in range(model.experts):
        for tensor in expert_tensors(module, expert, model.expert_shape()):
            yield tensor.name, tensor.dtypes[0], tensor.shape


def _plain(model: ModelConfig, prefix: str, *scopes: Scope) -> Iterator[Tensor]:
    for rule in model.rules:
        if rule.scope in scopes and rule.shape is not None:
            yield prefix + rule.name, rule.dtype[0], tuple(model.dims[size] for size in rule.shape)


def _write(
    path: Path, tensors: list[Tensor], expert: ExpertShape, block: np.ndarray[Any, np.dtype[np.uint8]]
) -> int:
    """One file: header, then slices of the random block; weight_shape says what it must."""
    tensors.sort(key=lambda tensor: (-DTYPE_SIZE[tensor[1]], tensor[0]))
    header, at = {}, 0
    for name, dtype, shape in tensors:
        size = int(np.prod(shape)) * DTYPE_SIZE[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb", buffering=16 << 20) as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        shift = 0
        for name, dtype, shape in tensors:
            if name.endswith(".weight_shape"):
                file.write(np.array(expert.matrix(name.split(".")[-2]), np.int32).tobytes())
                continue
            left = int(np.prod(shape)) * DTYPE_SIZE[dtype]
            shift = (shift + 4096 * 37) % (BLOCK // 2)
            while left:
                piece = block[shift : shift + min(left, BLOCK // 2)]
                file.write(piece.data)
                left -= piece.size
    return at
