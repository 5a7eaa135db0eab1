"""The exhaustive check in small: identity activations give back every published weight, bit for bit."""

from __future__ import annotations

import pytest
import torch

from kernel_vectors import family, published_weights
from marlin_convert.kernels.gemm_call import Matrix
from marlin_convert.kernels.one_hot import read_back
from marlin_convert.kernels.quant_types import UINT4, UINT8B128
from marlin_convert.kernels.reference import ReferenceProvider

REFERENCE = ReferenceProvider()


def _read(matrix: Matrix, experts_a_call: int = 1, block_size: int = 64) -> torch.Tensor:
    reads = read_back(REFERENCE, matrix, experts_a_call=experts_a_call, block_size=block_size)
    return torch.cat([weights for _, weights in reads])


@pytest.mark.parametrize("name", ["w13", "w2"])
@pytest.mark.parametrize("options", [{}, {"experts_a_call": 3}, {"block_size": 8}])
def test_identity_reads_back_the_published_weights(name: str, options: dict[str, int]) -> None:
    golden = family("moe_m5")
    scale = "s" + name.removeprefix("w")
    published = [
        published_weights(ct, scales)
        for ct, scales in zip(golden[f"{name}_ct"], golden[f"{scale}_ct"], strict=True)
    ]
    read = _read(Matrix(golden[f"{name}_marlin"], golden[f"{scale}_marlin"]), **options)
    assert read.equal(torch.stack(published))


def test_eight_bit_reads_back_too() -> None:
    golden = family("gemm.u8b128_g32")
    read = _read(Matrix(golden["marlin_w"], golden["marlin_s"], UINT8B128))
    published = [
        published_weights(ct, scales, 8) for ct, scales in zip(golden["ct"], golden["scale_ct"], strict=True)
    ]
    assert read.equal(torch.stack(published))


def test_zero_points_are_subtracted_and_a_bias_is_left_out() -> None:
    golden = family("gemm.u4zp_g64")
    bias = torch.ones(2, 128, dtype=torch.bfloat16)
    read = _read(
        Matrix(golden["marlin_w"], golden["marlin_s"], UINT4, bias, golden["marlin_zp"]), experts_a_call=1
    )
    for expert in range(2):
        scales = golden["scale_ct"][expert]
        # published_weights subtracts 8 from each code; the rest of (q - zero point) is 8 - zero point.
        codes = published_weights(golden["ct"][expert], torch.ones_like(scales)).t()
        signed = codes + (8 - golden["zp"][expert]).repeat_interleave(64, dim=1)
        assert read[expert].equal((signed * scales.repeat_interleave(64, dim=1)).t())


def test_a_flipped_nibble_shows_as_one_wrong_weight_and_a_scale_as_its_group() -> None:
    golden = family("moe_m5")
    matrix = Matrix(golden["w2_marlin"], golden["s2_marlin"])
    before = _read(matrix)
    words = golden["w2_marlin"].clone()
    words[2, 3, 17] ^= 1 << 9
    changed = _read(Matrix(words, matrix.scales)) != before
    assert changed.sum() == 1
    assert changed[2, 48:64].any(), "k-tile 3 of expert 2"
    scales = golden["s2_marlin"].clone()
    scales.view(torch.int16)[1, 2, 5] ^= 1 << 6
    changed = _read(Matrix(matrix.qweight, scales)) != before
    assert changed.nonzero()[:, 0].unique().tolist() == [1]
    assert 25 <= changed.sum() <= 32, "the non-zero weights of one group"
    assert changed[1, 64:96].any(dim=0).sum() == 1
