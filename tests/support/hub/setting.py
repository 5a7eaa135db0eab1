"""What the tests of the hub share: a published repository, the command line pointed at it, and how outputs
are compared.
"""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import trees
from hub.proxy import Proxy
from hub.server import Hub

REPO = "org/tiny"
CARD = (
    "---\nlicense: other\nlicense_name: modified-mit\nlicense_link: LICENSE\nlibrary_name:"
    " transformers\n---\n\n# Tiny\n"
)
#: of a conversion, what may differ between a folder and a repository, or between two runs
OWN = {"manifest.json", "provenance.json", "README.md"}


@dataclass
class Done:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


@dataclass
class Published:
    """A repository on the hub: its commit, the folder it was made of, and the way to it."""

    repo: str
    commit: str
    folder: Path
    hub: Hub
    proxy: Proxy

    def fetched(self) -> list[str]:
        """Names of the weight files whose data was asked for, in order."""
        return [r.file for r in self.proxy.requests if r.is_data and r.file.endswith(".safetensors")]


def hub_environment(endpoint: str, home: Path) -> dict[str, str]:
    """The environment of a command: nothing of the machine's own hub settings, and patience."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return own | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DOWNLOAD_TIMEOUT": "40",
        "HF_HUB_ETAG_TIMEOUT": "40",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


#: `marlin-convert` on a disk with so much free space
ON_A_SMALL_DISK = """import collections, shutil, sys
left = int(sys.argv.pop(1))
shutil.disk_usage = lambda path: collections.namedtuple("usage", "total used free")(1 << 40, 0, left)
from marlin_convert.cli import main
main()"""


def run_command(
    endpoint: str,
    home: Path,
    *arguments: object,
    env: dict[str, str] | None = None,
    seconds: float = 120,
    free: int | None = None,
) -> Done:
    """Run `marlin-convert`; `free` is the free space of the disk it then believes in."""
    program = ["-m", "marlin_convert"] if free is None else ["-c", ON_A_SMALL_DISK, str(free)]
    command = [sys.executable, *program, *map(str, arguments)]
    environment = hub_environment(endpoint, home) | (env or {})
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


def differences(a: Path, b: Path, own: set[str] = OWN) -> list[str]:
    """Relative paths of files that are not in both folders with the same bytes; `own` are not looked at."""
    names = {str(path.relative_to(root)) for root in (a, b) for path in root.rglob("*") if path.is_file()}
    return sorted(
        name
        for name in names
        if trees.whole(name) not in own
        and not ((a / name).is_file() and (b / name).is_file() and filecmp.cmp(a / name, b / name, False))
    )
