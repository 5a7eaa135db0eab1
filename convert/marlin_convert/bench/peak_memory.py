"""The memory that a process and its children use at most, while they run."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread


class PeakMemory:
    """Samples the anonymous memory of a process and all below it."""

    def __init__(self, pid: int) -> None:
        self._pid, self._peak, self._stop = pid, 0, Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self._peak = max(self._peak, sum(_anonymous(pid) for pid in _tree(self._pid)))

    def stop(self) -> int:
        """The peak in bytes."""
        self._stop.set()
        self._thread.join()
        return self._peak


def _tree(pid: int) -> list[int]:
    pids = [pid]
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                pids += _tree(int(child))
    except OSError:
        pass
    return pids


def _anonymous(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
