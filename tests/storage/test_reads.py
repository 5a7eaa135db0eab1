"""Reads: few, whole pages, every wanted byte in its place, whatever the order; and files that change or end
too early.
"""

from __future__ import annotations

import errno
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlin_convert.errors import MachineError, SourceError
from marlin_convert.storage import reads
from marlin_convert.storage.buffers import aligned_buffer
from marlin_convert.storage.reads import MAX_GAP, Piece, PieceReader, plan_reads, read_bytes, read_exactly

PAGE = 4096


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    """Pieces of a few files, apart by nothing, little or much, in any order."""
    made = []
    for file in draw(st.lists(st.sampled_from(["a", "b", "c"]), unique=True, min_size=1)):
        position = draw(st.integers(0, 3 * PAGE))
        for _ in range(draw(st.integers(1, 5))):
            size = draw(st.one_of(st.integers(1, 300), st.sampled_from([PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])))
            made.append(Piece(file, position, size))
            position += size + draw(st.sampled_from([0, 0, 1, 100, PAGE, MAX_GAP, MAX_GAP + 1, 2 * MAX_GAP]))
    return draw(st.permutations(made))


@settings(max_examples=200)
@given(wanted=pieces())
def test_a_plan(wanted: list[Piece]) -> None:
    plan = plan_reads(wanted)
    end = 0
    for run in plan.runs:
        assert run.offset % PAGE == 0
        assert run.length % PAGE == 0
        assert run.at == end, "runs lie one behind the other"
        assert run.offset < run.used <= run.offset + run.length < run.used + PAGE
        end = run.at + run.length
    assert plan.size == end
    assert len(plan.places) == len(wanted)
    for piece, place in zip(wanted, plan.places, strict=True):
        (run,) = [run for run in plan.runs if run.at <= place < run.at + run.length]
        assert run.file == piece.file
        assert place - run.at == piece.offset - run.offset
        assert piece.offset + piece.size <= run.used
    for first, second in pairwise(plan.runs):
        assert first.file != second.file or second.offset > first.used, (
            "a page is not read twice, but for one at a seam"
        )


@settings(max_examples=100)
@given(wanted=pieces())
def test_neighbours_are_joined_and_others_are_not(wanted: list[Piece]) -> None:
    plan = plan_reads(wanted)
    runs = 0
    for file in {piece.file for piece in wanted}:
        own = sorted(piece for piece in wanted if piece.file == file)
        runs += 1 + sum(
            second.offset - first.offset - first.size > MAX_GAP for first, second in pairwise(own)
        )
    assert len(plan.runs) == runs


def test_no_pieces() -> None:
    assert plan_reads([]) == reads.ReadPlan((), (), 0)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    random = np.random.default_rng(1)
    contents = {
        name: random.bytes(size) for name, size in (("a", 2_000_000), ("b", 1_000_001), ("c", 1_048_576))
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return contents


def read(reader: PieceReader, wanted: list[Piece]) -> list[bytes]:
    plan = plan_reads(wanted)
    buffer = aligned_buffer(plan.size)
    names = {piece.file for piece in wanted}
    reader.open_files(names)
    try:
        reader.read(plan, buffer)
    finally:
        reader.close_files(names)
    return [
        buffer[place : place + piece.size].tobytes() for piece, place in zip(wanted, plan.places, strict=True)
    ]


@pytest.mark.parametrize("direct", [True, False])
def test_every_byte_arrives(tmp_path: Path, files: dict[str, bytes], direct: bool) -> None:
    random = np.random.default_rng(2)
    reader = PieceReader(tmp_path.joinpath, direct)
    for _ in range(30):
        wanted = []
        for name, content in files.items():
            cuts = np.sort(random.choice(len(content), 8, replace=False)).tolist()
            wanted += [
                Piece(name, begin, end - begin) for begin, end in zip(cuts[::2], cuts[1::2], strict=True)
            ]
        random.shuffle(wanted)
        wanted = [Piece(*piece) for piece in wanted]
        assert read(reader, wanted) == [files[file][offset : offset + size] for file, offset, size in wanted]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_the_last_bytes_of_a_file(tmp_path: Path, files: dict[str, bytes], name: str, direct: bool) -> None:
    """Rounding out to pages goes beyond the end of a file that is not whole pages."""
    size = len(files[name])
    reader = PieceReader(tmp_path.joinpath, direct)
    assert read(reader, [Piece(name, size - 5, 5)]) == [files[name][-5:]]
    assert read(reader, [Piece(name, 0, size)]) == [files[name]]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("offset", "size"), [(1_000_000, 2), (0, 1_000_002), (2_000_000, 10)])
