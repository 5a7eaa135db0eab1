"""`verify`: is this output whole, and is it exactly the source? Everything is read from disk again."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from marlin_convert.arguments import refuse_odd
from marlin_convert.checkpoint.source import Source
from marlin_convert.checks.data import DataPass
from marlin_convert.checks.derived import check_manifest
from marlin_convert.checks.findings import Verification
from marlin_convert.checks.on_ray import DataJob, check_on_ray
from marlin_convert.checks.part import Part
from marlin_convert.checks.published import Published, open_same
from marlin_convert.checks.rank_documents import check_rank_documents
from marlin_convert.checks.shard_files import check_shard
from marlin_convert.checks.split import Split
from marlin_convert.checks.structural import (
    check_coverage,
    check_documents,
    check_listed_files,
    check_small_files,
)
from marlin_convert.checks.tasks import run_tasks
from marlin_convert.documents.manifest import read_manifest
from marlin_convert.errors import OutputError, UsageError
from marlin_convert.layout import load_inverse
from marlin_convert.progress import Progress
from marlin_convert.shards.kept_source import DIGESTS, read_kept_source
from marlin_convert.spread import Spread
from marlin_convert.storage.files import machine_errors
from marlin_convert.threads import start

REMAKE = "to mend it make it again: convert with --overwrite"


def verify(
    out: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    *,
    layers: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    stages: Sequence[int] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    shard: str | None = None,
    engine: str | None = None,
    ray_address: str | None = None,
) -> Verification:
    """Check a converted folder: structure, every digest, and that the inverse layout gives the source, every
    nibble and every scale.

    Without `source` the digests kept in OUT stand for it; with it, the published files are read as well. Of
    `layers`, `ranks` and pipeline `stages` (None: all) alone the files are looked at, so the others need not
    be there; what of a tensor is on other ranks then comes from `source`, or counts as not proven.
    `shard` "I/N" looks at the Ith share, from 0, of N of the units; `engine` "ray" has tasks of a Ray
    cluster, of `threads` each, look at the data of a unit each; `ray_address` as in `convert`.
    `progress(point)` gets a `progress.Point` of stored bytes and may be called from any thread.

    Raises OutputError where OUT cannot be checked at all, SourceError where `source` is not the one OUT was
    made from, UsageError for a rank, layer or stage that is not there.
    """
    lists = {"layers": layers, "ranks": ranks, "stages": stages}
    refuse_odd(lists=lists, places={"out": out, "source": source})
    spread = Spread.of((shard, engine, ray_address), threads, None, False)
    folder = Path(out)
    if not os.path.isdir(folder):  # which takes any name, one that no file system would, too
        raise UsageError(f"{out} is not a folder")
    manifest = read_manifest(folder)
    part = Part.of(manifest, layers, ranks, stages, spread.share)
    report = Verification(with_source=source is not None, of_all=part.whole)
    begin = time.perf_counter()
    start(load_inverse, "load")
    with machine_errors(f"checking {out}"):
        kept = read_kept_source(folder, manifest)
        split = Split.of(manifest.parallel, kept.model)
        check_listed_files(folder, part, kept, report)
        check_documents(part, kept, split, folder, report)
        right = check_manifest(manifest, kept, split, report)
        check_rank_documents(folder, part, split, report)
        check_coverage(manifest, kept, split, report)
        opened = None if source is None else open_same(os.fspath(source), manifest)
        if opened is not None:
            check_small_files(folder, opened, report)
        good = {shard.path for shard in part.shards if check_shard(folder, manifest, shard, split, report)}
        listed = ((file.size, file.digest) for file in manifest.files if file.path == DIGESTS)
        sound = next(listed, None) == kept.digests_file
        if opened is None and not sound:
            raise OutputError(
                f"{out}/source/digests.bin is damaged, so nothing can be proven from {out} alone: give"
                f" --source; {REMAKE}"
            )
        read = time.perf_counter()
        if spread.engine == "ray":
            readable, place = frozenset(good & right), str(folder.absolute())
            job = DataJob(place, _origin(source, opened), part, sound, readable)
            check_on_ray(job, spread, report, progress)
        else:
            published = Published(kept, opened, sound, report)
            data = DataPass(folder, part, kept, split, published)
            run_tasks(list(data.tasks(good & right, report)), threads, progress)
    end = time.perf_counter()
    report.seconds = {"documents and headers": read - begin, "tensors": end - read, "total": end - begin}
    return report


def _origin(source: str | os.PathLike[str] | None, opened: Source | None) -> str | None:
    """How another machine opens the source: a folder by its full path."""
    if source is None or opened is None or opened.folder is None:
        return None if source is None else os.fspath(source)
    return str(opened.folder.absolute())
