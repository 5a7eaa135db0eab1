"""The header of a weight file that is somewhere else, by requests for ranges of it."""

from __future__ import annotations

from collections.abc import Callable

from marlin_convert.checkpoint.header import Header, read_header
from marlin_convert.checkpoint.store import START

#: asked for first of each file: all of a small header; of a large one the length, and the rest is one more
#: request
FIRST = 64 << 10


def header_by_ranges(name: str, size: int, fetch: Callable[[range], bytes]) -> tuple[Header, bytes]:
    """The checked header of a file of `size` bytes, and the first START bytes of its data. Raises SourceError
    for a header that is none, and what `fetch` raises.
    """
    have = b""

    def read(offset: int, length: int) -> bytes:
        nonlocal have
        if (end := offset + length) > len(have):
            upto = min(max(end + START, FIRST), size)
            have += fetch(range(len(have), upto))
        return have[offset:end]

    header = read_header(name, size, read)
    return header, read(header.data_start, min(START, size - header.data_start))
