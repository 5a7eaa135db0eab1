"""The expected outputs that examples/native_moe is compared with: they are what the converted shards give, by
the CPU model of the kernel.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from marlin_convert.kernels.fused_moe import Experts, Routing, contiguous_expert_map, fused_moe
from marlin_convert.kernels.gemm_call import Matrix
from marlin_convert.kernels.reference import ReferenceProvider

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "gpu" / "make_native_moe_io.py"
EXPERTS = "language_model.model.layers.1.mlp.experts."
TOLERANCE = 1e-2


@pytest.mark.parametrize(("tp", "ep", "rank"), [(8, 1, 3), (4, 2, 3)])
def test_expected_outputs(outputs: Callable[..., Path], tmp_path: Path, tp: int, ep: int, rank: int) -> None:
    out = outputs(tp, ep, 0)
    arguments = {"tp": tp, "ep": ep, "rank": rank, "layer": 1}
    options = [part for key, value in arguments.items() for part in (f"--{key}", str(value))]
    io = tmp_path / "io.safetensors"
    command = [
        sys.executable,
        str(SCRIPT),
        str(out.parent / "source-0"),
        str(io),
        *options,
        "--tokens",
        "1,9",
        "--device",
        "cpu",
    ]
    subprocess.run(command, check=True)
    with safe_open(io, "pt") as file:
        assert file.metadata() == {key: str(value) for key, value in arguments.items()}
    case = load_file(io)
    layer = load_file(out / f"rank-{rank:02}-of-{tp:02}" / "layer-001.safetensors")
    w13, w13_scale, w2, w2_scale = (
        layer[EXPERTS + name]
        for name in ("w13_weight_packed", "w13_weight_scale", "w2_weight_packed", "w2_weight_scale")
    )
    count = w13.shape[0]
    first = rank // (tp // ep) * count
    for tokens in (1, 9):
        x, ids, weights, expected = (
            case[f"tokens_{tokens}.{name}"] for name in ("x", "topk_ids", "topk_weights", "expected")
        )
        assert x.shape == expected.shape == (tokens, 256)
        experts = Experts(
            Matrix(w13, w13_scale),
            Matrix(w2, w2_scale),
            contiguous_expert_map(16, first, first + count),
        )
        found = fused_moe(ReferenceProvider(), x, experts, Routing(weights, ids)).double()
        assert (found - expected.double()).norm() <= TOLERANCE * expected.double().norm()
