"""`marlin-convert reshard`."""

from __future__ import annotations

import time
from typing import Any

import click

from marlin_convert.cli import converted, display
from marlin_convert.cli.by_file import examples
from marlin_convert.cli.options import json_option, log_option, machine_options, parallel_options


@click.command(
    "reshard",
    short_help="Cut a converted folder in another way, without its source.",
    epilog=examples(
        "reshard k26-tp8 k26-tp16 --tp 16 --ep 8",
        "reshard k26-tp8 k26-dp --tp 8 --ep 8 --attn-tp 1",
        "reshard k26-tp8 one-layer --tp 4 --layers 1 --json",
    ),
)
@click.argument("out")
@click.argument("new")
@parallel_options
@machine_options
@converted.run_options
@json_option
@log_option
def command(out: str, new: str, direct: bool, yes: bool, as_json: bool, **what: Any) -> None:
    """Make of the converted folder OUT the folder NEW, cut in another way, as `convert` would make it of the
    checkpoint: the same bytes, but for provenance.json.

    The checkpoint is not needed. Each of its tensors is put together out of OUT and compared with the digest
    that OUT keeps of it before any file gets its name. Run it again after any failure: it continues.
    """
    from marlin_convert.pipeline.reshard import reshard

    confirm = converted.confirm(what["overwrite"], yes)
    begin = time.monotonic()
    with display.progress("stopping: finishing what is being written") as progress:
        report = reshard(out, new, **what, direct_io=direct, progress=progress, confirm=confirm)
    converted.show(report, what, begin, as_json)
