"""Pictures of many small cells: an indexed PNG within the page."""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

#: red, green, blue, opacity
Color = tuple[int, int, int, int]


def png(cells: npt.NDArray[np.uint8], palette: Sequence[Color]) -> bytes:
    """An image of [rows, columns] indexes of a palette of at most 256 colors."""
    rows, columns = cells.shape
    lines = np.zeros((rows, columns + 1), np.uint8)  # each line begins with its filter: none
    lines[:, 1:] = cells
    size = columns.to_bytes(4) + rows.to_bytes(4)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (
            _chunk(b"IHDR", size + bytes((8, 3, 0, 0, 0))),
            _chunk(b"PLTE", b"".join(bytes(color[:3]) for color in palette)),
            _chunk(b"tRNS", bytes(color[3] for color in palette)),
            _chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def data_uri(image: bytes) -> str:
    """An image as the address of itself."""
    return "data:image/png;base64," + b64encode(image).decode("ascii")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)
