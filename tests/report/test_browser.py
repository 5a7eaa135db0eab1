"""The pages as a browser draws them: at two widths, dark and light."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import browser
import reports
from html_pages import Reading
from marlin_convert.checks.findings import Finding
from marlin_convert.report.page import About
from marlin_convert.report.verify_page import verify_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        browser.FOUND is None, reason="no chromium here: apt-get install chromium-headless-shell"
    ),
]
Color = tuple[int, int, int]
#: --page, --good and --bad of style.css
PAGE: dict[str, Color] = {"light": (246, 247, 248), "dark": (18, 22, 26)}
GOOD: dict[str, Color] = {"light": (27, 122, 85), "dark": (69, 185, 138)}
BAD: dict[str, Color] = {"light": (179, 20, 43), "dark": (255, 122, 133)}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the whole K2.6, with one wrong file of 497."""
    of, wrong = reports.manifest(), Finding(reports.path(3, 12), "differs <&>", 12, 88, "gate_proj", 3)
    about = About("k26-tp8", "marlin-convert verify k26-tp8", datetime(2026, 11, 30, tzinfo=UTC))
    path: Path = tmp_path_factory.mktemp("browser") / "verify.html"
    path.write_bytes(verify_page(of, reports.verification(of, wrong).document(), about).encoded())
    return path


def area(pixels: npt.NDArray[np.uint8], color: Color) -> int:
    """How many pixels have a color."""
    return int((pixels == color).all(-1).sum())


def test_what_the_browser_makes_of_it(page: Path) -> None:
    seen = Reading(browser.run(page, "light", "--dump-dom").removeprefix("<!DOCTYPE html>"))
    assert "✕ NOT OK" in seen.text
    assert "differs <&>" in seen.text
    assert "496 exact" in seen.text
    assert "✕ wrong: rank 3, layer 12." in seen.text


@pytest.mark.parametrize("width", [1280, 420])
def test_no_name_is_wider_than_its_column(
    tiny_tp2: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]], width: int
) -> None:
    """Constants of the model have long ones."""
    assert command("inspect", tiny_tp2, "--report", tmp_path)[0] == 0
    assert "rope_scaling.original_max_position_embeddings" in (tmp_path / "inspect.html").read_text()
    pixels = browser.screenshot(tmp_path / "inspect.html", "light", width, 4000)
    assert (pixels[:, -1] == PAGE["light"]).all()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 420])
def test_it_is_drawn(page: Path, scheme: str, width: int) -> None:
    pixels = browser.screenshot(page, scheme, width)
    for edge in (pixels[:, 0], pixels[:, -1], pixels[0]):  # nothing is wider than the window
        assert (edge == PAGE[scheme]).all()
    other = "dark" if scheme == "light" else "light"
    assert area(pixels, PAGE[other]) < 20
    assert area(pixels, BAD[scheme]) > 500  # the frame of the verdict, its word, and the cell
    if width == 1280:
        cells = area(pixels, GOOD[scheme])
        assert cells > 496 * 12 * 12  # 496 of 497 files are drawn in full
    assert area(pixels, GOOD[other]) == 0
