"""`marlin-convert download`."""

from __future__ import annotations

import click

from marlin_convert.cli import display, output
from marlin_convert.cli.by_file import examples
from marlin_convert.cli.options import hub_options, json_option, log_option
from marlin_convert.words import count, gigabytes


@click.command(
    "download",
    short_help="Fetch a repository and compare each file.",
    epilog=examples(
        "download org/name checkpoint",
        "download org/name --include config.json --revision main",
    ),
)
@click.argument("repo")
@click.argument("folder", required=False, metavar="[DIR]")
@hub_options
@click.option("--include", multiple=True, help="Only files that match this pattern; may be given again.")
@click.option("--exclude", multiple=True, help="Not the files that match this pattern; may be given again.")
@click.option("--local-dir", help="The same as DIR.")
@click.option("--max-workers", type=click.IntRange(1), help="Files at a time [default: 8].")
@json_option
@log_option
@click.pass_context
def command(
    ctx: click.Context,
    repo: str,
    folder: str | None,
    revision: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    token: str | None,
    cache_dir: str | None,
    local_dir: str | None,
    max_workers: int | None,
    as_json: bool,
) -> None:
    """Fetch what a conversion needs of REPO, a hub repository org/name, into DIR or the hub cache.

    Size and digest of every file are compared with what the hub publishes; files that are there already are
    compared, too. Run it again after any failure: it continues. The commit that the revision stood for is
    printed; give it as --revision to get the same again.
    """
    if folder and local_dir and folder != local_dir:
        raise click.UsageError(f"two folders were given, {folder} and {local_dir}; give one", ctx)
    from marlin_convert.checkpoint.download import download
    from marlin_convert.checkpoint.hub_files import HubOptions

    options = HubOptions(revision, token, cache_dir, max_workers=max_workers)
    with display.progress(hub=True) as progress:
        done = download(
            repo,
            folder or local_dir,
            hub=options,
            include=include,
            exclude=exclude,
            progress=progress,
        )
    if as_json:
        output.document(done.document())
        return
    size = sum(done.files.values())
    output.result(
        f"{done.folder}: {count(len(done.files), 'file')} of {repo} at commit {done.commit},"
        f" {gigabytes(size)}, each as the hub publishes it"
    )
    output.result(f"next:  marlin-convert convert {done.folder} OUT --tp 8")
