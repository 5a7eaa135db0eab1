"""`--engine ray` on a real cluster of two nodes on this machine: the folder is that of a local run, whatever
is lost on the way.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import trees
from checkpoints import Checkpoint, make_small
from marlin_convert import UsageError, convert
from marlin_convert.extras import package_version

COMMAND = [sys.executable, "-m", "marlin_convert"]

ray = pytest.importorskip("ray")


def without_progress(stderr: str) -> str:
    """What was said, but for how far it was, which is said where it takes long, and by Ray."""
    return re.sub(r"(?m)^((converting|verifying|writing) .* GB/s.*|note: \(raylet\).*)\n", "", stderr)


@dataclass
class Rig:
    """A cluster, and a way to run commands on it."""

    cluster: Any

    def begin(self, *line: object) -> subprocess.Popen[str]:
        """A command that runs on it."""
        options = ("--engine", "ray", "--ray-address", self.cluster.address)
        return subprocess.Popen(
            [*COMMAND, *map(str, line), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *line: object) -> tuple[int, str, str]:
        """One that is waited for."""
        return self.end(self.begin(*line))

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        """Exit code, result, and what was said."""
        stdout, stderr = process.communicate(timeout=300)
        return process.returncode, stdout, without_progress(stderr)

    def workers(self) -> list[int]:
        """Processes that are making a unit."""
        nodes = {
            str(info.process.pid)
            for node in self.cluster.list_all_nodes()
            for info in node.all_processes.get("raylet", ())
        }
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if is_at_work(path, nodes)]


def is_at_work(process: Path, nodes: set[str]) -> bool:
    """Whether a process of one of these nodes is making a unit: Ray names it so."""
    try:
        parent = (process / "stat").read_text().rpartition(") ")[2].split()[1]
        return parent in nodes and (process / "cmdline").read_bytes().startswith(b"ray::marlin-convert")
    except OSError:
        return False


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """A head that computes nothing, and two nodes; not on a machine so busy that none of them gets up."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False}
    try:
        cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            cluster.add_node(num_cpus=1)
    except (TimeoutError, ConnectionError) as error:
        pytest.skip(f"no Ray cluster gets up here: {error}")
    yield Rig(cluster)
    for node in cluster.list_all_nodes():
        node.kill_all_processes(check_alive=False, allow_graceful=False)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """One of more layers."""
    folder = tmp_path_factory.mktemp("long") / "checkpoint"
    return make_small(folder, layers=7, experts=32, hidden=512, moe_intermediate=1024)


