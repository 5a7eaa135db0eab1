"""The C++ programs that the tests build, and how they are run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: A sanitizer that finds something must not look like a refusal, which is exit code 1.
SANITIZER_EXIT = 99


@dataclass(frozen=True)
class Programs:
    """Folder of the built programs."""

    folder: Path

    def __call__(
        self, name: str, *arguments: object, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run one; a sanitizer's finding, a crash or a hang fails the test."""
        sanitizers = {
            "ASAN_OPTIONS": f"exitcode={SANITIZER_EXIT}",
            "UBSAN_OPTIONS": f"exitcode={SANITIZER_EXIT}",
        }
        result = subprocess.run(
            [str(self.folder / name), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, **sanitizers, **(env or {})},
        )
        assert result.returncode in (0, 1, 2), result.stderr
        return result


def lines(result: subprocess.CompletedProcess[str]) -> Sequence[str]:
    """Of stdout."""
    return result.stdout.splitlines()
