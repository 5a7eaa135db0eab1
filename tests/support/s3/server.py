"""A real object store on loopback: OpenStack Swift with its S3 interface, all of it in one folder.

It serves S3 in public clouds, and PyPI has it: signatures, multipart uploads with their least size,
conditional reads and writes are its own. S3 servers made for tests take nearly anything.
"""

from __future__ import annotations

import array
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_SECONDS = 120
#: the parts of a store; what clients talk to is the last
PARTS = ("account", "container", "object", "proxy")
KEY, SECRET, REGION = "test:tester", "secret-of-the-tests", "us-east-1"
#: what has a process ended when the one that started it ends, however that is ended
ENDED_WITH_US = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
FILTERS = {
    "catch_errors": "",
    "gatekeeper": "",
    "listing_formats": "",
    "s3api": "",
    "tempauth": f"user_test_tester = {SECRET} .admin\n",
    "copy": "",
    "slo": "",
    "dlo": "",
    "symlink": "",
    "versioned_writes": "allow_object_versioning = true\n",
}


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@dataclass
class Store:
    """The servers, which keep everything below `root`."""

    root: Path
    ports: dict[str, int] = field(default_factory=dict)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        """What AWS_ENDPOINT_URL must be."""
        return f"http://127.0.0.1:{self.ports['proxy']}"

    def start(self) -> None:
        """Start the servers and wait until they answer."""
        self.ports = dict(zip(PARTS, free_ports(len(PARTS)), strict=True))
        (self.root / "disks" / "d1").mkdir(parents=True)
        (self.root / "swift.conf").write_text("[swift-hash]\nswift_hash_path_suffix = tests\n")
        for part in PARTS:
            (self.root / f"{part}.conf").write_text(self._configuration(part))
        code = "import sys; from s3.server import write_rings; write_rings(*sys.argv[1:])"
        ports = [str(self.ports[part]) for part in PARTS[:3]]
        path = os.pathsep.join(
            [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        environment = os.environ | {"PYTHONPATH": path}
        subprocess.run([sys.executable, "-c", code, str(self.root), *ports], env=environment, check=True)
        for part in PARTS:
            program = Path(sys.executable).with_name(f"swift-{part}-server")
            with (self.root / f"{part}.log").open("wb") as log:
                command = [
                    *ENDED_WITH_US,
                    sys.executable,
                    str(program),
                    str(self.root / f"{part}.conf"),
                    "-v",
                ]
                self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=self.root))
        for part in PARTS:
            self._wait(part)

    def stop(self) -> None:
        """Stop the servers."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def client(self) -> Any:
        """A client that talks to the store itself."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name=REGION,
        )

    def _configuration(self, part: str) -> str:
        text = (
            f"[DEFAULT]\nswift_dir = {self.root}\ndevices = {self.root / 'disks'}\nmount_check = false\n"
            f"bind_ip = 127.0.0.1\nbind_port = {self.ports[part]}\nworkers = 0\nfallocate_reserve = 0\n"
            f"user = {os.environ.get('USER', 'root')}\n"
        )
        if part != "proxy":
            text += f"[pipeline:main]\npipeline = {part}-server\n"
            return f"{text}[app:{part}-server]\nuse = egg:swift#{part}\n"
        text += f"[pipeline:main]\npipeline = {' '.join(FILTERS)} proxy-server\n"
        text += "[app:proxy-server]\nuse = egg:swift#proxy\naccount_autocreate = true\n"
        return text + "".join(
            f"[filter:{name}]\nuse = egg:swift#{name}\n{more}" for name, more in FILTERS.items()
        )

    def _wait(self, part: str) -> None:
        for _ in range(START_SECONDS * 20):
            if any(process.poll() is not None for process in self.processes):
                break
            try:
                socket.create_connection(("127.0.0.1", self.ports[part]), 1).close()
                return
            except OSError:
                time.sleep(0.05)
        logs = "\n".join((self.root / f"{each}.log").read_text()[-2000:] for each in PARTS)
        raise TimeoutError(f"the {part} server of the store does not answer: {logs}")


def write_rings(root: str, *ports: str) -> None:
    """Where everything lies: 16 partitions, one copy, one disk. In a process of its own, since importing
    Swift changes more than it should.
    """
    from swift.common.ring.ring import RingData

    disk: dict[str, Any] = {"id": 0, "region": 1, "zone": 1, "weight": 1.0, "device": "d1", "meta": ""}
    for part, port in zip(PARTS, ports, strict=False):
        place = disk | {"ip": "127.0.0.1", "port": int(port)}
        RingData([array.array("H", [0] * 16)], [place], 28).save(str(Path(root) / f"{part}.ring.gz"))