def test_a_file_that_ends_too_early(
    tmp_path: Path, files: dict[str, bytes], offset: int, size: int, direct: bool
) -> None:
    with pytest.raises(
        SourceError, match="b ends at byte 1000001, before its tensors do: it was changed while being read"
    ):
        read(PieceReader(tmp_path.joinpath, direct), [Piece("b", offset, size)])


@pytest.mark.parametrize(("offset", "size", "end"), [(0, 8, 5), (3, 8, 5), (7, 1, 5), (0, 1, 0)])
def test_exactly_what_is_asked_for_or_the_files_name(
    tmp_path: Path, offset: int, size: int, end: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(end)))
    with path.open("rb") as file:
        assert read_exactly(file.fileno(), 0, end, "x") == bytes(range(end))
        with pytest.raises(
            SourceError,
            match=rf"x ends at byte {end}, .* \(bytes {offset} to {offset + size} were expected\)",
        ):
            read_exactly(file.fileno(), offset, size, "x")
    with pytest.raises(SourceError, match=f"file ends at byte {end}, "):
        read_bytes(path, offset, size)


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="x has gone while it was being read"):
        PieceReader(tmp_path.joinpath).open_files(["x"])


def test_short_reads_are_continued(
    tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = os.preadv, []

    def short(descriptor: int, buffers: Any, offset: int) -> int:
        (buffer,) = buffers
        calls.append(offset)
        return whole(descriptor, [buffer[: 4096 * 3 if len(calls) % 2 else 777]], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert read(PieceReader(tmp_path.joinpath, direct=False), [Piece("a", 100, 100_000)]) == [
        files["a"][100:100_100]
    ]
    assert len(calls) > 10


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EIO, errno.EOPNOTSUPP])
def test_direct_reads_that_do_not_work_are_done_the_ordinary_way(
    tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """Some file systems open a file for direct reads and then refuse them."""
    whole, refused = os.preadv, []
    opened: dict[Path, int] = {}
    monkeypatch.setattr(
        reads,
        "open_direct",
        lambda path, flags: opened.setdefault(path, os.open(path, flags)),
    )

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if descriptor in opened.values():
            refused.append(descriptor)
            raise OSError(error, os.strerror(error))
        return whole(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert read(PieceReader(tmp_path.joinpath), [Piece("a", 100, 100_000)]) == [files["a"][100:100_100]]
    assert len(refused) == 1


def test_a_disk_that_fails(tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(
        MachineError,
        match=r"reading .*a: Input/output error; check the disk, then run the same command again",
    ):
        read(PieceReader(tmp_path.joinpath), [Piece("a", 0, 10)])


def open_descriptors(folder: Path) -> int:
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(link.startswith(str(folder)) for link in links)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files")
def test_files_are_open_only_while_somebody_reads_them(tmp_path: Path, files: dict[str, bytes]) -> None:
    reader = PieceReader(tmp_path.joinpath)
    reader.open_files(["a", "b"])
    once = open_descriptors(tmp_path)
    assert once >= 2
    reader.open_files(["a"])
    assert open_descriptors(tmp_path) == once
    reader.close_files(["a", "b"])
    assert 0 < open_descriptors(tmp_path) < once
    reader.close_files(["a"])
    assert open_descriptors(tmp_path) == 0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files")
def test_a_missing_file_leaves_none_open(tmp_path: Path, files: dict[str, bytes]) -> None:
    reader = PieceReader(tmp_path.joinpath)
    with pytest.raises(SourceError):
        reader.open_files(["a", "x", "b"])
    assert open_descriptors(tmp_path) == 0


@pytest.mark.parametrize("direct", [True, False])
def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(tmp_path: Path, direct: bool) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(MachineError, match=r"opening .*a: it is not a regular file"):
        read(PieceReader(tmp_path.joinpath, direct), [Piece("a", 0, 1)])
    with pytest.raises(MachineError, match=r"opening .*a: it is not a regular file"):
        read_bytes(tmp_path / "a", 0, 1)
