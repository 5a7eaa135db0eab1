"""What a wrong weight matrix looks like: tries the usual mistakes and names the one that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from marlin_convert.checks.kernel.dequantize import Pair, weight
from marlin_convert.layout.scales import GROUPED, SINGLE

#: share of the elements that a mistake must explain
FITS = 0.95


def diagnose(
    read: Tensor, pair: Pair, projection: str, others: Callable[[], Iterator[tuple[str, Pair]]]
) -> str:
    """Name the usual mistake that explains `read` [N, K] (weights as the kernel saw them), given the true
    codes and scales.

    `others` yields what the matrix might be instead: other ranks' slices, neighbouring experts. Returns ""
    where nothing fits.
    """
    for name, codes, scale in _mistakes(pair, projection, others):
        if codes.shape == read.shape and (weight(codes, scale) == read).float().mean().item() >= FITS:
            return name
    return ""


def _mistakes(
    pair: Pair, projection: str, others: Callable[[], Iterator[tuple[str, Pair]]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    codes, scale = pair
    if projection == "w13":
        half = codes.shape[0] // 2
        swapped = torch.cat((torch.arange(half, 2 * half), torch.arange(half))).to(codes.device)
        yield "gate and up are swapped", codes[swapped], scale[swapped]
    for order, what in ((GROUPED, "64"), (SINGLE, "32")):
        wrong = _as_if_stored(scale, order)
        if wrong is not None:
            yield (
                (
                    "the scales are"
                    f" {'not permuted' if what == '64' else 'permuted in the order of 32 columns, not of 64'}"
                ),
                codes,
                wrong,
            )
    yield "the codes lack the offset of 8 (two's complement stored as is)", codes ^ 8, scale
    pairs = codes.reshape(codes.shape[0], -1, 2).flip(-1).reshape(codes.shape)
    yield "the two nibbles of each byte are swapped", pairs, scale
    words = codes.reshape(codes.shape[0], -1, 8).flip(-1).reshape(codes.shape)
    yield "the nibbles of each word are in reverse order", words, scale
    for name, (other_codes, other_scale) in others():
        yield f"it is {name}", other_codes, other_scale


def _as_if_stored(scale: Tensor, order: object) -> Tensor | None:
    """The scales that the kernel would see had they been stored unpermuted (GROUPED) or in the SINGLE order
    instead of GROUPED.

    The kernel takes column GROUPED[c] of a run from place c. What lies at place c is column c when not
    permuted, SINGLE's column otherwise.
    """
    n = scale.shape[0]
    if n % 64:
        return None
    seen = torch.arange(n)
    stored = torch.arange(n)
    if order is SINGLE:
        stored = (torch.arange(0, n, 32).unsqueeze(1) + torch.from_numpy(SINGLE)).reshape(-1)
    reads = (torch.arange(0, n, 64).unsqueeze(1) + torch.from_numpy(GROUPED)).reshape(-1)
    seen[reads] = stored
    return scale[seen.to(scale.device)]
