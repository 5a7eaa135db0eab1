"""Parts that several pages have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from marlin_convert.checks.findings import STRAY
from marlin_convert.documents.checks import ReportedFinding
from marlin_convert.documents.manifest import Manifest, PipelineStage
from marlin_convert.report.html import Content, Html, facts, html, section, table
from marlin_convert.report.page import note, sentence

#: findings in the table; there can be a hundred thousand
SHOWN = 200


def beside(found: Sequence[ReportedFinding], manifest: Manifest) -> list[str]:
    """Places of findings that are no shard files of the manifest."""
    shards = {shard.path for shard in manifest.shards}
    names = {f"{unit.name}.safetensors" for unit in manifest.units} | {unit.name for unit in manifest.units}
    return sorted(
        {
            each.path
            for each in found
            if STRAY in each.what or not (each.path in shards or each.path.rpartition("/")[2] in names)
        }
    )


def findings(found: Sequence[ReportedFinding], name: str) -> Html:
    """All that is wrong, or nothing; `name` is the JSON beside the page."""
    if not found:
        return Html()
    rows = [
        (each.path, *map(_coordinate, (each.layer, each.rank, each.expert, each.projection)), each.what)
        for each in found[:SHOWN]
    ]
    more = f"{len(found) - SHOWN:,} more are in {name}." if len(found) > SHOWN else None
    header = ("file", "layer", "rank", "expert", "matrix", "what")
    return section("What is wrong", table("Findings", header, rows, "findings"), more and sentence(more))


def _coordinate(value: int | str | None) -> str:
    return "" if value is None else str(value)


def of_what(manifest: Manifest, *more: tuple[str, Content]) -> Html:
    """Facts of a folder."""
    source, parallel = manifest.source, manifest.parallel
    apart = f", attn-tp {parallel.attn_tp}" if parallel.attn_tp is not None else ""
    stages = [("stages", "; ".join(map(_stage, parallel.stages)))] if parallel.stages else []
    named = f"{source.repo} at {source.revision}" if source.repo else "not named"
    placed = (
        [("experts", f"placed by a map in {parallel.slots:,} slots of each layer")] if parallel.slots else []
    )
    return facts(
        *more,
        ("layout", manifest.layout_id),
        ("split", f"tp {manifest.tp}, ep {manifest.ep}{apart}{f', pp {parallel.pp}' if stages else ''}"),
        *stages,
        *placed,
        ("checked while converting", manifest.checks),
        ("source", f"{source.tensors:,} tensors, id {source.id}"),
        ("published as", named),
    )


def _stage(stage: PipelineStage) -> str:
    first, *more = stage.layers
    layers = f"layers {first} to {more[-1]}" if more else f"layer {first}"
    return ", ".join((layers, *stage.has))


def is_part(manifest: Manifest) -> Html:
    """That a folder is only a part of the model, where it is."""
    if manifest.complete:
        return Html()
    return note(
        "warn",
        f"This folder is a part: {len(manifest.ranks)} of {manifest.tp} ranks,"
        f" {len(manifest.layers)} of {manifest.model.get('num_hidden_layers', 'unknown')} layers."
        " Of the rest nothing is said.",
    )


def times_and_machine(
    seconds: Mapping[str, float], environment: Mapping[str, object], *more: Content
) -> Html:
    """How long it took, and where."""
    stages = [(stage, f"{each:,.1f} s") for stage, each in seconds.items()]
    ran = [(name, "not installed" if value is None else str(value)) for name, value in environment.items()]
    return html(
        (
            section("Time", facts(*stages), *more),
            section("Where it ran", facts(*ran)) if ran else None,
        )
    )
