"""`verify --engine ray`: a task looks at the data of a unit; all else was looked at before, where the run was
begun.
"""

from __future__ import annotations

import pickle
import platform
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from marlin_convert.checkpoint.source import Source
from marlin_convert.checks.data import DataPass
from marlin_convert.checks.findings import Verification
from marlin_convert.checks.part import Part
from marlin_convert.checks.published import Published, open_same
from marlin_convert.checks.split import Split
from marlin_convert.checks.tasks import run_tasks
from marlin_convert.cluster import Need, Tasks, connected
from marlin_convert.documents.manifest import read_manifest
from marlin_convert.errors import ConvertError, MachineError
from marlin_convert.limits import MEMORY_PER_THREAD
from marlin_convert.progress import Progress, Tally
from marlin_convert.shards.kept_source import KeptSource, read_kept_source
from marlin_convert.spread import Spread


@dataclass(frozen=True)
class DataJob:
    """What all tasks have in common: the folder, the source where it is read, too; what is looked at, and of
    that the paths of shards that are `good`; whether the digests that OUT keeps are sound.
    """

    out: str
    source: str | None
    part: Part
    sound: bool
    good: frozenset[str]
    threads: int = 1


def check_on_ray(job: DataJob, spread: Spread, report: Verification, progress: Progress | None) -> None:
    """Look at the data of every unit, and add to `report` what is found. Raises UsageError and MachineError
    for a cluster on which that cannot be.
    """
    sizes = Counter[str]()
    for shard in job.part.shards:
        sizes[shard.unit] += shard.size
    tally, counted = Tally("verifying", sizes.total(), list(sizes), progress), Counter[str]()

    def told(unit: str, done: int) -> None:
        tally.count(unit, max(done - counted[unit], 0))
        counted[unit] = max(done, counted[unit])

    def took(unit: str, found: Verification) -> None:
        report.merge(found)
        told(unit, sizes[unit])

    with connected(spread.address) as cluster:
        threads = cluster.threads(spread.threads)
        common = pickle.dumps(replace(job, threads=threads))
        need = Need(threads, threads * MEMORY_PER_THREAD)
        cluster.run(Tasks(check_unit, common, list(sizes), need, took, told))
    order = [unit.name for unit in job.part.manifest.units]
    report.units = dict(sorted(report.units.items(), key=lambda item: order.index(item[0])))


def check_unit(pickled: bytes, name: str, progress: Progress) -> Verification:
    """Look at the data of the unit `name` of a pickled `DataJob`, on whatever machine. Raises what `verify`
    raises, and MachineError where the folder is not the one where the run was begun.
    """
    job: DataJob = pickle.loads(pickled)
    report = Verification(with_source=job.source is not None, of_all=False)
    part = replace(job.part, shards=tuple(shard for shard in job.part.shards if shard.unit == name))
    kept, split, opened = _ready(pickled)
    data = DataPass(Path(job.out), part, kept, split, Published(kept, opened, job.sound, report))
    run_tasks(list(data.tasks(set(job.good), report)), job.threads, progress)
    return report


@lru_cache(maxsize=1)
def _ready(pickled: bytes) -> tuple[KeptSource, Split, Source | None]:
    """A job on this machine: a process opens it once for all its units."""
    job: DataJob = pickle.loads(pickled)
    folder, manifest = Path(job.out), job.part.manifest
    try:
        same = read_manifest(folder) == manifest
    except ConvertError:
        same = False
    if not same:
        raise MachineError(
            f"{folder} is not on {platform.node()} what it is where the run was begun; OUT, and a folder as"
            " --source, must be folders that all machines have in common, under the same path"
        )
    kept = read_kept_source(folder, manifest)
    opened = None if job.source is None else open_same(job.source, manifest)
    return kept, Split.of(manifest.parallel, kept.model), opened
