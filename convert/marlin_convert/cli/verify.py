"""`marlin-convert verify`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from marlin_convert.checks.outcome import error_text, of_kernel, of_verification
from marlin_convert.cli import display, output
from marlin_convert.cli.by_file import examples
from marlin_convert.cli.options import json_option, kernel_options, log_option, numbers, spread_options
from marlin_convert.cli.report import Reporter, report_option, reporter

if TYPE_CHECKING:
    from marlin_convert.checks.outcome import Outcome
    from marlin_convert.documents.checks import KernelCheck, ReportedFinding

#: findings printed in full; a broken folder can have a hundred thousand
SHOWN = 40


@click.command(
    "verify",
    short_help="Prove a converted folder, from the disk.",
    epilog=examples(
        "verify out-tp8",
        "verify out-tp8 --source checkpoint --report report",
        "verify out-tp8 --ranks 3 --layers 1-4",
        "verify out-tp8 --kernel --layers 1 --sample 8",
    ),
)
@click.argument("out")
@click.argument("too_many", nargs=-1, metavar="")
@click.option(
    "--source", help="The published checkpoint: compare with it, not only with what OUT keeps of it."
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="Worker threads [default: four more than cores, fewer where memory is short].",
)
@click.option(
    "--kernel",
    is_flag=True,
    help="Run the Marlin MoE kernel on the shards instead; needs torch, and a GPU unless --device cpu.",
)
@click.option("--layers", type=numbers, help="Only these layers; the files of others need not be there.")
@click.option("--ranks", type=numbers, help="Only these ranks; the files of others need not be there.")
@click.option(
    "--stages", type=numbers, help="Only these pipeline stages; the files of others need not be there."
)
@spread_options
@click.option("--experts", type=numbers, help="With --kernel: only these experts.")
@click.option(
    "--sample", type=click.IntRange(1), help="With --kernel: only this many experts, spread evenly."
)
@kernel_options
@report_option
@json_option
@log_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    out: str,
    too_many: tuple[str, ...],
    source: str | None,
    threads: int | None,
    kernel: bool,
    layers: tuple[int, ...] | None,
    ranks: tuple[int, ...] | None,
    stages: tuple[int, ...] | None,
    shard: str | None,
    engine: str,
    ray_address: str | None,
    as_json: bool,
    report: Path | None,
    **scope: Any,
) -> None:
    """Check a converted folder: structure, all digests, and that the inverse layout gives the source, every
    nibble and every scale.

    On a machine that has some ranks or stages only, give --ranks or --stages: what of a tensor is on other
    ranks then comes from --source, or counts as not proven. With --kernel, run the real kernel on the shards
    against the dequantized originals: it reads back every weight; --tokens 0 leaves the fused MoE out. Exit
    code 1 where anything is wrong; each line names layer, expert, projection and rank as far as they apply.
    """
    if too_many:
        raise click.UsageError(
            f"verify takes one folder, the output; give the checkpoint as an option: verify {too_many[0]}"
            f" --source {out}",
            ctx,
        )
    given = [
        name for name in scope if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given and not kernel:
        raise click.UsageError(f"--{given[0]} goes with --kernel; without it everything is checked", ctx)
    if stages is not None and kernel:
        raise click.UsageError("--stages does not go with --kernel; give the --layers of the stage", ctx)
    spread = {"shard": shard, "engine": engine, "ray_address": ray_address}
    if kernel and tuple(spread.values()) != (None, "local", None):
        raise click.UsageError("--kernel runs on this machine alone: leave --shard and --engine away", ctx)
    written = reporter(report, "kernel-report" if kernel else "verify", out)
    part = {"layers": layers, "ranks": ranks}
    ok = (
        _kernel(out, source, as_json, written, part | scope)
        if kernel
        else _exact(out, source, as_json, written, part | spread | {"stages": stages, "threads": threads})
    )
    if not ok:
        ctx.exit(1)


def _exact(out: str, source: str | None, as_json: bool, report: Reporter, part: dict[str, Any]) -> bool:
    from marlin_convert.checks.verify import verify
    from marlin_convert.report.verify_page import verify_page

    with (
        report.working(),
        display.progress("stopping: finishing what is being read") as progress,
    ):
        found = verify(out, source, progress=progress, **part)
    found.environment = report.environment()
    document = found.document()
    try:
        report.finish(document, verify_page)
    finally:  # what took hours is said, even where the report cannot be written
        if as_json:
            output.document(document)
        else:
            _show(document.findings)
            _conclude(of_verification(document))
    return found.ok


def _kernel(out: str, source: str | None, as_json: bool, report: Reporter, scope: dict[str, Any]) -> bool:
    from marlin_convert.checks.kernel.verify_kernel import verify_kernel
    from marlin_convert.report.kernel_page import kernel_page

    scope["tokens"] = tuple(count for count in scope["tokens"] if count)
    with (
        report.working(),
        display.progress("stopping: finishing what the kernel runs") as progress,
    ):
        found = verify_kernel(out, source, progress=progress, **scope)
    found.environment |= report.environment()
    document = found.document()
    try:
        report.finish(document, kernel_page)
    finally:
        if as_json:
            output.document(found.document(every_expert=False))
        else:
            _show(document.findings)
            _show_kernel(document)
    return found.ok


def _show_kernel(found: KernelCheck) -> None:
    ran = found.environment
    output.result(f"provider {ran['provider']}, torch {ran['torch']}, {ran.get('gpu', 'no GPU')}")
    for verdict in found.fused:
        error = error_text(verdict.relative_error)
        output.result(f"layer {verdict.layer}, {verdict.tokens} tokens, all ranks: relative error {error}")
    for line in found.skipped[:SHOWN]:
        output.result(f"not run: {line}")
    if len(found.skipped) > SHOWN:
        output.result(f"... and {len(found.skipped) - SHOWN} more; --json lists all")
    _conclude(of_kernel(found))


def _conclude(outcome: Outcome) -> None:
    output.result(str(outcome))
    if outcome.mend:
        output.message(f"to mend it: {outcome.mend}")


def _show(findings: Sequence[ReportedFinding]) -> None:
    for finding in sorted(finding.message for finding in findings)[:SHOWN]:
        output.result(f"WRONG {finding}")
    if len(findings) > SHOWN:
        output.result(f"... and {len(findings) - SHOWN} more; --json lists all")
