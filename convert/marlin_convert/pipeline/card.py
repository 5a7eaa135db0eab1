"""README.md of a conversion: a model card for the hub, the same bytes for the same conversion."""

from __future__ import annotations

import re
from collections.abc import Sequence

from marlin_convert.checkpoint.source import Source
from marlin_convert.documents.identity import SourceIdentity
from marlin_convert.documents.manifest import ListedFile
from marlin_convert.pipeline.target import Target
from marlin_convert.planning.output_plan import OutputPlan

#: what of the source's card stays true of a conversion
CARRIED = re.compile(r"(license|license_name|license_link)[ \t]*:[ \t]*(\S.*)")


LOADING = """## Load it

Rank R of the engine maps the files of its own folder, `{folder}`; nothing is cut, permuted or \
repacked any more.

    from marlin_convert import open_shards

    shards = open_shards(FOLDER, rank=0)  # names, dtypes, and arrays that are mapped from the files

Any safetensors reader opens the files as well. The format is described in schemas/README.md of \
marlin-convert.

`marlin-convert verify FOLDER` compares every byte with the digests in `manifest.json`, and inverts the \
layout to the digests of the
published tensors."""


def model_card(target: Target, checks: str, files: Sequence[ListedFile]) -> bytes:
    """The card. `files` are the documents beside the shards, as the manifest lists them."""
    source, identity, plan, scheme = target.source, target.identity, target.plan, target.plan.shape.scheme
    unproven = " on purpose; it was not checked while converting: run `marlin-convert verify`."
    proof = (
        ": each tensor was inverted and compared with the source before it was written."
        if checks != "none"
        else unproven
    )
    return "\n".join(
        [
            "---",
            *_front_matter(source, identity),
            "---",
            "",
            f"# {_title(source, identity)} for {plan.topology.tp * plan.topology.pp} GPUs, Marlin layout",
            "",
            (
                f"Made by marlin-convert from {_origin(identity)}: the same weights, cut for"
                f" {_parallel(plan)} and put in the order in which the Marlin"
            ),
            (
                f"MoE kernel reads them (`{plan.layout.id}`, {scheme.num_bits} bit, group"
                f" {scheme.group_size}). No value was changed{proof}"
            ),
            "",
            LOADING.format(folder=f"{'stage-SS-of-PP/' if plan.topology.pp > 1 else ''}rank-RR-of-NN/"),
            "",
            "## What is in it",
            "",
            *_sizes(source, plan),
            "",
            "## Digests",
            "",
            *_digests(identity, files),
            "",
        ]
    ).encode()


def _front_matter(source: Source, identity: SourceIdentity) -> list[str]:
    """YAML for the hub."""
    lines = carried_lines(source.readme or b"")
    if identity.repo is not None:
        lines += [f"base_model: {identity.repo}", "base_model_relation: quantized"]
    return [*lines, "tags:", "- marlin", "- int4", "- moe"]


def carried_lines(readme: bytes) -> list[str]:
    """The licence, word for word, from the front matter of the source's card."""
    text = readme.decode("utf-8", "replace").removeprefix("\ufeff").replace("\r\n", "\n")
    match = re.match(r"---\n(.*?)\n---(?:\n|$)", text, re.DOTALL)
    if match is None:
        return []
    return [
        f"{found[1]}: {found[2]}"
        for line in match[1].split("\n")
        if (found := CARRIED.fullmatch(line.rstrip(" \t"))) is not None
    ]


def _title(source: Source, identity: SourceIdentity) -> str:
    return source.model.family.title if identity.repo is None else identity.repo.partition("/")[2]


def _origin(identity: SourceIdentity) -> str:
    if identity.repo is None:
        return f"the checkpoint with the source id `{identity.id}`"
    return f"[{identity.repo}](https://huggingface.co/{identity.repo}) at commit `{identity.revision}`"


def _parallel(plan: OutputPlan) -> str:
    experts = (
        f", its experts over {plan.topology.ep} groups (ep {plan.topology.ep})"
        if plan.topology.ep > 1
        else ""
    )
    attention = (
        f", attention and dense layers in {plan.topology.attn_tp} slices (attn-tp {plan.topology.attn_tp})"
        if plan.topology.attn_tp
        else ""
    )
    stages = (
        f", its layers over {plan.topology.pp} stages (pp {plan.topology.pp})" if plan.topology.pp > 1 else ""
    )
    placement = plan.topology.placement
    placed = "" if placement is None else f", its experts placed by a map in {placement.slots} slots a layer"
    return f"tp {plan.topology.tp}{experts}{attention}{stages}{placed}"


def _sizes(source: Source, plan: OutputPlan) -> list[str]:
    rows = [
        ("shard files", f"{sum(len(unit.ranks) for unit in plan.units):,}"),
        ("bytes of all shard files", f"{plan.total_bytes:,}"),
        ("bytes of weights a rank loads", f"{plan.rank_bytes():,}"),
        ("ranks", f"{len(plan.ranks)} of {plan.topology.tp}"),
        ("layers", f"{len(plan.layers)} of {source.model.layers}"),
        ("tensors of the source", f"{len(source.tensors):,}"),
        ("bytes of the source's tensors", f"{source.payload_bytes:,}"),
    ]
    return ["| | |", "|---|---:|", *(f"| {what} | {value} |" for what, value in rows)]


def _digests(identity: SourceIdentity, files: Sequence[ListedFile]) -> list[str]:
    """Few enough to read; manifest.json has all of them."""
    own = {file.path: file.digest for file in files}
    lines = [
        (
            f"Source id `{identity.id}`. xxh3-128 of the published `config.json`: `{identity.config}`; of"
            " `digests.bin` (the experts):"
        ),
        (
            f"`{own['digests.bin']}`; of `source/digests.bin` (the published tensors):"
            f" `{own['source/digests.bin']}`."
        ),
    ]
    if identity.compared:
        lines += ["", "| published file | bytes | sha256 |", "|---|---:|---|"]
        lines += [f"| {file.name} | {file.size:,} | `{file.sha256}` |" for file in identity.files]
    return lines
