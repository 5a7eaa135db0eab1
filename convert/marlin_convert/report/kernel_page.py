"""The page of `verify --kernel`."""

from __future__ import annotations

import math

from marlin_convert.checks.outcome import error_text, of_kernel
from marlin_convert.documents.checks import FusedVerdict, KernelCheck
from marlin_convert.documents.manifest import Manifest
from marlin_convert.report import parts
from marlin_convert.report.experts_map import experts_map
from marlin_convert.report.files_map import FilesMap
from marlin_convert.report.guide import guide
from marlin_convert.report.html import Content, Html, behind, section, table, tag
from marlin_convert.report.lead import lead
from marlin_convert.report.page import MARKS, About, Page, Tone, note, sentence

WORDS: dict[str, tuple[Tone, str]] = {
    "kernel-exact": ("good", "THE KERNEL READS EXACT"),
    "model-exact": ("warn", "A MODEL READS EXACT, NOT THE KERNEL"),
    "NOT OK": ("bad", "NOT OK"),
}
MODEL = (
    "No GPU ran. A model of the kernel's threads, in Python on the CPU, stood in its place: it shows that the"
    " files are as the kernel's code says it reads them, and says nothing about a kernel or a GPU."
)


def kernel_page(manifest: Manifest, found: KernelCheck, about: About) -> Page:
    """What `verify --kernel` found of a folder."""
    outcome = of_kernel(found)
    tone, word = WORDS[outcome.word]
    return Page(
        about,
        tone,
        word,
        (
            lead(outcome, found.findings, manifest, about),
            note("warn", MODEL) if found.model else None,
            _left_out(manifest, found),
        ),
        (
            _files(manifest, found),
            parts.findings(found.findings, "kernel-report.json"),
            section("Experts", experts_map(found)),
            _fused(found),
            _how(found),
            parts.times_and_machine(found.seconds, found.environment, _by_layer(found)),
            guide(),
        ),
    )


def _left_out(manifest: Manifest, found: KernelCheck) -> Content:
    layers = sum(any(origin.rule == "experts" for origin in unit.tensors) for unit in manifest.units)
    ranks = {rank.rank for layer in found.layers for rank in layer.ranks}
    if len(found.layers) == layers and len(ranks) == manifest.tp and not found.skipped:
        return None
    some = (
        f"It ran for {len(found.layers)} of {layers} layers with experts in the folder, and {len(ranks)} of"
    )
    skipped = f" Not run: {'; '.join(found.skipped[:3])}{' …' if len(found.skipped) > 3 else ''}."
    return note("warn", f"{some} {manifest.tp} ranks.", skipped if found.skipped else "")


def _files(manifest: Manifest, found: KernelCheck) -> Html:
    states = {(shard.unit, shard.rank): "not run" for shard in manifest.shards}
    names = {unit.layer: unit.name for unit in manifest.units}
    wrong = {(each.layer, each.rank) for each in found.findings}
    for layer in found.layers:
        bad = {rank.rank for rank in layer.ranks if not rank.ok or (layer.layer, rank.rank) in wrong}
        # what is wrong with the whole layer is explained by a rank that is
        others = "suspect" if (layer.layer, None) in wrong and not bad else "read right"
        for rank in layer.ranks:
            states[names[layer.layer], rank.rank] = "wrong" if rank.rank in bad else others
    return section(
        "Files",
        FilesMap(manifest, states).picture("What was read of each shard file, by rank and layer"),
        parts.of_what(manifest),
    )


def _fused(found: KernelCheck) -> Html:
    if not found.fused:
        return section("The whole routed MoE", sentence("It did not run."))
    counts = sorted({verdict.tokens for verdict in found.fused})
    every = {count: [verdict for verdict in found.fused if verdict.tokens == count] for count in counts}
    rows = [(str(count), len(of), *_worst(of)) for count, of in every.items()]
    header = ("tokens", "layers", "largest error", "in layer", "tolerance", "")
    single = [
        (str(v.layer), str(v.tokens), error_text(v.relative_error), f"{v.tolerance:.2e}", _sign(v.ok))
        for v in found.fused
    ]
    return section(
        "The whole routed MoE",
        sentence("Routing, both matrices and the sum over all ranks, against float32."),
        table("The largest relative error by number of tokens", header, rows),
        behind("by layer", table("Each layer", ("layer", "tokens", "error", "tolerance", ""), single)),
    )


def _worst(verdicts: list[FusedVerdict]) -> tuple[str, str, str, str]:
    def key(verdict: FusedVerdict) -> tuple[bool, float]:
        error = verdict.relative_error
        finite = error is not None and math.isfinite(error)
        return (not finite, (error or 0.0) if finite else 0.0)

    worst = max(verdicts, key=key)
    error = error_text(worst.relative_error)
    return error, str(worst.layer), f"{worst.tolerance:.2e}", _sign(all(v.ok for v in verdicts))


def _sign(ok: bool) -> str:
    return f"{MARKS['good']} right" if ok else f"{MARKS['bad']} wrong"


def _how(found: KernelCheck) -> Html:
    reader = "The model" if found.model else "The kernel"
    done = (
        f"{reader} was given one-hot activations, so that it reads back every weight of the experts that ran,"
        f" and each was compared with the dequantized original: {found.weights_read_back:,} weights.",
        f"{reader} multiplied random activations with each matrix; an error above {found.tolerance:.1e}"
        " (twice the rounding of an output to bf16) counts as wrong.",
    )
    left = (
        "Attention, norms, embeddings and the files beside the shards, and whether the folder is whole:"
        " marlin-convert verify, without --kernel."
    )
    return section(
        "What was checked",
        tag("ul", *(tag("li", each) for each in done)),
        sentence(tag("strong", "Not checked")),
        tag("ul", tag("li", left)),
    )


def _by_layer(found: KernelCheck) -> Content:
    rows = [
        (
            str(layer.layer),
            str(rank.rank),
            m.projection,
            m.wrong,
            error_text(m.relative_error),
            error_text(m.max_error),
        )
        for layer in found.layers
        for rank in layer.ranks
        for m in rank.matrices
    ]
    header = (
        "layer",
        "rank",
        "matrix",
        "weights read differently",
        "largest relative error",
        "largest difference",
    )
    seconds = [(str(layer.layer), f"{layer.seconds:.1f}") for layer in found.layers]
    return (
        behind("seconds by layer", table("Each layer", ("layer", "seconds"), seconds)),
        behind(
            "errors by layer, rank and matrix", table("Each matrix of all experts of a rank", header, rows)
        ),
    )
