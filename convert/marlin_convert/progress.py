"""How progress is told: `progress(done, total)`, both in the same unit; it may be called from any thread."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
