"""What the pages of `verify --report` and `inspect --report` say, read without a browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import trees
from checkpoints import Checkpoint
from html_pages import Reading, read_page
from marlin_convert.pipeline.run import convert

Command = Callable[..., tuple[int, str, str]]
SCHEMAS = Path(__file__).parents[2] / "schemas"
SHARD = "rank-01-of-02/layer-001.safetensors"


def report(folder: Path, name: str = "verify") -> tuple[Reading, dict[str, Any]]:
    """Page and JSON; the JSON is what its schema says."""
    document = json.loads((folder / f"{name}.json").read_bytes())
    Draft202012Validator(json.loads((SCHEMAS / f"{name}.schema.json").read_bytes())).validate(document)
    return read_page(folder / f"{name}.html"), document


def states(document: dict[str, Any]) -> dict[tuple[str, int | None], str]:
    """How each file stands."""
    return {(u["unit"], shard["rank"]): shard["state"] for u in document["units"] for shard in u["shards"]}


@pytest.mark.parametrize("with_source", [False, True])
def test_exact(tiny: Checkpoint, tiny_tp2: Path, command: Command, tmp_path: Path, with_source: bool) -> None:
    source = ("--source", tiny.folder) if with_source else ()
    code, out, said = command("verify", tiny_tp2, *source, "--report", tmp_path / "a" / "b")
    assert (code, said) == (0, f"report: {tmp_path}/a/b/verify.html\n")
    page, document = report(tmp_path / "a" / "b")
    assert "✓ EXACT" in page.text
    assert out.removeprefix("exact: ").strip() in page.text
    assert ("The published files themselves were not read" in page.text) == (not with_source)
    assert document["against"] == ("source" if with_source else "digests")
    assert "To mend it" not in page.text
    assert "not part of this folder" not in page.text
    assert set(states(document).values()) == {"exact"}
    assert sum(unit["tensors_proven"] for unit in document["units"]) == document["tensors_proven"] == 138
    assert f"verify {tiny_tp2}" in page.text
    assert (
        "rank 0, layer 0 to top: exact, read from the disk and equal to the source, bit for bit"
        in page.titles
    )


def test_values_are_those_of_the_source(
    tiny: Checkpoint, tiny_tp2: Path, command: Command, tmp_path: Path
) -> None:
    command("verify", tiny_tp2, "--report", tmp_path)
    _, document = report(tmp_path)
    (layer,) = [unit for unit in document["units"] if unit["layer"] == 2]
    (down,) = [each for each in layer["values"] if each["projection"] == "down_proj"]
    # of 256 rows some 8, from another one on for each expert
    assert down["codes"] == counted_codes(tiny.folder, "layers.2.", "down_proj.weight_packed", every=32)
    assert [unit["unit"] for unit in document["units"] if unit["values"]] == ["layer-001", "layer-002"]
    assert down["negative"] == down["not_finite"] == 0


def counted_codes(folder: Path, layer: str, ending: str, every: int) -> list[int]:
    """The codes in some rows of the experts' source tensors of this name, nibble by nibble."""
    counts = [0] * 16
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        begin = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:begin]).items():
            if layer in name and ".experts." in name and name.endswith(ending):
                rows, words = entry["shape"]
                expert, first = (
                    int(name.split(".experts.")[1].split(".")[0]),
                    begin + entry["data_offsets"][0],
                )
                for row in range(expert % every, rows, every):
                    for byte in raw[first + 4 * words * row : first + 4 * words * (row + 1)]:
                        counts[byte & 15] += 1
                        counts[byte >> 4] += 1
    return counts