@pytest.fixture(scope="module")
def long_tp2(long: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its local conversion."""
    out = tmp_path_factory.mktemp("long_tp2") / "out"
    convert(long.folder, out, tp=2)
    return out


def wait_for(process: subprocess.Popen[str], out: Path, pattern: str) -> None:
    """Until a run has made such a file."""
    while not any(out.glob(pattern)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def damage(path: Path) -> None:
    """Another byte near the end."""
    data = bytearray(path.read_bytes())
    data[-5000] ^= 4
    path.write_bytes(data)


def assert_verified_as_here(rig: Rig, out: Path, *options: object) -> None:
    """Every number, every finding and the state of every file, but for the times."""
    line = [*COMMAND, "verify", str(out), *map(str, options), "--json"]
    local = subprocess.run(line, capture_output=True, text=True, check=False)
    code, stdout, stderr = rig.run("verify", out, *options, "--json")
    assert (code, stderr) == (local.returncode, without_progress(local.stderr))
    found, expected = (without_times(json.loads(text)) for text in (stdout, local.stdout))
    assert found == expected


def without_times(report: dict[str, Any]) -> dict[str, Any]:
    """A report of `verify` that can be compared."""
    units = [{**unit, "seconds": 0} for unit in report["units"]]
    return {**report, "seconds": 0, "units": units}


@pytest.mark.campaign
def test_a_worker_killed_and_a_node_lost(rig: Rig, long: Checkpoint, long_tp2: Path, tmp_path: Path) -> None:
    """Nothing of it is seen in the folder; and `verify` on the cluster finds what it finds here."""
    out = tmp_path / "out"
    process = rig.begin("convert", long.folder, out, "--tp", 2)
    wait_for(process, out, "rank-*/*.partial")
    for victim in rig.workers()[:1]:
        os.kill(victim, signal.SIGKILL)
    wait_for(process, out, ".work/units/*.json")
    node = next(iter(rig.cluster.worker_nodes))
    rig.cluster.remove_node(node, allow_graceful=False)
    code, stdout, stderr = rig.end(process)
    assert (code, stderr) == (0, "")
    assert re.search(r"out: 9 units made, .* each proven exact before it was written", stdout)
    assert trees.tree(out) == trees.tree(long_tp2)
    damage(out / "rank-01-of-02" / "layer-002.safetensors")
    damage(out / "rank-00-of-02" / "layer-000.safetensors")
    (out / "rank-01-of-02" / "top.safetensors").unlink()
    assert_verified_as_here(rig, out, "--source", long.folder)


@pytest.mark.campaign
def test_the_folder_is_that_of_a_local_run(
    rig: Rig, tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path
) -> None:
    out, new, direct = tmp_path / "out", tmp_path / "new", tmp_path / "direct"
    code, _, stderr = rig.run("convert", tiny.folder, out, "--tp", 2)
    assert (code, stderr) == (0, "")
    assert trees.tree(out) == trees.tree(tiny_tp2)
    code, stdout, _ = rig.run("convert", tiny.folder, out, "--tp", 2, "--json")
    assert (code, json.loads(stdout)["action"]) == (0, "done")
    code, stdout, stderr = rig.run("reshard", out, new, "--tp", 4, "--json")
    assert (code, stderr) == (0, "")
    result = json.loads(stdout)
    assert (result["units_made"], result["stages"]["repack"]["bytes"] > 0) == (5, True)
    convert(tiny.folder, direct, tp=4)
    assert trees.tree(new) == trees.tree(direct)
    assert_verified_as_here(rig, new, "--ranks", "0-2", "--layers", 1)
    code, _, stderr = rig.run("convert", tiny.folder, tmp_path / "more", "--tp", 2, "--threads", 3)
    assert (code, "the largest machine of the Ray cluster offers 1 CPUs" in stderr) == (2, True)


@pytest.mark.campaign
def test_what_is_wrong_is_said_as_by_a_local_run(rig: Rig, copied_source: Path, tmp_path: Path) -> None:
    """A wrong weight_shape; the same words, the same code."""
    weights = sorted(copied_source.glob("*.safetensors"))[1]
    shard = trees.read_shard(weights)
    (at,) = {entry[3] for entry in shard.entries if entry[0].endswith("experts.0.gate_proj.weight_shape")}
    data = bytearray(weights.read_bytes())
    data[at : at + 8] = b"\xff" * 8
    weights.write_bytes(data)
    line = [*COMMAND, "convert", str(copied_source), str(tmp_path / "local"), "--tp", "2"]
    local = subprocess.run(line, capture_output=True, text=True, check=False)
    code, _, stderr = rig.run("convert", copied_source, tmp_path / "out", "--tp", 2)
    assert (code, stderr) == (local.returncode, without_progress(local.stderr))
    assert (code, "says [-1, -1]" in stderr) == (3, True)


@pytest.mark.campaign
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_and_continued(
    rig: Rig, long: Checkpoint, long_tp2: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """By a signal nothing half made is left; after a kill it may be, and goes with the next run."""
    out = tmp_path / "out"
    process = rig.begin("convert", long.folder, out, "--tp", 2)
    wait_for(process, out, ".work/units/*.json")
    process.send_signal(number)
    code, _, stderr = rig.end(process)
    assert code == (-9 if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert stderr.endswith("interrupted; run the same command again to continue\n")
        assert list(out.rglob("*.partial")) == []
    code, stdout, stderr = rig.run("convert", long.folder, out, "--tp", 2, "--json")
    assert (code, stderr) == (0, "")
    assert json.loads(stdout)["units_found"] >= 1
    assert trees.tree(out) == trees.tree(long_tp2)


def test_folders_that_machines_have_not_in_common(tiny: Checkpoint, tmp_path: Path) -> None:
    """Each node sees the same disk here, so the task is told another story of it."""
    import pickle

    from marlin_convert.errors import MachineError
    from marlin_convert.pipeline import remote
    from marlin_convert.pipeline.budget import Budget
    from marlin_convert.pipeline.run import request_of
    from marlin_convert.planning.output_plan import Options

    options = Options(2)
    source, plan = remote.Origin(str(tiny.folder), options).open()
    request = request_of(source, plan, tmp_path, "exact", False)
    job = remote.Job(
        remote.Origin(str(tiny.folder), options),
        str(tmp_path),
        request.target.identity,
        request.stamps,
        "exact",
        Budget(1, 1 << 30, 1),
        True,
        package_version("marlin-convert"),
    )
    with pytest.raises(MachineError, match="what was begun there is not there"):
        remote.make_unit(pickle.dumps(job), "top")
    other = make_small(tmp_path / "other", experts=8)
    moved = replace(job, origin=remote.Origin(str(other.folder), options))
    with pytest.raises(MachineError, match=r"config\.json differs\); SOURCE and OUT must be folders"):
        remote.make_unit(pickle.dumps(moved), "top")
    old = replace(job, version="0.0.9")
    with pytest.raises(MachineError, match=r"the run was begun by 0\.0\.9; install the same version"):
        remote.make_unit(pickle.dumps(old), "top")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"engine": "dask"}, "choose one of local, ray"),
        ({"ray_address": "auto"}, "goes with --engine ray"),
        ({"engine": "ray", "shard": "0/2"}, "--shard does not go with --engine ray"),
    ],
)
def test_what_does_not_go_together(
    tiny: Checkpoint, tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        convert(tiny.folder, tmp_path / "out", tp=2, **options)


def test_no_cluster_there(tiny: Checkpoint, tmp_path: Path) -> None:
    line = [*COMMAND, "convert", str(tiny.folder), str(tmp_path / "out"), "--tp", "2", "--engine", "ray"]
    done = subprocess.run(
        [*line, "--ray-address", "127.0.0.1:1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 4
    assert "the Ray cluster at 127.0.0.1:1 cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
