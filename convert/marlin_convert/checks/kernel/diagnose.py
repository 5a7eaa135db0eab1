"""What a wrong weight matrix looks like: tries the usual mistakes and names the one that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from marlin_convert.checks.kernel.dequantize import Pair, weight
from marlin_convert.checks.kernel.odd_scales import first_place, value
from marlin_convert.layout.scales import GROUPED, SINGLE

#: share of the elements that a mistake must explain
FITS = 0.95


def diagnose(
    read: Tensor,
    pair: Pair,
    stored: Tensor,
    projection: str,
    others: Callable[[], Iterator[tuple[str, Pair]]],
) -> str:
    """Name the usual mistake that explains `read` [N, K] (weights as the kernel saw them), given the true
    codes and scales, and the `stored` scales [N, G].

    `others` yields what the matrix might be instead: other ranks' slices, neighbouring experts. Returns ""
    where nothing fits.
    """
    if not _fits(read, weight(*pair)):
        for name, codes, scale in _mistakes(pair, projection, others):
            if codes.shape == read.shape and _fits(read, weight(codes, scale)):
                return name
    if torch.equal(stored, pair[1]) or not torch.equal(weight(pair[0], stored), read):
        return ""
    return _wrong_scales(pair[1], stored)


def _fits(read: Tensor, wanted: Tensor) -> bool:
    return (wanted == read).float().mean().item() >= FITS


def _wrong_scales(scale: Tensor, stored: Tensor) -> str:
    """How stored scales [N, G] differ from the true ones, where they alone explain what was read."""
    differ = stored != scale
    for axis, what in ((1, "rows"), (0, "groups")):
        places = differ.any(dim=axis).nonzero().flatten()
        if len(places) == 2:
            true, found = (each.index_select(1 - axis, places) for each in (scale, stored))
            if torch.equal(true.flip(1 - axis), found):
                first, second = places.tolist()
                return f"the scales of {what} {first} and {second} are exchanged"
    row, group = first_place(differ)
    number = int(differ.sum())
    some = "one scale is" if number == 1 else f"{number} scales are"
    return (
        f"the codes are right and {some} not, the first at row {row}, group {group}:"
        f" {value(stored[row, group])} where the original is {value(scale[row, group])}"
    )


class Samples:
    """Some weights of each expert's true matrices in a layer: enough to know one again that was found in
    another's place, be it at the other end of the layer.
    """

    def __init__(self) -> None:
        self._samples: dict[tuple[int, str], dict[int, Tensor]] = {}

    def add(self, rank: int, name: str, expert: int, matrix: Tensor) -> None:
        """Remember an expert's matrix `name` on a rank."""
        self._samples.setdefault((rank, name), {})[expert] = self.sample(matrix)

    def whose(self, rank: int, name: str, expert: int, sample: Tensor) -> int | None:
        """The other expert whose matrix a sample, found in the place of `expert`, is of."""
        known = self._samples[rank, name]
        if _fits(sample, known[expert]):
            return None
        return next((other for other, each in known.items() if _fits(sample, each)), None)

    @staticmethod
    def sample(matrix: Tensor) -> Tensor:
        """About 512 weights; the step is odd, so that they lie in many columns."""
        return matrix.reshape(-1)[:: matrix.numel() // 512 | 1].clone()


def _mistakes(
    pair: Pair, projection: str, others: Callable[[], Iterator[tuple[str, Pair]]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    codes, scale = pair
    if projection == "w13":
        half = codes.shape[0] // 2
        swapped = torch.cat((torch.arange(half, 2 * half), torch.arange(half))).to(codes.device)
        yield "gate and up are swapped", codes[swapped], scale[swapped]
        yield "the scales of gate and up are swapped", codes, scale[swapped]
        yield "the codes of gate and up are swapped", codes[swapped], scale
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