def test_a_wrong_nibble(copied: Path, command: Command, tmp_path: Path) -> None:
    name = "language_model.model.layers.1.mlp.experts.w13_weight_packed"
    _, _, _, offset, size = next(e for e in trees.read_shard(copied / SHARD).entries if e[0] == name)
    with (copied / SHARD).open("r+b") as file:
        file.seek(offset + size // 2)  # the first of expert 2
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    code, _, said = command("verify", copied, "--report", tmp_path / "report")
    assert code == 1
    page, document = report(tmp_path / "report")
    assert "✕ NOT OK" in page.text
    assert f"first: {SHARD}: layer 1, expert 2," in page.text
    written, mend = said.splitlines()
    assert written == f"report: {tmp_path}/report/verify.html"
    assert mend.removeprefix("to mend it: ") in page.text
    assert f"rm -f -- {copied}/{SHARD} marlin-convert convert SOURCE {copied} --tp 2 --ep 1" in page.text
    assert [place for place, state in states(document).items() if state != "exact"] == [("layer-001", 1)]
    assert states(document)["layer-001", 1] == "wrong"
    assert "✕ wrong: rank 1, layer 1." in page.text
    assert "rank 1, layer 1: wrong, a finding names it" in page.titles
    assert "The files beside the shards are sound" in page.text


def test_a_missing_file(copied: Path, command: Command, tmp_path: Path) -> None:
    (copied / SHARD).unlink()
    assert command("verify", copied, "--report", tmp_path / "report")[0] == 1
    page, document = report(tmp_path / "report")
    assert states(document)["layer-001", 1] == "wrong"
    assert states(document)["layer-001", 0] == "unread"
    assert list(states(document).values()).count("exact") == len(states(document)) - 2
    assert "1 not read : not read, since another file of its layer is unsound" in page.text
    assert "Tensors of layer-001: a file there is unsound" in page.text


def test_a_wrong_digest_beside_the_shards(copied: Path, command: Command, tmp_path: Path) -> None:
    (copied / "README.md").write_bytes(b"other")
    assert command("verify", copied, "--report", tmp_path / "report")[0] == 1
    page, document = report(tmp_path / "report")
    assert set(states(document).values()) == {"exact"}
    assert "✕ Beside the shards, wrong: README.md" in page.text
    assert f"# move away first: {copied}/README.md marlin-convert convert SOURCE {copied} --tp 2" in page.text
    assert "rm -f" not in page.text
    assert "1 finding in 1 place" in page.text


def test_what_is_put_together_wrong_is_suspect_on_every_rank(
    copied: Path, command: Command, tmp_path: Path
) -> None:
    """Two slices of a tensor and their digests exchanged: of none can be said that it is the wrong one."""
    from marlin_convert.checks.findings import Finding, Verification
    from marlin_convert.checks.units import Blame, UnitVerification
    from marlin_convert.documents.manifest import read_manifest

    manifest = read_manifest(copied)
    whole = Verification()
    for unit in manifest.units:
        shards = [shard for shard in manifest.shards if shard.unit == unit.name]
        UnitVerification(whole=whole, unit=unit, shards=shards)
    whole.units["top"].add(Finding("rank-*/top.safetensors", "differs"))
    whole.add(Finding("layer-001.safetensors", "is not in the manifest; move it away"))
    found = {name: unit.summed_up(Blame(whole.findings)) for name, unit in whole.units.items()}
    assert [shard.state for shard in found["top"].shards] == ["suspect", "suspect"]
    assert [shard.state for shard in found["layer-001"].shards] == ["exact", "exact"]
    assert len(whole.findings) == 2
    assert len(whole.units["top"].findings) == 1


def test_a_part(tiny: Checkpoint, command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(str(tiny.folder), out, tp=2, ranks=(0,), layers=(1,), threads=2)
    code, _, _ = command("verify", out, "--report", tmp_path / "report")
    assert code == 0
    page, document = report(tmp_path / "report")
    assert "! SOUND, NOT ALL PROVEN" in page.text
    assert "This folder is a part: 1 of 2 ranks, 1 of 3 layers. Of the rest nothing is said." in page.text
    assert states(document) == {("layer-001", 0): "sound"}
    assert "rank 1, layer 0 to 2: not here, not part of this folder" in page.titles
    assert "No histograms" in page.text
    code, _, _ = command("verify", out, "--source", tiny.folder, "--report", tmp_path / "report")
    page, document = report(tmp_path / "report")
    assert "✓ EXACT" in page.text
    assert "This folder is a part" in page.text
    assert states(document) == {("layer-001", 0): "exact"}
    assert len(document["units"][0]["values"]) == 3


def test_hostile_names(copied: Path, command: Command, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>\u202e\x1b[31m&amp;\"'"
    (copied / hostile).write_bytes(b"")
    assert command("verify", copied, "--report", tmp_path / "report")[0] == 1
    raw = (tmp_path / "report" / "verify.html").read_text("utf-8")
    page, _ = report(tmp_path / "report")
    assert "img" not in page.tags
    assert "\u202e" not in raw
    assert "\x1b" not in raw
    assert "<img src=x onerror=alert(1)>\\u202e\\x1b[31m&amp;\"'" in page.text
    assert "rm -f" not in page.text


def test_a_stray_file_with_the_name_of_a_shard_makes_no_shard_suspect(
    copied: Path, command: Command, tmp_path: Path
) -> None:
    (copied / "layer-001.safetensors").write_bytes(b"")
    assert command("verify", copied, "--report", tmp_path / "report")[0] == 1
    page, document = report(tmp_path / "report")
    assert set(states(document).values()) == {"exact"}
    assert "rm -f" not in page.text
    assert "✕ Beside the shards, wrong: layer-001.safetensors" in page.text


def test_inspect(copied: Path, command: Command, tmp_path: Path) -> None:
    assert command("inspect", copied, "--report", tmp_path / "report")[0] == 0
    page, _ = report(tmp_path / "report", "inspect")
    assert "· NOT CHECKED" in page.text
    assert "EXACT" not in page.text
    assert f"marlin-convert verify {copied} --report report" in page.text
    (copied / SHARD).unlink()
    assert command("inspect", copied, "--report", tmp_path / "report")[0] == 0
    page, _ = report(tmp_path / "report", "inspect")
    assert "✕ INCOMPLETE, NOT CHECKED" in page.text
    assert "1 of 9 shard files are missing or not of their size." in page.text
    assert "✕ missing: rank 1, layer 1." in page.text
    code, _, said = command("inspect", copied / "rank-00-of-02/top.safetensors", "--report", tmp_path)
    assert (code, "--report is for a converted folder as a whole" in said) == (2, True)


def test_stages_and_slots(tiny: Checkpoint, command: Command, tmp_path: Path) -> None:
    """How it is split is said once, whatever is split; the file that no rank owns is one cell."""
    rows = [[slot % 4 for slot in range(6)]] * 2
    (tmp_path / "map.json").write_text(json.dumps({"physical_to_logical_map": rows}))
    more = ("--ep", 2, "--pp", 2, "--attn-tp", 1, "--expert-map", tmp_path / "map.json")
    assert command("convert", tiny.folder, tmp_path / "out", "--tp", 2, *more)[0] == 0
    assert command("inspect", tmp_path / "out", "--report", tmp_path / "report")[0] == 0
    assert command("verify", tmp_path / "out", "--report", tmp_path / "report")[0] == 0
    for name, state in (("inspect", "there"), ("verify", "exact")):
        page, _ = report(tmp_path / "report", name)
        stages = "layer 0, embed, common; layers 1 to 2, head"
        assert f"split tp 2, ep 2, attn-tp 1, pp 2 stages {stages}" in page.text
        assert page.text.count(" split ") == 1
        assert "experts placed by a map in 6 slots of each layer" in page.text
        assert any(title.startswith(f"rank 1, layer 0 to head: {state}, ") for title in page.titles)
        assert any(title.startswith(f"common: {state}, ") for title in page.titles)
        filled = [i for i, (_, key, value) in enumerate(page.attributes) if key == "fill" and "#s-" in value]
        # two ranks of five files each, and the one of common/
        assert [page.attributes[i - 2][1:] for i in filled] == [("width", f"{18 * n}") for n in (5, 5, 1)]
        upright = [value for tag, key, value in page.attributes if (tag, key) == ("text", "transform")]
        assert len(upright) == 2


def test_no_page_of_an_earlier_run_is_left(copied: Path, command: Command, tmp_path: Path) -> None:
    assert command("verify", copied, "--report", tmp_path / "report")[0] == 0
    (copied / "manifest.json").write_text("{}")
    code, _, said = command("verify", copied, "--report", tmp_path / "report")
    assert code == 1
    page = read_page(tmp_path / "report" / "verify.html")
    assert "✕ COULD NOT BE CHECKED" in page.text
    assert said.removeprefix("error: ").strip() in page.text
    assert "EXACT" not in page.text
    assert not (tmp_path / "report" / "verify.json").exists()


def test_within_the_folder_itself_there_is_no_place(copied: Path, command: Command) -> None:
    code, out, said = command("verify", copied, "--report", copied / "report")
    assert (code, out) == (2, "")
    assert "lies within" in said
    assert not (copied / "report").exists()
    assert command("verify", copied)[0] == 0


def test_a_report_whose_name_is_taken_is_found_before_the_work(
    tiny_tp2: Path, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "verify.html").mkdir()
    code, out, said = command("verify", tiny_tp2, "--report", tmp_path)
    assert (code, out) == (2, "")
    assert f"{tmp_path / 'verify.html'} would be replaced and is not of a report" in said


def test_the_verdict_is_said_where_the_report_can_no_longer_be_written(
    tiny_tp2: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from marlin_convert.checks import verify

    def and_then(*arguments: Any, **named: Any) -> Any:
        found = whole(*arguments, **named)
        shutil.rmtree(tmp_path / "report")
        return found

    whole = verify.verify
    monkeypatch.setattr(verify, "verify", and_then)
    code, out, said = command("verify", tiny_tp2, "--report", tmp_path / "report")
    assert code == 4
    assert out.startswith("exact: ")
    assert "writing the report into" in said
