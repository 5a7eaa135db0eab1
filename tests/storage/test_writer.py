"""Writing a file in any pieces: every byte is at its place, and whole pages alone go past the page cache."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlin_convert.storage import files, writer
from marlin_convert.storage.buffers import Bytes, aligned_buffer
from marlin_convert.storage.files import PAGE
from marlin_convert.storage.writer import ShardFile

HEAD = b"the header"


def placed(data: bytes, lead: int) -> Bytes:
    """The bytes in memory, `lead` behind the start of a page."""
    buffer = aligned_buffer(lead + len(data))
    buffer[lead:] = np.frombuffer(data, np.uint8)
    return buffer[lead:]


@settings(max_examples=40)
@given(
    cuts=st.lists(st.integers(len(HEAD), 200_000), max_size=8),
    together=st.booleans(),
    direct_io=st.booleans(),
    seed=st.integers(0, 9),
)
def test_pieces_from_many_threads(cuts: list[int], together: bool, direct_io: bool, seed: int) -> None:
    """Those that share a page, too, whatever lies in memory as in the file."""
    content = np.random.default_rng(seed).bytes(200_000 - len(HEAD))
    ends = sorted({len(HEAD), *cuts, 200_000})
    with tempfile.TemporaryDirectory() as folder:
        file = ShardFile(Path(folder) / "file", 200_000, direct_io)
        file.open(HEAD)

        def write(begin: int, end: int) -> None:
            piece = content[begin - len(HEAD) : end - len(HEAD)]
            file.write(placed(piece, begin % PAGE if together else 1), begin)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(write, ends[:-1], ends[1:]))
        file.finish()
        assert (Path(folder) / "file").read_bytes() == HEAD + content


@pytest.mark.parametrize(
    ("offset", "size", "lead", "direct"),
    [
        (2 * PAGE, 3 * PAGE, 0, [(2 * PAGE, 3 * PAGE)]),
        (2 * PAGE, 3 * PAGE, 8, []),
        (PAGE + 100, 3 * PAGE, 100, [(2 * PAGE, 2 * PAGE)]),
        (PAGE + 100, 3 * PAGE, 104, []),
        (PAGE + 100, 2 * PAGE - 101, 100, []),
        (PAGE + 100, 2 * PAGE - 100, 100, [(2 * PAGE, PAGE)]),
        (PAGE, 2 * PAGE + 5, 0, [(PAGE, 2 * PAGE)]),
        (PAGE + 1, 7, 1, []),
    ],
)
def test_what_goes_past_the_page_cache(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    offset: int,
    size: int,
    lead: int,
    direct: list[tuple[int, int]],
) -> None:
    """The pages that one piece fills, where they lie in memory as in the file; the rest does not."""
    file = ShardFile(tmp_path / "file", 8 * PAGE, direct_io=True)
    file.open(HEAD)
    if file.direct is None:
        pytest.skip("this file system has no direct writes")
    written: dict[int, list[tuple[int, int]]] = {file.plain: [], file.direct: []}
    write_all = files.write_all

    def noted(descriptor: int, data: memoryview, at: int) -> None:
        written[descriptor] += [(at, len(data))] if data else []
        write_all(descriptor, data, at)

    monkeypatch.setattr(writer, "write_all", noted)
    piece = os.urandom(size)
    file.write(placed(piece, lead), offset)
    assert written[file.direct] == direct
    assert sum(length for _, length in written[file.plain] + direct) == size
    file.finish()
    assert (tmp_path / "file").read_bytes()[offset : offset + size] == piece
