"""`marlin-convert verify`."""

from __future__ import annotations

import click

from convert.cli import output
from convert.cli.options import gigabytes, json_option

#: findings printed in full; a broken folder can have a hundred thousand
SHOWN = 40


@click.command("verify")
@click.argument("out")
@click.argument("too_many", nargs=-1, metavar="")
@click.option("--source", help="The published checkpoint: compare with it, not only with the digests kept in OUT.")
@click.option("--threads", type=click.IntRange(1), help="Worker threads [default: cores].")
@json_option
@click.pass_context
def command(ctx: click.Context, out: str, too_many: tuple[str, ...], source: str | None, threads: int | None, as_json: bool) -> None:
    """Check a converted folder: structure, all digests, and that the inverse layout gives the source, every nibble and every scale.

    Exit code 1 where anything is wrong; each line names layer, expert, projection and rank as far as they apply.
    """
    if too_many:
        raise click.UsageError(f"verify takes one folder, the output; give the checkpoint as an option: verify {too_many[0]} --source {out}", ctx)
    from convert.checks.verify import verify

    with output.progress_bar("verifying", "step") as progress:
        report = verify(out, source, threads=threads, progress=progress)
    if as_json:
        output.document(report.as_json())
    else:
        for finding in sorted(report.findings, key=str)[:SHOWN]:
            output.result(f"WRONG {finding}")
        if len(report.findings) > SHOWN:
            output.result(f"... and {len(report.findings) - SHOWN} more; --json lists all")
        against = "the source itself" if source else "the source's digests"
        looked = f"{report.files} files, {gigabytes(report.bytes)} read, {report.proven:,} source tensors compared with {against}"
        if report.unproven:
            looked += f"; {report.unproven:,} could not be put together from what is in OUT" + ("" if source else " (give --source)")
        output.result(f"{'exact' if report.ok and not report.unproven else 'sound' if report.ok else 'NOT OK'}: {looked}")
    if not report.ok:
        ctx.exit(1)
