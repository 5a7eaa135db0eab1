"""Measures what the tests only touch, on a checkpoint of many layers; prints JSON. From tests/support:

python -m hub.measure kills    twenty conversions, each killed at a random moment, continued and compared
python -m hub.measure disk     the most disk a streaming conversion takes
python -m hub.measure link     download alone and with conversion, where the link is the bottleneck
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from checkpoints import make_small
from hub.proxy import Proxy
from hub.server import Hub
from hub.setting import REPO, Published, differences, hub_environment, run_command
from hub.watch import Watch

KILLS = 20
#: bytes a second
SLOW, LINK = 3e6, 20e6
#: the hub itself is slow when it is asked for the first time
PATIENT = {"HF_HUB_DOWNLOAD_TIMEOUT": "300", "HF_HUB_ETAG_TIMEOUT": "300"}


def kills(published: Published, folder: Path) -> dict[str, Any]:
    """Twenty kills."""
    command = ["--tp", "2", "--free-source"]
    begin = time.monotonic()
    published.proxy.rate = SLOW
    done = run_command(
        published.proxy.endpoint, folder / "home", "convert", published.repo, folder / "whole", *command
    )
    assert done.code == 0, done.stderr
    length = time.monotonic() - begin
    moments, wrong, stages = random.Random(7), [], []
    for i in range(KILLS):
        out = folder / f"killed-{i}"
        arguments = [sys.executable, "-m", "marlin_convert", "convert", published.repo, str(out), *command]
        process = subprocess.Popen(
            arguments,
            env=hub_environment(published.proxy.endpoint, folder / "home"),
            stdout=subprocess.DEVNULL,
        )
        time.sleep(moments.uniform(0.5, length))
        over = process.poll() is not None
        process.kill()
        process.wait()
        stages.append("over" if over else len(list(out.glob(".work/units/*.json"))))
        published.proxy.rate = None
        done = run_command(
            published.proxy.endpoint, folder / "home", "convert", published.repo, out, *command
        )
        published.proxy.rate = SLOW
        if done.code != 0 or differences(out, folder / "whole", {"provenance.json"}):
            wrong.append([i, done.code, done.stderr[-300:]])
        shutil.rmtree(out)
    return {
        "kills": KILLS,
        "units_recorded_when_killed": stages,
        "wrong": wrong,
        "seconds": round(time.monotonic() - begin),
    }


def disk(published: Published, folder: Path) -> dict[str, Any]:
    """Peak disk."""
    published.proxy.rate = LINK
    out = folder / "disk"
    with Watch(out) as watch:
        done = run_command(
            published.proxy.endpoint,
            folder / "home",
            "convert",
            published.repo,
            out,
            "--tp",
            2,
            "--free-source",
        )
    assert done.code == 0, done.stderr
    sizes = sorted(path.stat().st_size for path in published.folder.glob("*.safetensors"))
    output = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return {
        "source": sum(sizes),
        "output": output,
        "largest_file": sizes[-1],
        "most_staged": watch.staged,
        "most_staged_files": watch.files,
        "three_largest": sum(sizes[-3:]),
        "most_in_out": watch.all,
        "looks": watch.looks,
    }


def link(published: Published, folder: Path) -> dict[str, Any]:
    """One run, both."""
    published.proxy.rate = LINK
    seconds = {}
    for name, command in {
        "download": ("download", published.repo, folder / "fetched"),
        "convert": ("convert", published.repo, folder / "streamed", "--tp", 2, "--free-source"),
    }.items():
        begin = time.monotonic()
        done = run_command(published.proxy.endpoint, folder / "home", *command, seconds=600)
        assert done.code == 0, done.stderr
        seconds[name] = round(time.monotonic() - begin, 2)
    begin = time.monotonic()
    done = run_command(
        published.proxy.endpoint, folder / "home", "convert", folder / "fetched", folder / "local", "--tp", 2
    )
    assert done.code == 0, done.stderr
    seconds["convert the folder"] = round(time.monotonic() - begin, 2)
    size = sum(path.stat().st_size for path in published.folder.iterdir())
    return {
        "bytes": size,
        "bytes_a_second": LINK,
        "seconds": seconds,
        "ratio": round(seconds["convert"] / seconds["download"], 3),
    }


def main() -> None:
    """See above."""
    what = {"kills": kills, "disk": disk, "link": link}[sys.argv[1]]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        size: dict[str, Any] = (
            {"experts": 16, "layers": 6}
            if what is kills
            else {"experts": 64, "moe_intermediate": 1024, "layers": 14}
        )
        made = make_small(folder / "checkpoint", **size)
        hub = Hub(folder / "hub")
        proxy = Proxy(hub.endpoint)
        try:
            commit = hub.publish(REPO, made.folder)
            hub.start()
            proxy.start()
            published = Published(REPO, commit, made.folder, hub, proxy)
            # once without limits: from now on the proxy answers from memory
            done = run_command(
                proxy.endpoint,
                folder / "home",
                "download",
                REPO,
                folder / "once",
                "--max-workers",
                1,
                env=PATIENT,
                seconds=900,
            )
            assert done.code == 0, done.stderr
            done = run_command(proxy.endpoint, folder / "home", "plan", REPO, "--tp", 2)
            assert done.code == 0, done.stderr
            shutil.rmtree(folder / "once")
            proxy.reset()
            print(json.dumps({sys.argv[1]: what(published, folder)}, indent=1))
        finally:
            proxy.stop()
            hub.stop()


if __name__ == "__main__":
    main()
