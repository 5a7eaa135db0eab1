"""The smallest whole conversion, held to the oracle: what the mutants of slicing must not survive. Run by
mutants.py, not collected.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from checkpoints import Checkpoint, expected_codes, expected_plain, expected_scales, make_small
from marlin_convert.pipeline.convert import convert
from oracle import Matrix, oracle_experts, oracle_rank_slices, read_scales, read_weights

ROWS = (
    "q_b_proj.weight",
    "kv_b_proj.weight",
    "gate_proj.weight",
    "up_proj.weight",
    "embed_tokens.weight",
    "lm_head.weight",
)
COLUMNS = ("o_proj.weight", "down_proj.weight")
NUMPY = {"BF16": "<u2", "F32": "<f4", "I32": "<i4", "U8": "u1"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_small(
        tmp_path_factory.mktemp("one") / "checkpoint",
        order="shuffled",
        hidden=128,
        experts=4,
        moe_intermediate=128,
        layers=2,
        intermediate=128,
        vocab=128,
        vt_layers=1,
    )


def stored(path: Path) -> dict[str, NDArray[Any]]:
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    del header["__metadata__"]
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found[name] = np.frombuffer(content[start + begin : start + end], NUMPY[entry["dtype"]]).reshape(
            entry["shape"]
        )
    return found


def matrix(made: Checkpoint, expert: int, projection: str) -> Matrix:
    rows, columns = made.dims.expert_shape(projection)
    return Matrix(
        expected_codes(1, expert, projection, rows, columns),
        expected_scales(1, expert, projection, rows, columns // 32),
    )


@pytest.mark.parametrize(("tp", "ep"), [(4, 2), (2, 1), (4, 1)])
def test_every_rank(made: Checkpoint, tmp_path: Path, tp: int, ep: int) -> None:
    convert(str(made.folder), tmp_path / "out", tp=tp, ep=ep, threads=1, verify="none")
    for rank in range(tp):
        folder = tmp_path / "out" / f"rank-{rank:02d}-of-{tp:02d}"
        found = {
            name: array
            for path in sorted(folder.glob("*.safetensors"))
            for name, array in stored(path).items()
        }
        for name, tensor in made.tensors.items():
            if tensor.expert >= 0 or not name.startswith("language_model."):
                continue
            whole = expected_plain(name, tensor.dtype, tensor.shape)
            if name.endswith(ROWS):
                whole = np.split(whole, tp)[rank]
            elif name.endswith(COLUMNS):
                whole = np.split(whole, tp, axis=1)[rank]
            np.testing.assert_array_equal(found[name], whole)
        prefix = "language_model.model.layers.1.mlp.experts."
        experts = oracle_experts(rank, tp, ep, 4)
        assert len(found[f"{prefix}w2_weight_packed"]) == len(experts)
        for i, expert in enumerate(experts):
            wanted = oracle_rank_slices(
                *(matrix(made, expert, p) for p in ("gate", "up", "down")), rank=rank, tp=tp, ep=ep
            )
            np.testing.assert_array_equal(
                read_weights(found[f"{prefix}w13_weight_packed"][i]), wanted.w13_codes
            )
            np.testing.assert_array_equal(
                read_weights(found[f"{prefix}w2_weight_packed"][i]), wanted.w2_codes
            )
            np.testing.assert_array_equal(
                read_scales(found[f"{prefix}w13_weight_scale"][i], 32, 128), wanted.w13_scales
            )
            np.testing.assert_array_equal(
                read_scales(found[f"{prefix}w2_weight_scale"][i], 32, wanted.w2_codes.shape[0]),
                wanted.w2_scales,
            )
    common = stored(tmp_path / "out" / "common" / "common.safetensors")
    for name, tensor in made.tensors.items():
        if not name.startswith("language_model."):
            np.testing.assert_array_equal(common[name], expected_plain(name, tensor.dtype, tensor.shape))
