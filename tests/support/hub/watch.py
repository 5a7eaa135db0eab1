"""How much disk a running conversion takes, looked at many times a second."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Watch:
    """The most that was seen: bytes and number of staged files (whole or under way), and bytes of all of
    OUT.
    """

    out: Path
    staged: int = 0
    files: int = 0
    all: int = 0
    looks: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        staging = self.out / ".work" / "staging"
        while not self._over.wait(0.005):
            # top down: a file that is moved out of a deeper folder meanwhile is missed once, never counted
            # twice
            sizes = {
                path: allocated(path)
                for folder, _, names in os.walk(self.out)
                for path in (Path(folder) / name for name in names)
            }
            staged = {path: size for path, size in sizes.items() if path.is_relative_to(staging) and size}
            self.staged = max(self.staged, sum(staged.values()))
            self.files = max(
                self.files, sum(path.suffix in (".safetensors", ".incomplete") for path in staged)
            )
            self.all = max(self.all, sum(sizes.values()))
            self.looks += 1


def allocated(path: Path) -> int:
    """Bytes a file takes on the disk."""
    try:
        return path.stat().st_blocks * 512 if path.is_file() else 0
    except OSError:
        return 0
