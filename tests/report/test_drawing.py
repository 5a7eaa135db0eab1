"""The parts that pages are drawn with, and pages of the size of the whole Kimi-K2.6."""

from __future__ import annotations

import base64
import dataclasses
import math
import re
import zlib
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

import reports
from html_pages import Reading, read_page
from marlin_convert.checks.findings import Finding
from marlin_convert.checks.kernel.kernel_report import KernelReport
from marlin_convert.checks.values import bin_begin, count_values
from marlin_convert.documents.codec import write
from marlin_convert.documents.manifest import Manifest
from marlin_convert.errors import UsageError
from marlin_convert.layout.protocol import Role
from marlin_convert.report.experts_map import PALETTE
from marlin_convert.report.folder import ReportFolder
from marlin_convert.report.html import html, tag
from marlin_convert.report.kernel_page import kernel_page
from marlin_convert.report.page import About, unfinished
from marlin_convert.report.png import png
from marlin_convert.report.verify_page import verify_page

ABOUT = About("k26-tp8", "marlin-convert verify k26-tp8", datetime(2026, 11, 30, tzinfo=UTC))
WRONG = Finding(reports.path(3, 12), "w13: the kernel reads 28 weights differently", 12, 88, "gate_proj", 3)


def test_text_is_escaped_and_markup_is_not() -> None:
    assert html("<b>&\"'\x07\u2066") == "&lt;b&gt;&amp;&quot;&#x27;\\x07\\u2066"
    assert tag("p", tag("b", "<"), ["&", 1234, None], title='"<', class_="x") == (
        '<p title="&quot;&lt;" class="x"><b>&lt;</b>&amp;1,234</p>'
    )


def decoded(image: bytes) -> npt.NDArray[np.uint8]:
    """The indexes of a PNG that `png` made; checks its parts."""
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    parts, at = {}, 8
    while at < len(image):
        size, kind = int.from_bytes(image[at : at + 4]), image[at + 4 : at + 8]
        parts[kind] = image[at + 8 : at + 8 + size]
        assert int.from_bytes(image[at + 8 + size : at + 12 + size]) == zlib.crc32(kind + parts[kind])
        at += 12 + size
    assert list(parts) == [b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"]
    columns, rows = int.from_bytes(parts[b"IHDR"][:4]), int.from_bytes(parts[b"IHDR"][4:8])
    lines = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(rows, columns + 1)
    assert not lines[:, 0].any()
    return lines[:, 1:]


def test_png() -> None:
    cells = np.arange(15, dtype=np.uint8).reshape(3, 5) % len(PALETTE)
    assert np.array_equal(decoded(png(cells, PALETTE)), cells)


def test_values_are_counted_of_some_rows_of_each_expert() -> None:
    weights = np.repeat(np.arange(64, dtype=np.uint8), 4).reshape(64, 4)  # row r holds the byte r
    scales = np.full((64, 2), 0x3F80, np.uint16)  # 1.0
    scales[1] = (0xBFC0, 0x7F80)  # -1.5, infinity
    matrices = {
        ("up_proj", Role.WEIGHT): weights,
        ("up_proj", Role.SCALE): scales.view(np.uint8).reshape(64, 4),
    }
    found = count_values(matrices, expert=17)["up_proj"]
    # of 64 rows each eighth one, for expert 17 from 1 on
    assert np.flatnonzero(found.bytes).tolist() == [1, 9, 17, 25, 33, 41, 49, 57]
    assert set(found.bytes[1::8].tolist()[:8]) == {4}
    document = found.document("up_proj")
    assert document.codes == (8, 24, 8, 8, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0)
    assert [(each.begin, each.count) for each in document.scales] == [(1.0, 14), (1.5, 1)]
    assert (document.negative, document.not_finite) == (1, 1)
    assert bin_begin(0x3F80 >> 5) == 1.0


def kernel(of: Manifest, *findings: Finding) -> tuple[Reading, KernelReport, npt.NDArray[np.uint8]]:
    """The page of a made-up kernel check of every 24th expert, and the cells of its picture."""
    report = reports.kernel(of, *findings, experts=range(16, 384, 24))
    raw = kernel_page(of, report.document(), ABOUT).encoded().decode()
    (image,) = re.findall(r'href="data:image/png;base64,([^"]+)"', raw)
    return Reading(raw), report, decoded(base64.b64decode(image))


def test_kernel_map() -> None:
    page, _, cells = kernel(reports.manifest(layers=range(14)), WRONG)
    assert cells.shape == (13, 16)
    wrong = len(PALETTE) - 1
    assert np.argwhere(cells == wrong).tolist() == [[11, 3]]
    assert "✕ NOT OK" in page.text
    assert "expert 88: 2.10e-01" not in page.text
    (title,) = [title for title in page.titles if title.startswith("layer 12:")]
    assert title == "layer 12: 16 experts, largest error 2.10e-01 at expert 88; wrong: 88"
    assert "✕ wrong: rank 3, layer 12." in page.text


def test_an_error_that_is_not_finite_is_wrong_and_never_the_least() -> None:
    of = reports.manifest(layers=range(3))
    report = reports.kernel(of, experts=range(4))
    second = report.verdicts[2]  # expert 1: what is first would win every comparison that it cannot lose
    assert (second.expert, second.projection) == (1, "w13")
    report.verdicts[2] = dataclasses.replace(second, relative_error=math.nan, max_error=math.nan, ok=False)
    document = report.document()
    matrix = document.layers[0].ranks[0].matrices[0]
    assert (matrix.relative_error, matrix.max_error, matrix.relative_errors[1]) == (None, None, None)
    page = Reading(kernel_page(of, document, ABOUT).encoded().decode())
    assert "largest relative error with random activations not finite" in page.text
    (title,) = [title for title in page.titles if title.startswith("layer 1:")]
    assert title == "layer 1: 4 experts, largest error not finite at expert 1; wrong: 1"


def test_of_the_model_it_is_never_said_that_the_kernel_read() -> None:
    of = reports.manifest(layers=range(3))
    document = reports.kernel(of, model=True, experts=range(4)).document()
    page = Reading(kernel_page(of, document, ABOUT).encoded().decode())
    assert "! A MODEL READS EXACT, NOT THE KERNEL" in page.text
    assert "No GPU ran." in page.text
    assert (
        re.search(
            r"(?<!not )the kernel,? (reads|read back)", page.text.split("What a fault looks like")[0], re.I
        )
        is None
    )
    real = Reading(kernel_page(of, replace(document, model=False), ABOUT).encoded().decode())
    assert "✓ THE KERNEL READS EXACT" in real.text
    assert "No GPU ran." not in real.text


def test_a_part_of_the_kernel_check_says_so() -> None:
    of = reports.manifest(layers=range(5))
    document = reports.kernel(of, experts=range(4)).document()
    some = replace(document, layers=document.layers[:1])
    page = Reading(kernel_page(of, some, ABOUT).encoded().decode())
    assert "It ran for 1 of 4 layers with experts in the folder, and 8 of 8 ranks." in page.text
    assert "rank 0, layer 2 to 4: not run, here, but not asked for, or without routed experts" in page.titles


def test_what_was_not_asked_for_is_left_out() -> None:
    of = reports.manifest()
    page = Reading(
        verify_page(of, reports.verification(of, ranks=range(2, 4)).document(), ABOUT).encoded().decode()
    )
    assert "✓ EXACT, OF A PART" in page.text
    assert "Only a part was asked for: 372 of 497 shard files were left out." in page.text
    assert "rank 1, layer 0 to top: left out, here, but not asked for" in page.titles
    wrong = reports.verification(of, WRONG, ranks=range(2, 4)).document()
    assert "✕ NOT OK " in Reading(verify_page(of, wrong, ABOUT).encoded().decode()).text


def test_until_it_ends_the_page_says_that_it_has_not(tmp_path: Path) -> None:
    folder = ReportFolder(tmp_path / "report", "verify", ABOUT)
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "verify.html").write_bytes(unfinished(ABOUT).encoded())
    (tmp_path / "report" / "verify.json").write_text("of an earlier run")

    def interrupted() -> None:
        with folder.working():
            assert "! NOT FINISHED" in read_page(tmp_path / "report" / "verify.html").text
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "! NOT FINISHED" in read_page(tmp_path / "report" / "verify.html").text
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["verify.html"]


