"""Over which processes a run is spread: this one, shares that somebody starts, or the tasks of a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from marlin_convert.arguments import refuse_odd
from marlin_convert.errors import UsageError
from marlin_convert.extras import require
from marlin_convert.shares import Share

ENGINES = ("local", "ray")


@dataclass(frozen=True)
class Spread:
    """A share of the work, or an engine that does all of it; `threads` and `memory` as they were asked for,
    of a task where there is an engine.
    """

    share: Share | None
    engine: str
    address: str | None
    threads: int | None
    memory: int | None

    @staticmethod
    def of(
        where: tuple[str | None, str | None, str | None],
        threads: int | None,
        memory: int | None,
        overwrite: bool,
    ) -> Spread:
        """What `where` says: `shard`, `engine`, `ray_address` as the verbs take them. Raises UsageError."""
        shard, engine, address = where
        refuse_odd(threads=threads, memory=memory)
        if engine not in (None, *ENGINES):
            raise UsageError(f"--engine {engine}: choose one of {', '.join(ENGINES)}")
        if address is not None and engine != "ray":
            raise UsageError("--ray-address goes with --engine ray")
        if engine == "ray":
            require("ray")
        if shard is None:
            return Spread(None, engine or "local", address, threads, memory)
        if engine == "ray":
            raise UsageError("--shard does not go with --engine ray, which shares the work out by itself")
        if overwrite:
            raise UsageError(
                "--overwrite does not go with --shard: it would remove what the other shares make; remove the"
                " old conversion first"
            )
        return Spread(Share.of(shard), "local", None, threads, memory)
