"""A browser without a window, where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from marlin_convert.layout.jit import jit

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FOUND = next(filter(None, map(shutil.which, NAMES)), None)
#: how chromium takes what the user prefers
SCHEMES = {"dark": "0", "light": "1"}


def run(page: Path, scheme: str, *arguments: str) -> str:
    """Open a page; returns what the browser prints."""
    assert FOUND is not None
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    line = [
        FOUND,
        "--headless",
        *sandbox,
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={page.parent / 'profile'}",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        *arguments,
        page.as_uri(),
    ]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=True).stdout


def screenshot(page: Path, scheme: str, width: int, height: int = 900) -> npt.NDArray[np.uint8]:
    """What is seen of a page: [height, width, red green blue]."""
    image = page.with_suffix(f".{scheme}-{width}.png")
    run(page, scheme, f"--window-size={width},{height}", f"--screenshot={image}")
    pixels = decoded(image.read_bytes())
    assert pixels.shape == (height, width, 3)
    return pixels


def decoded(raw: bytes) -> npt.NDArray[np.uint8]:
    """The pixels of a PNG of 8 bit colors, with or without opacity, not interlaced."""
    data, at, head = b"", 8, b""
    while at < len(raw):
        size, kind = int.from_bytes(raw[at : at + 4], "big"), raw[at + 4 : at + 8]
        body, at = raw[at + 8 : at + 8 + size], at + 12 + size
        head, data = (body if kind == b"IHDR" else head), data + (body if kind == b"IDAT" else b"")
    width, height = int.from_bytes(head[:4], "big"), int.from_bytes(head[4:8], "big")
    assert head[8] == 8
    assert head[9] in (2, 6)
    assert head[12] == 0
    depth = 3 if head[9] == 2 else 4
    lines = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + width * depth)
    return unfiltered(lines, depth).reshape(height, width, depth)[:, :, :3]


@jit
def unfiltered(lines: npt.NDArray[np.uint8], depth: int) -> npt.NDArray[np.uint8]:
    """Lines, each with its filter (0 to 4) in front, as the format gives them back."""
    rows, columns = lines.shape[0], lines.shape[1] - 1
    made = np.zeros((rows + 1, columns + depth), np.int64)  # zeros above and to the left
    for row in range(rows):
        kind = lines[row, 0]
        for at in range(columns):
            left, up, corner = made[row + 1, at], made[row, at + depth], made[row, at]
            to_left, to_up, to_corner = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
            guess = 0
            if kind == 1:
                guess = left
            elif kind == 2:
                guess = up
            elif kind == 3:
                guess = (left + up) // 2
            elif kind == 4:
                guess = corner
                if to_left <= to_up and to_left <= to_corner:
                    guess = left
                elif to_up <= to_corner:
                    guess = up
            made[row + 1, at + depth] = (lines[row, at + 1] + guess) & 255
    return made[1:, depth:].astype(np.uint8)
