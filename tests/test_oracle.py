"""The oracle against tensors that the GPU's own repacking made, and against products that its kernel
computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from oracle import Matrix, oracle_experts, oracle_rank_slices, published_codes, read_scales, read_weights

GOLDEN = Path(__file__).parent / "golden" / "golden.safetensors"
DTYPES = {"I32": "<i4", "F32": "<f4", "BF16": "<u2"}

Load = Callable[[str], NDArray[Any]]


@pytest.fixture(scope="module")
def golden() -> Load:
    content = GOLDEN.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])

    def load(name: str) -> NDArray[Any]:
        entry = header[name]
        begin, end = entry["data_offsets"]
        values: NDArray[Any] = np.frombuffer(
            content[start + begin : start + end], np.dtype(DTYPES[entry["dtype"]])
        )
        return values.reshape(entry["shape"])

    return load


def as_float(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("shape", ["k16.n64", "k64.n64", "k128.n64", "k64.n128", "k256.n256"])
def test_reads_repacked_weights(golden: Load, shape: str) -> None:
    codes = read_weights(golden(f"repack.w4.{shape}.marlin"))
    np.testing.assert_array_equal(codes, published_codes(golden(f"repack.w4.{shape}.ct")).T)


@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_reads_scales(golden: Load, group: int) -> None:
    read = read_scales(golden(f"scales.g{group}.marlin"), group, 256)
    np.testing.assert_array_equal(read, golden(f"scales.g{group}.ct").T)


def test_a_group_as_long_as_k_is_one_group(golden: Load) -> None:
    stored = golden("scales.g-1.marlin")
    np.testing.assert_array_equal(read_scales(stored, 256, 256), read_scales(stored, -1, 256))


@pytest.mark.parametrize("part", ["13", "2"])
def test_reads_the_experts_of_a_moe_layer(golden: Load, part: str) -> None:
    words, scales = golden(f"moe_m5.w{part}_marlin"), golden(f"moe_m5.s{part}_marlin")
    packed, published = golden(f"moe_m5.w{part}_ct"), golden(f"moe_m5.s{part}_ct")
    for expert in range(4):
        codes = read_weights(words[expert])
        np.testing.assert_array_equal(codes, published_codes(packed[expert]).T)
        read = read_scales(scales[expert], 32, codes.shape[0])
        np.testing.assert_array_equal(read, published[expert].T)


@pytest.mark.parametrize(
    ("parts", "group"),
    [
        (("moe_m5.x", "moe_m5.w13_marlin", "moe_m5.s13_marlin", "moe_m5.topk_ids", "moe_m5.c1"), 32),
        (tuple(f"gemm.u4b8_g128.{part}" for part in ("x", "marlin_w", "marlin_s", "topk_ids", "out")), 128),
        (tuple(f"gemm.u4b8_gchan.{part}" for part in ("x", "marlin_w", "marlin_s", "topk_ids", "out")), -1),
    ],
    ids=["moe", "group 128", "one group"],
)
def test_what_it_reads_gives_the_products_of_the_kernel(
    golden: Load, parts: tuple[str, ...], group: int
) -> None:
    tokens, words, scales, topk, expected = map(golden, parts)
    made = []
    for token, chosen in zip(as_float(tokens), topk, strict=True):
        for expert in chosen:
            codes = read_weights(words[expert]).astype(np.float64) - 8
            read = as_float(read_scales(scales[expert], group, codes.shape[0]))
            made.append(token @ (codes * np.repeat(read, codes.shape[0] // read.shape[0], axis=0)))
    error = np.linalg.norm(np.array(made) - as_float(expected)) / np.linalg.norm(as_float(expected))
    assert error < 1e-2


def test_experts_of_a_rank() -> None:
    assert oracle_experts(3, tp=8, ep=1, experts=384) == list(range(384))
    assert oracle_experts(3, tp=8, ep=8, experts=384) == list(range(144, 192))
    assert [oracle_experts(rank, tp=4, ep=2, experts=4) for rank in range(4)] == [
        [0, 1],
        [0, 1],
        [2, 3],
        [2, 3],
    ]


def number_matrix(rows: int, columns: int, group: int, start: int) -> Matrix:
    codes = (np.arange(rows * columns) * 7 + start).reshape(rows, columns) % 15 + 1
    scales = np.arange(rows * (columns // group)).reshape(rows, columns // group) + start
    return Matrix(codes.astype(np.uint8), scales.astype(np.uint16))


@pytest.mark.parametrize(
    ("tp", "ep", "share", "padded"), [(1, 1, 256, 256), (4, 2, 128, 128), (8, 1, 32, 64)]
)
def test_shares_of_all_ranks_make_the_expert(tp: int, ep: int, share: int, padded: int) -> None:
    gate, up = number_matrix(256, 128, 32, 1), number_matrix(256, 128, 32, 5000)
    down = number_matrix(128, 256, 32, 9000)
    for ep_rank in range(ep):
        ranks = [ep_rank * (tp // ep) + moe_tp_rank for moe_tp_rank in range(tp // ep)]
        made = [oracle_rank_slices(gate, up, down, rank=rank, tp=tp, ep=ep) for rank in ranks]
        assert made[0].w13_codes.shape == (128, 2 * padded)
        for half, matrix in ((0, gate), (padded, up)):
            columns = slice(half, half + share)
            np.testing.assert_array_equal(
                np.hstack([one.w13_codes[:, columns] for one in made]), matrix.codes.T
            )
            np.testing.assert_array_equal(
                np.hstack([one.w13_scales[:, columns] for one in made]), matrix.scales.T
            )
            for one in made:
                assert not one.w13_scales[:, half + share : half + padded].any()
        np.testing.assert_array_equal(np.vstack([one.w2_codes[:share] for one in made]), down.codes.T)
        np.testing.assert_array_equal(
            np.vstack([one.w2_scales[: share // 32] for one in made]), down.scales.T
        )
        assert not any(one.w2_scales[share // 32 :].any() for one in made)
