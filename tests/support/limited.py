"""Command lines in a process of their own that may take so much processor time and memory, and no more."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

SECONDS = 60
BYTES = 4 << 30


def limited(*arguments: object, folder: Path | None = None) -> tuple[int, str]:
    """Run a command line under limits; returns exit code and all that was printed."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))

    done = subprocess.run(
        [sys.executable, "-m", "marlin_convert", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,  # a pipe that is waited for takes no processor time
        preexec_fn=limit,
        cwd=folder,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
