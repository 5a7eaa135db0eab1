"""What lies in OUT: looked at, never changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from marlin_convert.checkpoint.source import Source
from marlin_convert.documents.manifest import Manifest, read_manifest
from marlin_convert.documents.records import JobRecord
from marlin_convert.errors import ConvertError, UsageError
from marlin_convert.pipeline.work_folder import REMOVING, WORK, WorkFolder, is_marked
from marlin_convert.shards.kept_source import recorded_digests, sound_bytes


@dataclass(frozen=True)
class OutState:
    """What lies in OUT. `damaged` is what reading the manifest or the job said, where there is one that
    cannot be read; `missing` are the files of a finished conversion that are gone or of another size.
    """

    out: Path
    manifest: Manifest | None = None
    job: JobRecord | None = None
    damaged: ConvertError | None = None
    missing: frozenset[str] = frozenset()
    any_record: bool = False
    keeps_digests: bool = False
    #: what is left of a conversion that was being removed, or that has lost its manifest
    remains: bool = False
    foreign: bool = False

    @property
    def fresh(self) -> bool:
        """Whether no conversion is there, begun, made, damaged or half removed."""
        return not (self.manifest or self.job or self.damaged or self.remains)


def observe(out: Path, source: Source | None, thorough: bool = False) -> OutState:
    """Look at OUT, where `source`, if it is known, is to be converted to; `thorough` compares the digests of
    all listed files but the shards. Raises UsageError where it is no folder.
    """
    if not out.exists():
        return OutState(out)
    if not out.is_dir():
        raise UsageError(f"{out} is not a folder")
    work = WorkFolder(out)
    removing = is_marked(work.folder / REMOVING)
    manifest = job = damaged = None
    begun = is_marked(work.folder / "job.json")
    ours = begun or is_marked(out / "manifest.json")
    try:
        if not removing and ours and (out / "manifest.json").exists():
            manifest = read_manifest(out)
        job = work.job() if begun and not removing else None
    except ConvertError as error:
        damaged = error
    remains = removing or (not ours and is_marked(out / "provenance.json"))
    lost = frozenset() if manifest is None else missing_files(out, manifest)
    if manifest is not None and thorough:
        lost |= {file.path for file in manifest.files if sound_bytes(out, manifest, file.path) is None}
    return OutState(
        out,
        manifest,
        job,
        damaged,
        missing=lost,
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
    return inside <= {WORK, f"{WORK}/units", f"{WORK}/job.json.partial", f"{WORK}/{REMOVING}.partial"}


def missing_files(out: Path, manifest: Manifest) -> frozenset[str]:
    """Files of a finished conversion that are gone or of another size. What is in the files is for `verify`
    to say.
    """
    sizes = {shard.path: shard.size for shard in manifest.shards}
    sizes |= {file.path: file.size for file in manifest.files}
    return frozenset(path for path, size in sizes.items() if not _is_there(out / path, size))


def _is_there(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size
