"""Any checkpoint through any two splits and placements of experts and back: each conversion is what `convert`
makes, and what comes out at the end is what was published.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trees
from checkpoints import make_small
from marlin_convert import convert, reshard, restore, verify
from marlin_convert.documents.manifest import read_manifest

pytestmark = pytest.mark.slow


@st.composite
def checkpoints(draw: st.DrawFn) -> dict[str, Any]:
    """A checkpoint of some shape, whose experts can be cut into at least eight slices."""
    group = draw(st.sampled_from([32, 64, 128]))
    return {
        "hidden": draw(st.sampled_from([128, 256])),
        "group": group,
        "moe_intermediate": 8 * group * draw(st.integers(1, 2)),
        "experts": draw(st.sampled_from([4, 8, 12])),
        "layers": 2,
        "vt_layers": 1,
        "form": draw(st.sampled_from(["k26", "k2-thinking"])),
        "order": draw(st.sampled_from(["reference", "shuffled", "interleaved"])),
        "shape_dtype": draw(st.sampled_from(["I32", "I64"])),
        "split_layer": draw(st.booleans()),
    }


@st.composite
def splits(draw: st.DrawFn) -> dict[str, Any]:
    """A split that any of these checkpoints can have; of a map, what it is drawn from."""
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    return {
        "tp": tp,
        "ep": draw(st.sampled_from([ep for ep in (1, 2, 4) if tp % ep == 0])),
        "attn_tp": draw(st.sampled_from([n for n in (1, 2, 4, 8) if tp % n == 0])),
        "pp": draw(st.integers(1, 2)),
        "expert_map": draw(st.none() | st.randoms(use_true_random=False)),
    }


def with_map(split: dict[str, Any], experts: int, path: Path) -> dict[str, Any]:
    """The split with the file of its map: all experts, some of them again, in any order."""
    choose = split["expert_map"]
    if choose is None:
        return split
    again = choose.choices(range(experts), k=split["ep"] * choose.randint(0, 2))
    rows = [choose.sample(row, len(row)) for row in [[*range(experts), *again]] * 2]
    path.write_text(json.dumps({"physical_to_logical_map": rows}))
    return split | {"expert_map": path}


@settings(max_examples=15)
@given(checkpoint=checkpoints(), old=splits(), new=splits())
def test_there_and_back(checkpoint: dict[str, Any], old: dict[str, Any], new: dict[str, Any]) -> None:
    place = Path(tempfile.mkdtemp())
    try:
        source = make_small(place / "source", **checkpoint)
        old = with_map(old, checkpoint["experts"], place / "old.json")
        new = with_map(new, checkpoint["experts"], place / "new.json")
        convert(source.folder, place / "old", **old)
        convert(source.folder, place / "converted", **new)
        reshard(place / "old", place / "new", **new)
        assert trees.tree(place / "new") == trees.tree(place / "converted")
        assert verify(place / "new").ok
        restore(place / "new", place / "back")
        published = trees.tree(source.folder)
        for name in read_manifest(place / "new").source.not_copied:
            published.pop(name)
        assert trees.tree(place / "back") == published
    finally:
        shutil.rmtree(place)
