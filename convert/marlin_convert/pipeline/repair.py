"""Reuse what is whole of a finished conversion that has lost files."""

from __future__ import annotations

from pathlib import Path

from marlin_convert.checkpoint.source import Source
from marlin_convert.documents.manifest import Manifest, Shard, Unit, read_manifest
from marlin_convert.documents.records import ExpertDigests, FinishedFile, FinishedUnit, JobRecord
from marlin_convert.errors import OutputError
from marlin_convert.pipeline.ours import refuse_no_shard
from marlin_convert.pipeline.target import Target
from marlin_convert.pipeline.work_folder import WorkFolder
from marlin_convert.shards.inspect import lost_shards
from marlin_convert.shards.kept_source import DIGESTS, ZEROS, digests_by_tensor, sound_bytes


def reopen(target: Target, work: WorkFolder, job: JobRecord | None) -> None:
    """Turn a finished OUT that has lost files into one that is being made: the job unless it is there
    already, records for its units, and the manifest set aside.

    A unit that has lost a file gets none, and is made anew. Raises OutputError where what is kept of the
    source is gone or damaged too; see `what_is_kept`.
    """
    out, plan = target.out, target.plan
    manifest = read_manifest(out)
    kept, blob = what_is_kept(out, manifest, target.source)
    for path in lost_shards(out, manifest):
        refuse_no_shard(out / path)
    if job is not None:
        work.begin(job)
    planned = {unit.name for unit in plan.units}
    lost = lost_units(out, manifest)
    for unit in manifest.units:
        if unit.name in planned - lost:
            work.record(
                _record(
                    unit,
                    [shard for shard in manifest.shards if shard.unit == unit.name],
                    kept,
                    blob,
                    plan.experts,
                )
            )
    work.set_aside()


def what_is_kept(out: Path, manifest: Manifest, source: Source) -> tuple[dict[str, bytes], bytes]:
    """The digests of the source's tensors that OUT keeps, and digests.bin. Raises OutputError where they are
    gone or damaged.
    """
    blob, kept = (sound_bytes(out, manifest, name) for name in ("digests.bin", DIGESTS))
    if blob is None or kept is None:
        name = "digests.bin" if blob is None else DIGESTS
        raise OutputError(
            f"{out}/{name} is damaged or missing, so what is left cannot be reused; start again with"
            " --overwrite"
        )
    return digests_by_tensor(source.headers, kept), blob


def lost_units(out: Path, manifest: Manifest) -> set[str]:
    """Units of which a file is gone or of another size."""
    missing = lost_shards(out, manifest)
    return {shard.unit for shard in manifest.shards if shard.path in missing}


def _record(
    unit: Unit, shards: list[Shard], digests: dict[str, bytes], blob: bytes, experts: int
) -> FinishedUnit:
    files = tuple(
        FinishedFile(shard.rank, shard.size, shard.header, {t.name: t.digest for t in shard.tensors})
        for shard in shards
    )
    stacked = tuple(
        ExpertDigests(shard.rank, tensor.name, blob[tensor.experts : tensor.experts + 16 * tensor.shape[0]])
        for shard in shards
        for tensor in shard.tensors
        if tensor.experts is not None
    )
    patterns = [source for origin in unit.tensors for source in origin.sources] + list(unit.checked)
    names = [
        pattern.replace("{expert}", str(e))
        for pattern in patterns
        for e in (range(experts) if "{expert}" in pattern else (0,))
    ]
    return FinishedUnit(
        unit.name,
        files,
        stacked,
        {name: digests[name].hex() for name in names if digests.get(name, ZEROS) != ZEROS},
    )
