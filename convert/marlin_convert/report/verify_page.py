"""The page of `verify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from marlin_convert.checks.outcome import of_verification
from marlin_convert.documents.checks import CheckedUnit, VerifyReport
from marlin_convert.documents.manifest import Manifest
from marlin_convert.report import parts
from marlin_convert.report.charts import Bar, bars
from marlin_convert.report.files_map import FilesMap
from marlin_convert.report.guide import guide
from marlin_convert.report.histograms import histograms
from marlin_convert.report.html import Content, Html, behind, section, table, tag
from marlin_convert.report.lead import lead
from marlin_convert.report.page import MARKS, About, Page, Tone, note, sentence
from marlin_convert.words import gigabytes

WORDS: dict[str, tuple[Tone, str]] = {
    "exact": ("good", "EXACT"),
    "sound": ("warn", "SOUND, NOT ALL PROVEN"),
    "NOT OK": ("bad", "NOT OK"),
}


def verify_page(manifest: Manifest, found: VerifyReport, about: About) -> Page:
    """What `verify` found of a folder."""
    outcome = of_verification(found)
    tone, word = WORDS[outcome.word]
    states = _states(manifest, found)
    left_out = sum(state == "left out" for state in states.values())
    said = (lead(outcome, found.findings, manifest, about), parts.is_part(manifest))
    return Page(
        about,
        tone,
        f"{word}, OF A PART" if left_out and found.ok else word,
        (*said, _left_out(left_out, len(states))),
        (
            _files(manifest, found, states),
            parts.findings(found.findings, "verify.json"),
            _how(found),
            histograms(found.units),
            parts.times_and_machine(found.seconds, found.environment, _time_by_unit(found.units)),
            guide(),
        ),
    )


def _states(manifest: Manifest, found: VerifyReport) -> dict[tuple[str, int | None], str]:
    """How each file stands, by unit and rank."""
    here = {(shard.unit, shard.rank): "left out" for shard in manifest.shards}
    return here | {(unit.unit, shard.rank): shard.state for unit in found.units for shard in unit.shards}


def _left_out(count: int, every: int) -> Content:
    if not count:
        return None
    return note("warn", f"Only a part was asked for: {count:,} of {every:,} shard files were left out.")


def _files(manifest: Manifest, found: VerifyReport, states: Mapping[tuple[str, int | None], str]) -> Html:
    others = parts.beside(found.findings, manifest)
    beside: Content = (
        (
            tag("strong", f"{MARKS['bad']} Beside the shards, wrong: "),
            ", ".join(others[:20]),
            "" if len(others) <= 20 else " …",
        )
        if others
        else f"{MARKS['good']} The files beside the shards are sound."
    )
    return section(
        "Files",
        FilesMap(manifest, states).picture("How each shard file stands, by rank and layer"),
        sentence(beside),
        parts.of_what(manifest),
    )


def _how(found: VerifyReport) -> Html:
    source = found.against == "source"
    against = "the published files, read now" if source else "the digests of the source that the folder keeps"
    done = (
        f"Files ({found.files:,}): size and digest of each beside the shards; size and header of each shard,"
        " by this program and by the safetensors package; manifest, indexes and config.json, derived again.",
        f"Tensors ({gigabytes(found.bytes)}, read from the disk): the digest of each, and of each expert.",
        "Routed experts: put together from all ranks, the layout inverted, every nibble and every scale"
        f" compared with {against}. All other tensors: the same without a layout.",
        f"Source tensors compared: {found.tensors_proven:,}; not put together: {found.tensors_unproven:,}.",
    )
    left = [
        "Whether the kernel reads the shards right: marlin-convert verify --kernel, on a GPU.",
        "Whether someone who can write to the folder changed it on purpose: digests protect against damage"
        " and mistakes.",
    ]
    unread = [unit.unit for unit in found.units if not unit.bytes]
    if unread:
        left.insert(
            0, f"Tensors of {', '.join(unread)}: a file there is unsound, so none of its unit was read."
        )
    if not source:
        left.insert(0, "The published files themselves were not read: give --source for that.")
    return section(
        "What was checked",
        tag("ul", *(tag("li", each) for each in done)),
        sentence(tag("strong", "Not checked")),
        tag("ul", *(tag("li", each) for each in left)),
    )


def _time_by_unit(units: Sequence[CheckedUnit]) -> Content:
    timed = [unit for unit in units if unit.seconds]
    if not timed:
        return None
    every = len(timed) // 12 + 1
    drawn = [
        Bar(unit.unit, _short(unit) if at % every == 0 else "", unit.seconds, f"{unit.seconds:.1f} s")
        for at, unit in enumerate(timed)
    ]
    rows: list[tuple[Content, ...]] = [
        (
            unit.unit,
            unit.bytes,
            f"{unit.seconds:.1f}",
            unit.tensors_proven,
            unit.tensors_unproven,
            *(_range(unit, name) for name in ("gate_proj", "up_proj", "down_proj")),
        )
        for unit in units
    ]
    header = (
        "unit",
        "bytes",
        "thread seconds",
        "proven",
        "not proven",
        "gate scales",
        "up scales",
        "down scales",
    )
    return (
        tag("div", bars("seconds of all threads by layer", drawn, wide=1100), class_="broad"),
        behind("by layer", table("Each unit", header, rows)),
    )


def _short(unit: CheckedUnit) -> str:
    return unit.unit if unit.layer is None else str(unit.layer)


def _range(unit: CheckedUnit, projection: str) -> str:
    for counted in unit.values:
        if counted.projection == projection and counted.scales:
            return f"{counted.scales[0].begin:.2g} to {counted.scales[-1].begin:.2g}"
    return ""
