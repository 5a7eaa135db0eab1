"""`convert`: a checkpoint as published to a folder for engines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from marlin_convert.checkpoint.hub_files import HubOptions
from marlin_convert.checkpoint.identify import identify, stamps
from marlin_convert.checkpoint.source import Source
from marlin_convert.errors import UsageError
from marlin_convert.pipeline.conversion import Confirm, Conversion, Converted
from marlin_convert.pipeline.opening import open_and_plan
from marlin_convert.pipeline.remote import Origin
from marlin_convert.pipeline.resume import CHECKS, Request
from marlin_convert.pipeline.target import Target
from marlin_convert.planning.output_plan import Options, OutputPlan
from marlin_convert.progress import Progress
from marlin_convert.spread import Spread


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tp: int,
    ep: int = 1,
    attn_tp: int | None = None,
    pp: int = 1,
    expert_map: str | os.PathLike[str] | None = None,
    layers: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    layout: str | None = None,
    threads: int | None = None,
    memory: int | None = None,
    verify: str = "exact",
    overwrite: bool = False,
    direct_io: bool = True,
    progress: Progress | None = None,
    hub: HubOptions | None = None,
    fetch_progress: Progress | None = None,
    confirm: Confirm | None = None,
    shard: str | None = None,
    engine: str | None = None,
    ray_address: str | None = None,
) -> Converted:
    """Convert a checkpoint: a folder, `s3://bucket/prefix` or a repository `org/name`; again, it continues.

    `attn_tp` cuts attention and dense layers into so many slices, each on tp / attn_tp ranks (None: into tp);
    `pp` spreads the layers over so many pipeline stages of tp ranks each. `expert_map` is a file that says
    which routed expert is in which slot of each layer (None: each in the slot of its number).
    `layers` and `ranks` limit what is made (None: all); `layout` is the id of one of the registered layouts
    (None: that of the Marlin MoE kernel). `memory` is the budget for buffers in bytes. `verify` is "exact"
    (each buffer is inverted and compared with the source before it is written), "kernel" (and each written
    layer goes through the kernel on a GPU) or "none". `progress(point)` gets a
    `progress.Point` of source bytes and may be called from any thread; `fetch_progress` the same for what
    comes from the hub or an object store. `hub` says how a repository
    is read and kept. `overwrite` keeps what the same conversion has made and removes any other one, where
    `confirm(files)` agrees or is not given: then nobody is asked. `shard` "I/N" makes the Ith share, from 0,
    of N, which may run at the same time on machines that have SOURCE and OUT in common; who ends last
    finishes OUT. `engine` "ray" has a task of a Ray cluster make each unit, with `threads` and `memory` of
    its own; `ray_address` as Ray takes it (None: what RAY_ADDRESS names, else a cluster of this machine).

    Raises UsageError for options that conflict with each other or with what OUT holds; SourceError for a
    source that is not what it should be; MachineError where disk or machine failed.
    """
    spread = Spread.of((shard, engine, ray_address), threads, memory, overwrite)
    options = Options.of((tp, ep, attn_tp, pp), layers, ranks, layout, expert_map)
    opened, plan = open_and_plan(source, out, options, hub, overwrite)
    request = request_of(opened, plan, Path(out), verify, overwrite)
    conversion = Conversion.of(request, threads, memory, direct_io, progress)
    origin = Origin.of(source, opened, options, hub)
    return conversion.over(spread, origin).run(fetch_progress, confirm)


def request_of(
    source: Source, plan: OutputPlan, out: Path, verify: str, overwrite: bool, sampled: bool = True
) -> Request:
    """What is asked for, with what tells the source from another one; without samples of its files where it
    is not `sampled`. Raises UsageError, SourceError.
    """
    if verify not in CHECKS:
        raise UsageError(f"--verify {verify}: choose one of {', '.join(CHECKS)}")
    # before anything more is read: what is put in a file's place later is seen
    files = () if source.folder is None else [header.file for header in source.headers]
    before = stamps(source, files)
    return Request(Target(source, identify(source, sampled), plan, out), before, verify, overwrite)
