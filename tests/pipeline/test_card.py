"""The model card: the licence word for word, and nothing that changes from run to run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from marlin_convert.pipeline.card import carried_lines
from marlin_convert.pipeline.finish import without_secrets
from marlin_convert.pipeline.run import convert


@pytest.mark.parametrize(
    ("readme", "lines"),
    [
        (b"", []),
        (b"# no front matter\nlicense: mit\n", []),
        (b"---\nlicense: mit\n---\n", ["license: mit"]),
        (
            (
                b"\xef\xbb\xbf---\r\nlicense: other\r\nlicense_name: modified-mit \r\nlicense_link:"
                b" LICENSE\r\n---\r\ntext"
            ),
            ["license: other", "license_name: modified-mit", "license_link: LICENSE"],
        ),
        (b"---\ntags:\n- license: x\n  license: y\nbase_model: a/b\n---\n", []),
        (b"---\nlicense: mit\n", []),
        (b"\xff\xfe---", []),
    ],
)
def test_what_is_carried_over(readme: bytes, lines: list[str]) -> None:
    assert carried_lines(readme) == lines


def test_the_card_of_a_folder(copied_source: Path, tmp_path: Path) -> None:
    (copied_source / "README.md").write_text("---\nlicense: mit\n---\n# X\n")
    convert(str(copied_source), tmp_path / "a", tp=2, threads=1)
    elsewhere = shutil.copytree(copied_source, tmp_path / "elsewhere")
    convert(str(elsewhere), tmp_path / "b", tp=2, threads=2)
    card = (tmp_path / "a" / "README.md").read_text()
    assert card == (tmp_path / "b" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\ntags:\n")
    assert "base_model" not in card
    assert str(tmp_path) not in card


def test_a_token_is_not_shown() -> None:
    assert without_secrets(["convert", "--token", "secret", "a"]) == ["convert", "--token", "...", "a"]
    assert without_secrets(["--token=secret"]) == ["--token=..."]


def test_a_licence_of_blanks_takes_no_longer_than_its_length() -> None:
    card = "---\nlicense: a" + " " * 1_000_000 + "b" + "\t" * 1_000_000 + "\n---\n"
    (line,) = carried_lines(card.encode())
    assert line == "license: a" + " " * 1_000_000 + "b"
