"""A whole conversion held to the oracle, which shares no code with the converter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import trees
from checkpoints import Checkpoint, expected_plain

PREFIX = {"k26": "language_model.", "k2-thinking": ""}


def assert_as_the_oracle_says(
    out: Path,
    checkpoint: Checkpoint,
    tp: int,
    ep: int,
    attn_tp: int | None = None,
    placed: Sequence[Sequence[int]] | None = None,
) -> None:
    """Every value of every tensor of every rank, and that nothing else is there. `placed` is by layer the
    expert in each slot.
    """
    dims, prefix = checkpoint.dims, PREFIX[checkpoint.form]
    plain = {tensor.name: tensor for tensor in checkpoint.tensors.values() if tensor.expert < 0}
    for rank in range(tp):
        folder, stored = out / f"rank-{rank:02d}-of-{tp:02d}", set()
        for path in sorted(folder.glob("*.safetensors")):
            shard = trees.read_shard(path)
            for name, dtype, shape, _, size in shard.entries:
                if name.startswith("__pad__."):
                    assert (dtype, shape) == ("U8", [size])
                    assert not shard.array(name).any()
                elif ".mlp.experts." not in name:
                    slices = attn_tp if attn_tp and is_of_attention(name) else tp
                    expected = trees.cut(
                        expected_plain(name, plain[name].dtype, plain[name].shape),
                        name,
                        rank % slices,
                        slices,
                    )
                    assert dtype == plain[name].dtype
                    np.testing.assert_array_equal(shard.array(name), expected)
                    stored.add(name)
        for layer in range(dims.first_k_dense, dims.layers):
            shard = trees.read_shard(folder / f"layer-{layer:03d}.safetensors")
            read = trees.read_experts(shard, f"{prefix}model.layers.{layer}", dims.group)
            row = None if placed is None else placed[layer]
            for found, wanted in zip(
                read, trees.slices_of(checkpoint, layer, rank, tp, ep, row), strict=True
            ):
                np.testing.assert_array_equal(found.w13_codes, wanted.w13_codes)
                np.testing.assert_array_equal(found.w13_scales, wanted.w13_scales)
                np.testing.assert_array_equal(found.w2_codes, wanted.w2_codes)
                np.testing.assert_array_equal(found.w2_scales, wanted.w2_scales)
        assert stored == {
            name for name in plain if name.startswith(f"{prefix}model.") or name == f"{prefix}lm_head.weight"
        }
    common = out / "common" / "common.safetensors"
    if checkpoint.form == "k26":
        shard = trees.read_shard(common)
        names = [entry[0] for entry in shard.entries if not entry[0].startswith("__pad__.")]
        assert sorted(names) == sorted(name for name in plain if not name.startswith(prefix))
        for name in names:
            np.testing.assert_array_equal(
                shard.array(name), expected_plain(name, plain[name].dtype, plain[name].shape)
            )
    else:
        assert not common.exists()


def is_of_attention(name: str) -> bool:
    """Whether a tensor follows the attention's split: that of a layer, but for shared experts."""
    return ".layers." in name and ".shared_experts." not in name