@pytest.mark.parametrize("name", ["verify.html", "verify.json"])
def test_somebody_elses_file_is_not_taken_for_an_earlier_report(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with (
        pytest.raises(UsageError, match=rf"{name} would be replaced and is not of a report"),
        ReportFolder(tmp_path, "verify", ABOUT).working(),
    ):
        raise AssertionError
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_a_report_does_not_go_into_another_conversion(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format":"marlin-convert",')
    with (
        pytest.raises(UsageError, match="would take it for damage"),
        ReportFolder(tmp_path / "below" / "report", "verify", ABOUT).working(),
    ):
        raise AssertionError
    assert not (tmp_path / "below").exists()


def test_a_report_behind_a_link_is_left(tmp_path: Path) -> None:
    mine = tmp_path / "mine.html"
    mine.write_bytes(unfinished(ABOUT).encoded())
    (tmp_path / "verify.html").symlink_to(mine)
    with (
        pytest.raises(UsageError, match="would be replaced"),
        ReportFolder(tmp_path, "verify", ABOUT).working(),
    ):
        raise AssertionError
    assert (tmp_path / "verify.html").is_symlink()


@pytest.mark.slow
def test_reports_of_the_whole_model_stay_small() -> None:
    of = reports.manifest()
    found = reports.verification(of, WRONG, unread=40).document()
    page = verify_page(of, found, ABOUT).encoded()
    assert len(page) < 100_000
    assert len(write(found)) < 200_000
    check = reports.kernel(of, WRONG).document()
    page = kernel_page(of, check, ABOUT).encoded()
    assert len(page) < 250_000
    assert len(write(check)) < 4_500_000
    assert (
        sum(len(m.relative_errors) for layer in check.layers for r in layer.ranks for m in r.matrices)
        == 368_640
    )
