"""Command lines run in forks of one warmed process, and broken at a chosen call.

A fork has everything imported and compiled, so a run takes a fraction of a second, and a fault can be set
where it is wanted: a kill, a signal, an error of the system, at the n-th call of a function. Run as a script
it is the process that forks; `Forks` is the other end.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

_OF_OS = (
    "open",
    "fsync",
    "replace",
    "pwrite",
    "posix_fallocate",
    "posix_fadvise",
    "pread",
    "preadv",
    "mkdir",
    "unlink",
    "rmdir",
)
#: what can be broken, and in which module it is
OWNERS = dict.fromkeys(_OF_OS, os) | {"flock": fcntl}
CALLS = tuple(OWNERS)
#: those that change something, and `open`, which makes files
CHANGING = ("open", "fsync", "replace", "pwrite", "posix_fallocate", "mkdir", "unlink", "rmdir")
#: as the `number` of a fault: every call
EVERY = -1


@dataclass(frozen=True)
class Done:
    """How a run ended: `code` is the exit code, or minus the signal that killed it."""

    code: int
    stdout: str
    stderr: str
    counts: dict[str, int]


class Forks:
    """Runs command lines in forks."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        """Start the process; `checkpoint` is converted once to have everything compiled."""
        self._folder = folder
        arguments = [sys.executable, str(Path(__file__)), str(checkpoint), str(folder / "warm")]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, *arguments: object, fault: dict[str, Any] | None = None) -> Done:
        """Run a command line. `fault`: `call` (of CALLS), `number` (from 0, or EVERY) and `action`: a
        signal's name, an errno's name, "short" for a read that brings fewer bytes than asked for, or "run",
        for which `command` is run in the midst; its end is kept in the file `result`. EVERY call is broken by
        "short" only, otherwise it is the next one; `then` is another fault, from there on.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        files = {name: str(self._folder / name) for name in ("stdout", "stderr", "counts")}
        request = {"arguments": [str(argument) for argument in arguments], "fault": fault, **files}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        counts = Path(files["counts"])
        return Done(
            code,
            Path(files["stdout"]).read_text(),
            Path(files["stderr"]).read_text(),
            json.loads(counts.read_text()) if counts.exists() else {},
        )

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)


class _Faults:
    """Counts calls and breaks one."""

    def __init__(self, fault: dict[str, Any] | None) -> None:
        from marlin_convert.cli.interrupts import Interrupts

        self.fault = fault or {}
        self.counts = dict.fromkeys(CALLS, 0)
        self.lock = threading.Lock()
        self.seen = 0
        receive = Interrupts._receive

        def seen(interrupts: Interrupts, number: int, frame: FrameType | None) -> None:
            self.seen += 1
            receive(interrupts, number, frame)

        setattr(Interrupts, "_receive", seen)  # noqa: B010  # a method, which mypy lets nobody assign
        for name in CALLS:
            setattr(OWNERS[name], name, self._wrapped(name, getattr(OWNERS[name], name)))

    def _wrapped(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.lock:
                number = self.counts[name]
                self.counts[name] += 1
            if self.fault.get("call") == name and self.fault["number"] in (number, EVERY):
                fault = self.fault
                if fault["action"] == "short":
                    return function(*_fewer(name, *args), **kwargs)
                self.fault = {}
                try:
                    self._break(fault)
                finally:
                    self.fault = fault.get("then", {})
            return function(*args, **kwargs)

        return call

    def _break(self, fault: dict[str, Any]) -> None:
        action = fault["action"]
        if action == "run":
            done = subprocess.run(fault["command"], capture_output=True, text=True, check=False)
            pathlib.Path(fault["result"]).write_text(json.dumps([done.returncode, done.stdout, done.stderr]))
        elif action.startswith("SIG"):
            self._kill(getattr(signal, action))
        else:
            number = getattr(errno, action)
            raise OSError(number, os.strerror(number))

    def _kill(self, number: int) -> None:
        """Send this process a signal, and wait until it is seen: two of a kind that are pending are one."""
        before = self.seen
        os.kill(os.getpid(), number)
        for _ in range(200):  # ignored, it is never seen
            if self.seen > before:
                break
            time.sleep(0.01)


def _fewer(name: str, descriptor: int, wanted: Any, offset: int) -> tuple[Any, ...]:
    """The arguments of a read that brings a page, or half of what is no more than that."""
    if name == "pread":
        return descriptor, 4096 if wanted > 4096 else (wanted + 1) // 2, offset
    (buffer,) = wanted
    return descriptor, [buffer[: _fewer("pread", 0, len(buffer), 0)[1]]], offset


def _child(request: dict[str, Any]) -> None:
    from marlin_convert import cli

    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        opened = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, descriptor)
    # ignored where the tests themselves run in a shell's background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faults = _Faults(request["fault"])
    sys.argv = ["marlin-convert", *request["arguments"]]
    code = 70
    try:
        cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 71
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        pathlib.Path(request["counts"]).write_text(json.dumps(faults.counts))
        os._exit(code)


def _serve(checkpoint: str, warm: str) -> None:
    from marlin_convert.checks.verify import verify
    from marlin_convert.pipeline.restore import restore
    from marlin_convert.pipeline.run import convert

    convert(checkpoint, warm, tp=2, threads=1)
    verify(warm, threads=1)
    restore(warm, f"{warm}-back", threads=1)
    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        pathlib.Path(request["counts"]).unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            _child(request)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder's names are not for the command line
    _serve(*sys.argv[1:])
