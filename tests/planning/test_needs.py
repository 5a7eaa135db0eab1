"""Which files a unit needs, and how many at once: from the plan alone, and the same as the jobs read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import Checkpoint, make_small
from marlin_convert.checkpoint.fetcher import fetch_order, most_at_once
from marlin_convert.checkpoint.identify import identify
from marlin_convert.checkpoint.source import open_source
from marlin_convert.pipeline.expert_job import expert_jobs
from marlin_convert.pipeline.target import Target
from marlin_convert.pipeline.tensor_job import tensor_jobs
from marlin_convert.pipeline.unit_work import UnitWork
from marlin_convert.planning.needs import needs, unit_files
from marlin_convert.planning.output_plan import Options, plan_output


@pytest.mark.parametrize(
    "options", [Options(2), Options(4, 2, ranks=(0, 1)), Options(4, 4, ranks=(3,)), Options(2, layers=(1,))]
)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_what_the_jobs_read(options: Options, split: bool, tmp_path: Path) -> None:
    made = make_small(
        tmp_path / "checkpoint", experts=4, moe_intermediate=256, vt_layers=1, split_layer=split
    )
    source = open_source(str(made.folder))
    plan = plan_output(source, options)
    target = Target(source, identify(source), plan, tmp_path)
    for unit in plan.units:
        work = UnitWork(target, unit)
        read = {file for job in expert_jobs(work, 2) for file in job.files}
        read |= {file for job in tensor_jobs(work) for file in job.files}
        assert set(unit_files(source, plan, unit)) == read


def test_ep_groups_take_turns(tmp_path: Path) -> None:
    """Threads that work at one time write to different ranks' files."""
    source = open_source(str(make_small(tmp_path / "checkpoint", experts=8, vt_layers=1).folder))
    target = Target(source, identify(source), plan_output(source, Options(2, 2)), tmp_path)
    (unit, *_) = [unit for unit in target.plan.units if unit.source.experts_prefix is not None]
    jobs = expert_jobs(UnitWork(target, unit), 3)
    assert [(job.experts, job.ranks) for job in jobs] == [
        (range(3), (0,)),
        (range(4, 7), (1,)),
        (range(3, 4), (0,)),
        (range(7, 8), (1,)),
    ]


def test_a_file_for_each_layer(tiny: Checkpoint) -> None:
    source = open_source(str(tiny.folder))
    plan = plan_output(source, Options(2))
    needed = needs(source, plan, plan.units)
    order, sizes = fetch_order(needed), {header.file: header.size for header in source.headers}
    assert set(order) == set(sizes)
    assert most_at_once(needed, sizes) == max(
        sum(sizes[file] for file in order[i : i + 3]) for i in range(len(order))
    )


def test_a_file_that_is_needed_twice_is_held_meanwhile() -> None:
    needed = {"a": ["0", "1"], "b": ["2"], "c": ["3"], "d": ["0"]}
    sizes = {"0": 100, "1": 1, "2": 10, "3": 1000}
    assert most_at_once(needed, sizes, look_ahead=0) == 1100
    assert most_at_once(needed, sizes, look_ahead=2) == 1110


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=6),
    st.integers(0, 3),
)
def test_bounds(files: list[list[int]], look_ahead: int) -> None:
    needed = {str(i): [str(file) for file in unit] for i, unit in enumerate(files)}
    sizes = {str(file): 1 for file in range(6)}
    most = most_at_once(needed, sizes, look_ahead)
    order = fetch_order(needed)
    assert max(len(unit) for unit in files) <= most <= len(order)
    assert most >= min(look_ahead + 1, len(order))
