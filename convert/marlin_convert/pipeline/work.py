"""What the jobs of an executor have in common: some files that are written together, by several jobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock


@dataclass(eq=False, kw_only=True)
class Work:
    """Files that come into being together, shared by the jobs that write to them; each writes to places of
    its own.
    """

    jobs_left: int = 0
    state: str = "new"
    lock: Lock = field(default_factory=Lock)

    def open(self) -> None:
        """Create the files, once, whichever job comes first. After a failure the other jobs get
        InterruptedError.
        """
        with self.lock:
            if self.state == "broken":
                raise InterruptedError
            if self.state == "open":
                return
            self.state = "broken"
            self.create()
            self.state = "open"

    def job_done(self) -> bool:
        """Count a job off; True for the last one."""
        with self.lock:
            self.jobs_left -= 1
            return self.jobs_left == 0

    def create(self) -> None:
        """Create the files, half-made as they are."""
        raise NotImplementedError

    def discard(self) -> None:
        """Remove what was written, where it cannot be finished."""
        raise NotImplementedError
