"""`--engine ray` of a conversion: a task for each unit."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from marlin_convert.cluster import Need, Tasks, connected
from marlin_convert.documents.records import FinishedUnit
from marlin_convert.extras import package_version
from marlin_convert.pipeline.budget import choose_budget
from marlin_convert.pipeline.making import Maker, source_bytes
from marlin_convert.pipeline.remote import Job, Made, Origin, make_unit
from marlin_convert.planning.output_plan import OutputUnit
from marlin_convert.progress import Progress, Tally


@dataclass(frozen=True)
class RayEngine:
    """Makes units on the cluster at `address`; `threads` and `memory` of a task, None for what is best."""

    origin: Origin
    address: str | None
    threads: int | None
    memory: int | None

    def make(
        self,
        maker: Maker,
        left: Sequence[OutputUnit],
        made: Callable[[FinishedUnit], None],
        progress: Progress | None,
    ) -> None:
        """Make these units as `maker` would. Raises what that raises, UsageError and MachineError for a
        cluster on which that cannot be.
        """
        target = maker.target
        sizes = {unit.name: source_bytes(target, unit) for unit in left}
        names = [unit.name for unit in target.plan.units]
        tally = Tally("converting", sum(sizes.values()), names, progress)
        counted = dict.fromkeys(sizes, 0)

        def told(unit: str, done: int) -> None:
            """A task that was begun anew counts from there on once it is further than before."""
            tally.count(unit, max(done - counted[unit], 0))
            counted[unit] = max(done, counted[unit])

        def took(unit: str, result: Made) -> None:
            maker.stages.add(result.stages)
            made(result.record)
            told(unit, sizes[unit])

        with connected(self.address) as cluster:
            budget = choose_budget(target, cluster.threads(self.threads), self.memory)
            job = Job(
                self.origin,
                str(target.out.absolute()),
                target.identity,
                maker.stamps,
                maker.checks,
                budget,
                target.direct_io,
                package_version("marlin-convert"),
            )
            need = Need(budget.threads, budget.memory, maker.checks == "kernel")
            cluster.run(Tasks(make_unit, pickle.dumps(job), list(sizes), need, took, told))
        tally.then("writing manifest and documents")
