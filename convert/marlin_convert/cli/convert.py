"""`marlin-convert convert`."""

from __future__ import annotations

import time
from typing import Any

import click

from marlin_convert.cli import converted, display
from marlin_convert.cli.by_file import examples
from marlin_convert.cli.options import (
    hub_options,
    json_option,
    log_option,
    machine_options,
    parallel_options,
    staging_options,
)


@click.command(
    "convert",
    short_help="Convert a checkpoint; run again, it continues.",
    epilog=examples(
        "convert checkpoint out-tp8 --tp 8",
        "convert checkpoint out-tp8 --tp 8 --ep 8 --dry-run",
        "convert org/name out-tp8 --tp 8 --free-source --log-json",
        "convert checkpoint one-layer --tp 8 --layers 1 --ranks 0",
        "convert checkpoint out-tp8 --tp 8 --shard 0/4",
    ),
)
@click.argument("source")
@click.argument("out")
@parallel_options
@machine_options
@converted.run_options
@hub_options
@staging_options
@click.option("--max-workers", type=click.IntRange(1), help="Files fetched at a time [default: 2].")
@click.option("--dry-run", is_flag=True, help="Convert nothing: show what `plan` shows, with its exit code.")
@json_option
@log_option
def command(
    source: str,
    out: str,
    revision: str | None,
    token: str | None,
    cache_dir: str | None,
    local_dir: str | None,
    free_source: bool,
    max_workers: int | None,
    direct: bool,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    **what: Any,
) -> None:
    """Convert the checkpoint SOURCE, a folder, s3://bucket/prefix or a hub repository org/name, to shards for
    TP ranks in OUT.

    Run it again after any failure or interruption: it continues where it was. Files of a repository or an
    object store come while earlier ones are converted; those of a repository are compared with what the hub
    publishes.
    """
    from marlin_convert.checkpoint.hub_files import HubOptions
    from marlin_convert.pipeline.run import convert

    confirm = converted.confirm(what["overwrite"], yes)
    begin = time.monotonic()
    what["hub"] = HubOptions(revision, token, cache_dir, local_dir, free_source, max_workers)
    if dry_run:
        spread = [what.pop(name) for name in ("shard", "engine", "ray_address")]
        if spread != [None, "local", None]:
            raise click.UsageError("--dry-run shows the whole conversion: leave --shard and --engine away")
        from marlin_convert.cli.plan import show
        from marlin_convert.pipeline.preview import plan

        show(plan(source, out, **what), every=False, as_json=as_json)
        return
    with (
        display.progress(hub=True) as fetch_progress,
        display.progress("stopping: finishing what is being written") as progress,
    ):
        report = convert(
            source,
            out,
            **what,
            direct_io=direct,
            progress=progress,
            fetch_progress=fetch_progress,
            confirm=confirm,
        )
    converted.show(report, what, begin, as_json)
