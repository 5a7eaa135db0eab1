"""What lies in OUT: looked at, never changed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from marlin_convert.checkpoint.source import Source
from marlin_convert.documents.manifest import Manifest, read_manifest
from marlin_convert.documents.provenance import NAME as PROVENANCE
from marlin_convert.documents.provenance import is_as_written
from marlin_convert.documents.records import LOCK, TURN, WORK, JobRecord
from marlin_convert.errors import ConvertError, UsageError
from marlin_convert.pipeline.ours import rank_manifests
from marlin_convert.pipeline.work_folder import REMOVING, WorkFolder, is_marked
from marlin_convert.shards.inspect import lost_shards
from marlin_convert.shards.kept_source import may_be_theirs, recorded_digests, sound_bytes
from marlin_convert.storage.files import machine_errors


@dataclass(frozen=True)
class OutState:
    """What lies in OUT. `damaged` is what reading the manifest or the job said, where there is one that
    cannot be read. Of a finished conversion, `missing` are the shards that are gone or of another size and
    the documents that are gone; `edited` are documents with other bytes than were written.
    """

    out: Path
    manifest: Manifest | None = None
    job: JobRecord | None = None
    damaged: ConvertError | None = None
    missing: frozenset[str] = frozenset()
    edited: tuple[str, ...] = ()
    #: the same of one that has no manifest, or a damaged one
    edited_since: tuple[str, ...] = ()
    any_record: bool = False
    keeps_digests: bool = False
    #: what is left of a conversion that was being removed, or that has lost its manifest
    remains: bool = False
    foreign: bool = False

    @property
    def fresh(self) -> bool:
        """Whether no conversion is there, begun, made, damaged or half removed."""
        return not (self.manifest or self.job or self.damaged or self.remains)


def observe(out: Path, source: Source | None) -> OutState:
    """Look at OUT, where `source`, if it is known, is to be converted to. Raises UsageError where it is no
    folder, MachineError where a document cannot be read.
    """
    if not out.exists():
        return OutState(out)
    if not out.is_dir():
        raise UsageError(f"{out} is not a folder")
    work = WorkFolder(out)
    removing = is_marked(work.folder / REMOVING)
    manifest = job = damaged = before = None
    begun = is_marked(work.folder / "job.json")
    whole = is_marked(out / "manifest.json")
    ours = begun or whole
    try:
        if not removing and whole:
            manifest = read_manifest(out)
        job = work.job() if begun and not removing else None
        before = work.before() if begun else None
    except ConvertError as error:
        damaged = error
    remains = removing or (not ours and is_marked(out / PROVENANCE))
    lost = frozenset() if manifest is None else lost_shards(out, manifest)
    gone, edited = ([], []) if manifest is None else _documents(out, manifest)
    if begun and not whole and os.path.lexists(out / "manifest.json"):
        edited.append("manifest.json")  # somebody's: that of what is being made has yet to be written
    since = [] if manifest is not None else _edited_since(out, before)
    return OutState(
        out,
        manifest,
        job,
        damaged,
        missing=lost | frozenset(gone),
        edited=tuple(edited),
        edited_since=tuple(since),
        any_record=work.any_finished(),
        keeps_digests=source is not None and bool(recorded_digests(out, source)),
        remains=remains,
        foreign=not ours and not remains and not _is_empty(out),
    )


def _is_empty(out: Path) -> bool:
    """Whether nothing is in a folder, or nothing but what beginning and removing a conversion leaves when
    they break off: a work folder with no whole file in it.
    """
    inside = {path.relative_to(out).as_posix() for path in out.rglob("*")}
    beginning = ("units", LOCK, TURN, "job.json.partial", f"{REMOVING}.partial")
    return inside <= {WORK, *(f"{WORK}/{name}" for name in beginning)}


def _documents(out: Path, manifest: Manifest) -> tuple[list[str], list[str]]:
    """The listed files that are gone, and those with other bytes than were written. What nobody writes in is
    gone where it is damaged.
    """
    gone: list[str] = []
    edited: list[str] = []
    for file in manifest.files:
        with machine_errors(f"reading {out / file.path}"):
            if sound_bytes(out, manifest, file.path) is None:
                (edited if may_be_theirs(out, file.path) else gone).append(file.path)
    if not is_written_provenance(out):
        edited.append(PROVENANCE)
    return gone, edited


def _edited_since(out: Path, before: Manifest | None) -> list[str]:
    """Documents of a conversion without a manifest that have other bytes than were written: as the manifest
    that is set aside while it is being mended has them, else the manifests of ranks.
    """
    known, edited = [] if before is None else [before], list[str]()
    if before is None:
        for path, of_rank in rank_manifests(out).items():
            if of_rank is None:
                edited.append(path)
            else:
                known.append(of_rank)
    for manifest in known:
        edited += _documents(out, manifest)[1]
    return list(dict.fromkeys(edited))


def is_written_provenance(out: Path) -> bool:
    """Whether provenance.json, where it is there, is as it was written."""
    try:
        return not os.path.lexists(out / PROVENANCE) or is_as_written(out)
    except OSError:
        return False  # a folder, a pipe or a link to nowhere


def edited(out: Path, paths: Sequence[str]) -> UsageError:
    """The refusal to write over documents that hold something else than was, or would be, written."""
    more = f" and {', '.join(paths[1:])}" if paths[1:] else ""
    return UsageError(
        f"{out / paths[0]}{more} {'were' if more else 'was'} edited or damaged and would be replaced;"
        f" move {'them' if more else 'it'} away, then run the same command again"
    )
