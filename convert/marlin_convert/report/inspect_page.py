"""The page of `inspect`: what is in a folder, without a check."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from marlin_convert.documents.manifest import Manifest, Shard
from marlin_convert.documents.results import InspectedFolder
from marlin_convert.report import parts
from marlin_convert.report.files_map import FilesMap
from marlin_convert.report.html import Html, facts, section, table
from marlin_convert.report.page import About, Page, commands, sentence
from marlin_convert.words import gigabytes


def inspect_page(manifest: Manifest, found: InspectedFolder, about: About) -> Page:
    """What a folder's manifest says, and whether its files have their sizes."""
    missing = frozenset(found.missing)
    states = {(s.unit, s.rank): "missing" if s.path in missing else "there" for s in manifest.shards}
    absent = len(missing)
    lead = [
        sentence("Nothing was read but the manifest and the sizes of the files. To check every byte:"),
        commands(f"marlin-convert verify {shlex.quote(about.out)} --report report"),
    ]
    if absent:
        text = f"{absent:,} of {len(states):,} shard files are missing or not of their size."
        lead.insert(0, sentence(text, " Run the same convert command again; it remakes what is missing."))
    return Page(
        about,
        "bad" if absent else "idle",
        "INCOMPLETE, NOT CHECKED" if absent else "NOT CHECKED",
        (*lead, parts.is_part(manifest)),
        (
            section(
                "Files",
                FilesMap(manifest, states).picture("Which shard files there are, by rank and layer"),
                parts.of_what(
                    manifest,
                    ("shard files", len(states)),
                    ("their bytes", f"{_bytes(manifest.shards):,} ({gigabytes(_bytes(manifest.shards))})"),
                ),
            ),
            _units(manifest),
            _constants(manifest),
        ),
    )


def _bytes(shards: Sequence[Shard]) -> int:
    return sum(shard.size for shard in shards)


def _units(manifest: Manifest) -> Html:
    by_unit: dict[str, list[Shard]] = {unit.name: [] for unit in manifest.units}
    for shard in manifest.shards:
        by_unit[shard.unit].append(shard)
    rows = [
        (name, len(shards), len(shards[0].tensors), shards[0].size, _bytes(shards), gigabytes(_bytes(shards)))
        for name, shards in by_unit.items()
        if shards
    ]
    header = ("unit", "files", "tensors of one", "bytes of one", "bytes of all", "")
    return section("Units", table("Each unit", header, rows))


def _constants(manifest: Manifest) -> Html:
    return section("Constants of the model", facts(*((key, str(v)) for key, v in manifest.model.items())))
