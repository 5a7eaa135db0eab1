"""A rank opened with numpy: which tensors it has, what a row of one is, and which files are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import trees
from marlin_convert import open_shards
from marlin_convert.errors import OutputError, UsageError

PREFIX = "language_model.model.layers.1."


def test_what_a_rank_holds(tiny_tp2: Path) -> None:
    shards = open_shards(tiny_tp2, 1)
    assert list(shards) == shards.names()
    assert shards.names()[0] in shards
    assert "no such tensor" not in shards
    assert repr(shards) == f"Shards({str(tiny_tp2)!r}, rank=1, {len(shards.names())} tensors)"


def test_rows_that_are_read_are_those_of_the_mapping(tiny_tp2: Path) -> None:
    shards = open_shards(tiny_tp2, 1)
    name = next(name for name in shards.names() if name.endswith("w13_weight_packed"))
    assert shards.read(name, 2, 2).tobytes() == shards[name][2:4].tobytes()


def test_layer_and_expert_views(tiny_tp2: Path) -> None:
    shards = open_shards(tiny_tp2, 1)
    assert set(shards.layer(1)) == set(shards.names("layer-001")) | {
        name for name in shards.fused_names() if name.startswith(PREFIX)
    }
    words = shards[PREFIX + "mlp.experts.w13_weight_packed"]
    assert np.array_equal(shards.expert(PREFIX + "mlp.experts.w13_weight_packed", 3), words[3])
    with pytest.raises(UsageError, match="owns the experts 0-3, not 4"):
        shards.expert(PREFIX + "mlp.experts.w13_weight_packed", 4)


def test_exchanged_layers_are_refused(copied: Path) -> None:
    folder = copied / "rank-00-of-02"
    dense, first, second = (folder / f"layer-00{layer}.safetensors" for layer in range(3))
    shards = open_shards(copied, 0)
    for one, other, refused in (
        (dense, first, "bytes, the manifest says"),
        (first, second, "its header says layer 2, in this place it must be 1"),
    ):
        _exchange(one, other)
        with pytest.raises(OutputError, match=refused):
            shards[shards.names("layer-001")[0]]
        _exchange(one, other)
    assert shards[shards.names("layer-001")[0]].size


@pytest.mark.parametrize(
    ("key", "value", "right"),
    [
        ("format_version", "2", "1"),
        ("layout", "another", "moe_wna16_marlin.u4b8"),
        ("tp", "4", "2"),
        ("ep", "2", "1"),
        ("expert_range", "2:6", "0:4"),
    ],
)
def test_a_shard_of_another_split_is_refused(copied: Path, key: str, value: str, right: str) -> None:
    """Of the same source, rank, layer and size it may be."""
    trees.rewrite_header(
        copied / "rank-01-of-02" / "layer-001.safetensors",
        lambda header: header["__metadata__"].update({key: value}),
    )
    shards = open_shards(copied, 1)
    with pytest.raises(OutputError, match=f"its header says {key} {value}, in this place it must be {right}"):
        shards[shards.names("layer-001")[0]]
    assert shards[shards.names("layer-000")[0]].size


def _exchange(one: Path, other: Path) -> None:
    spare = one.with_name("spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)
