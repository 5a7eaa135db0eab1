"""The last step: indexes, the engine's small files, source/, digests, provenance, and the manifest last of
all.
"""

from __future__ import annotations

import gzip
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from marlin_convert.checkpoint.index import INDEX_NAME
from marlin_convert.checkpoint.source import Source
from marlin_convert.documents.bounds import LISTED
from marlin_convert.documents.codec import NO_DIGEST, sealed
from marlin_convert.documents.engine_files import quantization_config
from marlin_convert.documents.manifest import MANIFEST_NAME, ListedFile
from marlin_convert.documents.provenance import NAME as PROVENANCE
from marlin_convert.documents.provenance import Provenance
from marlin_convert.documents.records import WORK, FinishedUnit
from marlin_convert.extras import package_version
from marlin_convert.models.quantization import rewritten
from marlin_convert.pipeline.build_manifest import build_manifest, digest_file, rank_index, source_digests
from marlin_convert.pipeline.card import model_card
from marlin_convert.pipeline.out_state import edited, is_written_provenance
from marlin_convert.pipeline.rank_documents import with_rank_documents
from marlin_convert.pipeline.stages import Stages
from marlin_convert.pipeline.target import Target
from marlin_convert.pipeline.work_folder import WorkFolder
from marlin_convert.planning.output_plan import OutputPlan, OutputUnit
from marlin_convert.shards.kept_source import may_be_theirs
from marlin_convert.storage.files import digest, file_digest, machine_errors, write_atomic, write_documents
from marlin_convert.storage.shard_file import FORMAT, format_version
from marlin_convert.threads import Workers

#: small files of the source that are read at a time
AT_A_TIME = 8


def finish_output(target: Target, records: Mapping[str, FinishedUnit], checks: str, stages: Stages) -> None:
    """Write everything beside the shards, then the manifest. All of it can be done again after a crash.
    Raises UsageError where a document of another content is there: a user may have put it there.
    """
    source, plan, out = target.source, target.plan, target.out
    with machine_errors(f"writing the documents of {out}"):
        documents = {"digests.bin": digest_file(plan, records), "config.json": output_config(source, plan)}
        documents |= _source_documents(source, records) | _indexes(plan)
        with Workers(AT_A_TIME) as workers:
            contents = workers.map(source.store.read, source.auxiliary)
            documents |= dict(zip(source.auxiliary, contents, strict=True))
        files = [ListedFile.of(path, data) for path, data in documents.items()]
        documents["README.md"] = model_card(target, checks, files)
        files.append(ListedFile.of("README.md", documents["README.md"]))
        manifest, of_ranks = with_rank_documents(build_manifest(target, records, files, checks))
        documents |= of_ranks | {PROVENANCE: provenance(target, stages)}
        outdated = _refuse_edited(out, documents)
        write_documents(out, documents, out / WORK / "documents")
        for path in outdated:
            (out / path).unlink(missing_ok=True)
        write_atomic(out / MANIFEST_NAME, sealed(manifest), out / WORK / MANIFEST_NAME)


def _refuse_edited(out: Path, documents: Mapping[str, bytes]) -> list[str]:
    """Raise UsageError where a document is there that neither is to be written nor was written before.
    Returns those that were written before and are not to be written any more: the source has lost them.
    """
    manifest = WorkFolder(out).before()
    before = {} if manifest is None else {file.path: file.digest for file in manifest.files}
    outdated = [path for path in before.keys() - documents.keys() if os.path.lexists(out / path)]
    theirs = []
    for path in (*documents, *outdated):
        if not may_be_theirs(out, path):
            continue
        if path == PROVENANCE:  # it has the time of its run
            known = is_written_provenance(out)
        else:
            ours = [digest(documents[path]).hex()] if path in documents else []
            ours += [before[path]] if path in before else []
            known = _digest_of(out / path) in ours
        if not known:
            theirs.append(path)
    if os.path.lexists(out / MANIFEST_NAME):  # that of before is set aside
        theirs.append(MANIFEST_NAME)
    if theirs:
        raise edited(out, theirs)
    return outdated


def _digest_of(path: Path) -> str | None:
    try:
        return file_digest(path, LISTED)[1]
    except OSError:
        return None  # a folder, a pipe or a link to nowhere


def output_config(source: Source, plan: OutputPlan) -> bytes:
    """The rewritten config.json."""
    scheme = plan.shape.scheme
    replacement = quantization_config(
        plan.layout.id,
        format_version(plan.topology),
        scheme.num_bits,
        scheme.group_size,
        scheme.symmetric,
    )
    return (
        json.dumps(
            rewritten(source.config, source.model.quantization, msgspec.to_builtins(replacement)),
            indent=2,
            ensure_ascii=False,
        ).encode()
        + b"\n"
    )


def _source_documents(source: Source, records: Mapping[str, FinishedUnit]) -> dict[str, bytes]:
    """source/: headers (deterministic gzip), index, config, README, digests."""
    documents = {
        f"source/headers/{header.file}.gz": gzip.compress(header.raw, 6, mtime=0) for header in source.headers
    }
    documents["source/config.json"] = source.config_bytes
    documents["source/digests.bin"] = source_digests(source, records)
    if source.index_bytes is not None:
        documents[f"source/{INDEX_NAME}"] = source.index_bytes
    if source.readme is not None:
        documents["source/README.md"] = source.readme
    return documents


def _indexes(plan: OutputPlan) -> dict[str, bytes]:
    """Of each folder with shards; ranks with the same units have the same one."""
    units: dict[str, list[OutputUnit]] = {}
    for unit in plan.units:
        for rank in unit.ranks:
            units.setdefault(plan.folder(unit, rank), []).append(unit)
    made: dict[str, bytes] = {}
    for here in units.values():
        if here[0].name not in made:
            made[here[0].name] = rank_index(here)
    return {f"{folder}/{INDEX_NAME}": made[here[0].name] for folder, here in units.items()}


def provenance(target: Target, stages: Stages) -> bytes:
    """Who, when, how fast: sealed, but never compared."""
    return sealed(
        Provenance(
            format=FORMAT,
            format_version=format_version(target.plan.topology),
            digest=NO_DIGEST,
            tool=f"marlin-convert {package_version('marlin-convert') or 'unknown'}",
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            host=platform.node(),
            machine=(
                f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()},"
                f" Python {platform.python_version()}"
            ),
            command=tuple(without_secrets(sys.argv)),
            source=target.source.store.where,
            stages=stages.times(digits=3),
        )
    )


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """A command line that may be published."""
    shown: list[str] = []
    for argument in arguments:
        if shown and shown[-1] == "--token":
            shown.append("...")
        else:
            shown.append("--token=..." if argument.startswith("--token=") else argument)
    return shown
