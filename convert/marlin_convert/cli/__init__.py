"""The command line: one verb a file, loaded when it is used."""

from __future__ import annotations

import gc
import io
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress

import click

from marlin_convert.cli import options, streams
from marlin_convert.cli.by_file import CommandsByFile
from marlin_convert.cli.interrupts import Interrupts, Terminated, interrupt_behind
from marlin_convert.errors import ConvertError, MachineWarning, SourceWarning
from marlin_convert.extras import EXTRAS, missing

#: in the order of a job
VERBS = ("plan", "download", "convert", "verify", "inspect", "diff", "restore", "reshard", "bench", "doctor")


#: verbs that go on where they were when they are run again
CONTINUED = ("download", "convert", "restore", "reshard")


class Verbs(CommandsByFile):
    """The verbs, which an interrupt leaves as an error that has it as its cause."""

    def invoke(self, ctx: click.Context) -> object:
        """Run a verb. Of an interrupt click would print an empty line, in a log of JSON too: it gets an
        error, of which `_call` makes the interrupt again.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise RuntimeError("interrupted") from interrupt


@click.group(
    cls=Verbs,
    names=VERBS,
    place="marlin_convert.cli.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="marlin-convert")
def cli() -> None:
    """Kimi-K2 INT4 checkpoints to per-GPU shards in the Marlin MoE layout, proven bit for bit.

    Exit codes: 0 done; 1 something in OUT is wrong; 2 usage or conflicting options; 3 the source is not what
    it should be; 4 disk, network or machine failed (mend that, run it again); 130 and 143 interrupted.
    """


def main() -> None:
    """Run the command line and exit."""
    streams.occupy()
    # numpy would start a thread for each core, for products that are not used here; where a limit of
    # processes forbids that, its OpenBLAS interrupts the process
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # headers and manifests are hundreds of thousands of small objects that stay: looking through all of them
    # again and again for cycles took a quarter of `plan`
    gc.set_threshold(50_000)
    interrupts = Interrupts()
    interrupts.install()
    try:
        code = streams.close(run(sys.argv[1:]))
        interrupts.ignore()
    except KeyboardInterrupt as interrupt:  # while it was said how the run ended
        code = streams.close(_interrupted(interrupt, sys.argv[1:]))
        interrupts.ignore()
    interrupts.end(code)


def run(arguments: list[str]) -> int:
    """Run a command line; returns the exit code. Errors go to stderr, one line each; MARLIN_CONVERT_DEBUG=1
    adds the traceback.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("once", MachineWarning)
        warnings.showwarning = _note(warnings.showwarning)
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    streams.log_as_json(options.LOG_JSON in arguments)  # before they are read: errors of usage are JSON too
    try:
        code = _call(arguments)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        streams.fail(shown.getvalue().rstrip("\n"), begin="")
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as interrupt:
        return _interrupted(interrupt, arguments)
    except SystemExit:  # click's answer where nobody reads the output any more; verbs end with ctx.exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except ConvertError as error:
        _show(error)
        streams.fail(streams.error_line(error))
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name in EXTRAS:
            streams.fail(missing(error.name))
            return 2
        return _internal(error)
    except OSError as error:
        _show(error)
        streams.fail(f"{streams.error_line(error)}; mend that, then run the same command again")
        return 4
    except MemoryError as error:
        _show(error)
        streams.fail("out of memory; give it more, then run the same command again")
        return 4
    except Exception as error:
        return _internal(error)


def _call(arguments: list[str]) -> object:
    """Run the verb. What fails in the midst of an interrupt is the interrupt."""
    try:
        return cli.main(arguments, prog_name="marlin-convert", standalone_mode=False, obj=tuple(arguments))
    except Exception as error:
        if (interrupt := interrupt_behind(error)) is not None:
            _show(error)
            raise interrupt from None
        raise


def _interrupted(interrupt: BaseException, arguments: list[str]) -> int:
    goes_on = bool(arguments) and arguments[0] in CONTINUED and "--dry-run" not in arguments
    streams.say("interrupted" + ("; run the same command again to continue" if goes_on else ""))
    return 143 if isinstance(interrupt, Terminated) else 130


def _internal(error: Exception) -> int:
    _show(error)
    streams.fail(
        f"{type(error).__name__}: {streams.error_line(error)}; set MARLIN_CONVERT_DEBUG=1 and report what it"
        " prints",
        begin="internal error: ",
    )
    return 4


def _show(error: BaseException) -> None:
    if os.environ.get("MARLIN_CONVERT_DEBUG"):
        import traceback

        streams.say("".join(traceback.format_exception(error)).rstrip("\n"))


def _note(show: Callable[..., None]) -> Callable[..., None]:
    """Shows what a machine lacks or is to know of a source as one line, and other warnings as `show` does."""

    def note(message: Warning | str, category: type[Warning], *where: object) -> None:
        if issubclass(category, (MachineWarning, SourceWarning)):
            streams.say(f"note: {message}")
        else:
            with suppress(OSError):
                show(message, category, *where)

    return note
