"""The identity of a source: its content, not its headers."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import xxhash

import trees
from checkpoints import Checkpoint, make_layers
from marlin_convert.checkpoint.identify import identify, stamps
from marlin_convert.checkpoint.source import open_source
from marlin_convert.documents.codec import read, write
from marlin_convert.documents.identity import SourceIdentity
from marlin_convert.errors import SourceError


def identity(folder: Path) -> SourceIdentity:
    return identify(open_source(str(folder)))


def spoil(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        old = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old[0] ^ 1]))


def test_a_copy_is_the_same_source(made: Checkpoint, folder: Path) -> None:
    mine, its = identity(made.folder), identity(folder)
    assert mine == its
    assert mine.id == its.id
    assert mine.difference(its) is None
    assert len(mine.id) == 32
    assert set(mine.id) <= set("0123456789abcdef")
    assert [(file.name, file.size) for file in mine.files] == [
        (name, (folder / name).stat().st_size) for name in sorted(made.files)
    ]


def test_through_json_and_back(made: Checkpoint) -> None:
    mine = identity(made.folder)
    back = read(write(mine), SourceIdentity, "the identity of the source")
    assert back == mine
    assert back.id == mine.id


def test_equal_headers_and_different_weights(tmp_path: Path) -> None:
    """As two releases of one family."""
    one, two = (make_layers(tmp_path / str(seed), experts=1, seed=seed) for seed in (1, 2))
    mine, its = identity(one.folder), identity(two.folder)
    assert [(f.name, f.size, f.header) for f in mine.files] == [(f.name, f.size, f.header) for f in its.files]
    assert mine.id != its.id
    assert (mine.difference(its) or "").startswith("the content of model-00001-of-")


def test_every_byte_of_small_files_counts(made: Checkpoint, folder: Path) -> None:
    before = identity(folder)
    random = np.random.default_rng(3)
    for header in open_source(str(made.folder)).headers:
        path = folder / header.file
        assert header.size - header.data_start <= 256 * 4096
        for at in (header.data_start, header.size - 1, int(random.integers(header.data_start, header.size))):
            spoil(path, at)
            assert before.difference(identity(folder)) == f"the content of {header.file} differs"
            spoil(path, at)
    assert before.difference(identity(folder)) is None


def test_the_ends_of_large_files_count(tmp_path: Path) -> None:
    made = make_layers(tmp_path / "layer", experts=1)
    before = identity(made.folder)
    header = max(open_source(str(made.folder)).headers, key=lambda header: header.size)
    assert header.size > 300 * 4096
    for at in (header.data_start, header.size - 1):
        spoil(made.folder / header.file, at)
        assert before.difference(identity(made.folder)) == f"the content of {header.file} differs"
        spoil(made.folder / header.file, at)


def test_the_sample_is_what_the_format_page_says(tmp_path: Path) -> None:
    """Of files of less than 256 pages, of 256 to 511, and of more."""
    made = make_layers(tmp_path / "layer", experts=1)
    counts = set()
    for header, file in zip(open_source(str(made.folder)).headers, identity(made.folder).files, strict=True):
        data = (made.folder / file.name).read_bytes()[header.data_start :]
        pages = [data[i : i + 4096] for i in range(0, len(data), 4096)]
        step = max(len(pages) // 256, 1)
        assert file.sample == xxhash.xxh3_128_hexdigest(b"".join([*pages[::step], pages[-1]]))
        assert file.start == xxhash.xxh3_128_hexdigest(data[:16384])
        counts.add(min(len(pages) // 256, 2))
    assert counts == {0, 1, 2}


def test_the_first_bytes_of_data_are_in_the_id(made: Checkpoint, folder: Path) -> None:
    header = open_source(str(made.folder)).headers[0]
    spoil(folder / header.file, header.data_start)
    assert identity(folder).id != identity(made.folder).id


def test_headers_names_and_config_count(made: Checkpoint, folder: Path) -> None:
    before = identity(folder)
    file = min(made.files)
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content.replace(b'{"format":"pt"}', b'{"format":"np"}', 1))
    changed = identity(folder)
    assert before.difference(changed) == f"the header of {file} differs"
    assert changed.id != before.id
    (folder / file).write_bytes(content)

    config = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(config + b"\n")
    changed = identity(folder)
    assert before.difference(changed) == "config.json differs"
    assert changed.id != before.id
    (folder / "config.json").write_bytes(config)

    (folder / file).rename(folder / "renamed.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    changed = identity(folder)
    assert before.difference(changed) == "the weight files have other names"
    assert changed.id != before.id


def test_a_longer_file_differs_in_size(made: Checkpoint, folder: Path) -> None:
    """Padding in the header: the same tensors, another file."""
    file = min(made.files)
    content = (folder / file).read_bytes()
    length = int.from_bytes(content[:8], "little")
    (folder / file).write_bytes(
        (length + 8).to_bytes(8, "little") + content[8 : 8 + length] + b" " * 8 + content[8 + length :]
    )
    assert identity(made.folder).difference(identity(folder)) == f"the size of {file} differs"


def test_a_file_that_is_cut_off_after_its_header_was_read(made: Checkpoint, folder: Path) -> None:
    """The sample of what is left would be that of another source."""
    source = open_source(str(folder))
    for header in source.headers:
        path, whole = folder / header.file, (folder / header.file).read_bytes()
        for size in (header.data_start, header.size - 1, 4):
            os.truncate(path, size)
            with pytest.raises(
                SourceError, match=f"{header.file} ends at byte {size}, before its tensors do"
            ):
                identify(source)
        path.write_bytes(whole)


def test_stamps(folder: Path, made: Checkpoint) -> None:
    source = open_source(str(folder))
    first, second, *_ = sorted(made.files)
    before = stamps(source, [first, second])
    assert before == {
        name: [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        for name in (first, second)
        if (status := (folder / name).stat())
    }
    os.utime(folder / first, ns=(1, 12345))
    after = stamps(source, [first, second])
    assert after[first][:2] == [before[first][0], 12345]
    assert after[second] == before[second]
    trees.rewrite_unseen(folder / first, (folder / first).read_bytes())
    again = stamps(source, [first])[first]
    assert again[:2] == after[first][:2]
    assert again[2] > after[first][2]
    assert after[second] == before[second]
    (folder / second).unlink()
    with pytest.raises(SourceError, match=f"{second} has gone from the source"):
        stamps(source, [second])
