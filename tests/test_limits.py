"""Limits are those of the process: control groups of both versions, nested and missing, and its own."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trees
from checkpoints import Checkpoint
from marlin_convert import limits as limits_module
from marlin_convert.errors import MachineError
from marlin_convert.limits import Limit, Limits, allow, read_limits
from marlin_convert.pipeline.run import convert

MIB, GIB = 1 << 20, 1 << 30
V2 = "30 24 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw\n"
V1 = "3{i} 24 0:3{i} {root} /sys/fs/cgroup/{name} rw,nosuid - cgroup cgroup rw,{name}\n"
FREE = Limits(Limit(4, "cores"), None, None, None, None, None)


def tree(root: Path, **files: str) -> Path:
    """A file system of proc and sys; `__` in a name is a slash, `_0` a dot."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_0", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def add(folder: Path, files: dict[str, object]) -> None:
    """Files of a control group."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores by affinity, and no limits of the process itself."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)


def version_2(root: Path, path: str = "/a/b", mounted: str = "/") -> Path:
    """A system with version 2; returns the folder of the groups."""
    tree(root, proc__self__cgroup=f"0::{path}\n", proc__self__mountinfo=V2.format(root=mounted))
    return root / "sys/fs/cgroup"


def version_1(root: Path, path: str = "/a", mounted: str = "/") -> Path:
    """A system with version 1."""
    names = ("cpu", "memory", "pids")
    groups = "".join(f"{i}:{name}:{path}\n" for i, name in enumerate(names))
    mounts = "".join(V1.format(i=i, name=name, root=mounted) for i, name in enumerate(names))
    tree(root, proc__self__cgroup=groups, proc__self__mountinfo=mounts)
    return root / "sys/fs/cgroup"


def test_nothing_to_read_is_no_limit(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == Limits(Limit(8, "cores"), None, None, None, None, None)


def test_available_memory_of_the_machine(tmp_path: Path) -> None:
    tree(tmp_path, proc__meminfo="MemTotal:  900 kB\nMemAvailable:    500 kB\n")
    assert read_limits(tmp_path).memory == Limit(500 << 10, "available memory")


def test_version_2_with_page_cache_that_can_be_given_back(tmp_path: Path) -> None:
    groups = version_2(tmp_path)
    stat = f"anon 5\nfile {300 * MIB}\ninactive_file {150 * MIB}\nactive_file {50 * MIB}"
    add(groups / "a/b", {"memory.max": GIB, "memory.current": 400 * MIB, "memory.stat": stat})
    add(groups / "a/b", {"memory.high": "max", "cpu.max": "250000 100000"})
    add(groups / "a/b", {"pids.max": 100, "pids.current": 40})
    found = read_limits(tmp_path)
    assert found.memory == Limit(824 * MIB, "/sys/fs/cgroup/a/b/memory.max")
    assert found.group_memory == GIB
    assert found.cores == Limit(3, "/sys/fs/cgroup/a/b/cpu.max")
    assert found.threads == Limit(60, "/sys/fs/cgroup/a/b/pids.max")


def test_the_tightest_of_nested_groups_decides(tmp_path: Path) -> None:
    groups = version_2(tmp_path)
    add(groups / "a/b", {"memory.max": "max", "cpu.max": "max 100000", "pids.max": "max"})
    add(groups / "a", {"memory.max": 3 * GIB, "memory.high": 2 * GIB, "cpu.max": "150000 100000"})
    add(groups, {"memory.max": 4 * GIB})
    found = read_limits(tmp_path)
    assert found.memory == Limit(2 * GIB, "/sys/fs/cgroup/a/memory.high")
    assert found.cores == Limit(2, "/sys/fs/cgroup/a/cpu.max")
    assert found.threads is None


def test_the_machine_decides_where_it_has_less(tmp_path: Path) -> None:
    add(version_2(tmp_path), {"memory.max": 4 * GIB, "cpu.max": "1600000 100000"})
    tree(tmp_path, proc__meminfo=f"MemAvailable: {GIB >> 10} kB\n")
    found = read_limits(tmp_path)
    assert found.memory == Limit(GIB, "available memory")
    assert found.cores == Limit(8, "cores")


@pytest.mark.parametrize(("path", "mounted"), [("/", "/"), ("/../..", "/"), ("/docker/x", "/docker/x")])
def test_in_a_container_what_is_mounted_is_ours(tmp_path: Path, path: str, mounted: str) -> None:
    add(version_2(tmp_path, path, mounted), {"memory.max": GIB, "cpu.max": "10000 100000"})
    found = read_limits(tmp_path)
    assert found.memory == Limit(GIB, "/sys/fs/cgroup/memory.max")
    assert found.cores == Limit(1, "/sys/fs/cgroup/cpu.max")


@pytest.mark.parametrize("folder", ["a", ""])
def test_version_1(tmp_path: Path, folder: str) -> None:
    groups = version_1(tmp_path)
    stat = f"inactive_file 1\ntotal_inactive_file {100 * MIB}\ntotal_active_file {MIB}"
    usage = {"memory.usage_in_bytes": 201 * MIB, "memory.stat": stat}
    add(groups / "memory" / folder, {"memory.limit_in_bytes": 1500 * MIB, **usage})
    add(groups / "cpu" / folder, {"cpu.cfs_quota_us": 200000, "cpu.cfs_period_us": 100000})
    add(groups / "pids" / folder, {"pids.max": 64, "pids.current": 4})
    found, place = read_limits(tmp_path), f"/{folder}" if folder else ""
    assert found.memory == Limit(1400 * MIB, f"/sys/fs/cgroup/memory{place}/memory.limit_in_bytes")
    assert found.cores == Limit(2, f"/sys/fs/cgroup/cpu{place}/cpu.cfs_quota_us")
    assert found.threads == Limit(60, f"/sys/fs/cgroup/pids{place}/pids.max")


def test_version_1_without_limits(tmp_path: Path) -> None:
    groups = version_1(tmp_path)
    add(groups / "memory/a", {"memory.limit_in_bytes": 9223372036854771712, "memory.usage_in_bytes": 5})
    add(groups / "cpu/a", {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100000})
    add(groups / "pids/a", {"pids.max": "max", "pids.current": 4})
    assert read_limits(tmp_path) == Limits(Limit(8, "cores"), None, None, None, None, None)


def test_both_versions_side_by_side(tmp_path: Path) -> None:
    """Memory in version 1, the rest in version 2."""
    mounts = V1.format(i=1, name="memory", root="/") + V2.format(root="/").replace(
        "cgroup rw\n", "cgroup rw\n"
    )
    mounts = mounts.replace("/sys/fs/cgroup rw", "/sys/fs/cgroup/unified rw")
    tree(tmp_path, proc__self__cgroup="4:memory:/m\n0::/u\n", proc__self__mountinfo=mounts)
    add(tmp_path / "sys/fs/cgroup/memory/m", {"memory.limit_in_bytes": GIB})
    add(tmp_path / "sys/fs/cgroup/unified/u", {"cpu.max": "300000 100000"})
    found = read_limits(tmp_path)
    assert found.memory == Limit(GIB, "/sys/fs/cgroup/memory/m/memory.limit_in_bytes")
    assert found.cores == Limit(3, "/sys/fs/cgroup/unified/u/cpu.max")


def test_limits_of_the_process_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_ = {resource.RLIMIT_AS: 4 * GIB, resource.RLIMIT_DATA: 2 * GIB, resource.RLIMIT_NOFILE: 256}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (set_.get(which, resource.RLIM_INFINITY), -1))
    tree(tmp_path, proc__self__status=f"VmSize:\t {GIB >> 10} kB\nVmData:\t {GIB >> 11} kB\n")
    found = read_limits(tmp_path)
    assert found.space == Limit(3 * GIB, "ulimit -v")
    assert found.memory == Limit(3 * GIB // 2, "ulimit -d")
    assert found.open_files == Limit(256, "ulimit -n")


def test_without_limits_a_thread_more_than_cores_and_memory_for_all() -> None:
    assert allow(FREE).threads == Limit(5, "cores")
    assert allow(FREE).memory == Limit(1536 * MIB, "threads")
    many = allow(replace(FREE, cores=Limit(128, "cores")))
    assert (many.threads.value, many.memory) == (129, Limit(129 * 128 * MIB, "threads"))


def test_two_cores_of_many_and_little_memory() -> None:
    """What was killed once: 2 usable cores of 128, and a limit of 1,500 MiB."""
    allowed = allow(replace(FREE, cores=Limit(2, "cores"), memory=Limit(1500 * MIB, "memory.max")))
    assert allowed.threads == Limit(3, "cores")
    assert allowed.memory == Limit(558 * MIB, "memory.max")


@pytest.mark.parametrize(
    ("limit", "threads"),
    [
        ({"threads": Limit(19, "pids.max")}, Limit(3, "pids.max")),
        ({"threads": Limit(2, "pids.max")}, Limit(1, "pids.max")),
        ({"open_files": Limit(64, "ulimit -n")}, Limit(4, "ulimit -n")),
        ({"open_files": Limit(20, "ulimit -n")}, Limit(1, "ulimit -n")),
        ({"space": Limit(2 * GIB, "ulimit -v")}, Limit(3, "ulimit -v")),
    ],
)
def test_threads_stay_below_every_limit(limit: dict[str, Any], threads: Limit) -> None:
    assert allow(replace(FREE, **limit), ranks=4).threads == threads


@pytest.mark.parametrize("limit", ["memory", "space"])
def test_memory_for_a_single_step_is_taken_in_any_case(limit: str) -> None:
    scarce: dict[str, Any] = {limit: Limit(100 * MIB, "a limit")}
    allowed = allow(replace(FREE, **scarce))
    assert allowed.memory == Limit(64 * MIB, "a limit")


def test_threads_that_are_given_stay() -> None:
    scarce = replace(FREE, threads=Limit(2, "pids.max"), memory=Limit(GIB, "memory.max"))
    assert allow(scarce, threads=7).threads == Limit(7, "--threads")


def test_too_little_memory_for_any_step_is_said(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = replace(FREE, memory=Limit(4096, "memory.max"))
    monkeypatch.setattr("marlin_convert.pipeline.budget.read_limits", lambda: scarce)
    said = (
        r"largest single step needs \d+ MiB of memory and memory.max leaves 0 MiB; raise that limit, or try"
    )
    with pytest.raises(MachineError, match=said):
        convert(str(tiny.folder), tmp_path / "out", tp=2)
    convert(str(tiny.folder), tmp_path / "out", tp=2, memory=64 * MIB)


#: how many threads a command line ends with
THREADS = """
import atexit, os, sys
atexit.register(lambda: print(len(os.listdir("/proc/self/task"))))
from marlin_convert.cli import main
main()
"""


def test_the_command_line_has_no_threads_for_products(tiny_tp2: Path) -> None:
    """numpy's OpenBLAS would interrupt the process where it may not start one for each core."""
    environment = {key: value for key, value in os.environ.items() if key != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", THREADS, "inspect", str(tiny_tp2)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "1"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Path]:
    """A control group of 400 MiB below that of this process."""
    folder = next((path for path in groups_of_memory() if path.is_dir()), None)
    made = None if folder is None else folder / f"marlin-convert-test-{os.getpid()}"
    try:
        if made is None:
            pytest.skip("no control group of memory was found")
        made.mkdir()
        name = "memory.max" if (made / "memory.max").exists() else "memory.limit_in_bytes"
        (made / name).write_text(str(400 * MIB))
    except OSError as error:
        pytest.skip(f"no control group of memory can be made: {error.strerror}")
    yield made
    made.rmdir()


def groups_of_memory() -> list[Path]:
    """Where the memory of this process is counted."""
    found = limits_module._Groups(Path("/"))
    return [*list(found._folders("memory"))[:1], *list(found._folders(""))[:1]]


@pytest.mark.slow
def test_a_conversion_stays_below_its_control_group(
    tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, group: Path
) -> None:
    out = tmp_path / "out"
    line = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -m marlin_convert convert"
    done = subprocess.run(
        ["sh", "-c", f"{line} {tiny.folder} {out} --tp 2"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert trees.tree(out) == trees.tree(tiny_tp2)
