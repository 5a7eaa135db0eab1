"""A real hub on loopback: a git repository with LFS objects, served by a pair of olah processes.

The back one serves the repository but ignores Range; the front one caches it and answers ranges as the public
hub does.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

START_SECONDS = 60


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@dataclass
class Hub:
    """The pair of servers and the repositories behind it. `root`/models/ORG/NAME are git repositories."""

    root: Path
    ports: list[int] = field(default_factory=lambda: free_ports(2))
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT must be."""
        return f"http://127.0.0.1:{self.ports[1]}"

    def repository(self, repo: str) -> Path:
        """The git repository of a hub repository."""
        return self.root / "mirror" / "models" / repo

    def publish(self, repo: str, folder: Path, *, skip: tuple[str, ...] = ()) -> str:
        """Commit a folder's files as the repository's new state, weights as LFS objects; returns the
        commit.
        """
        git = self.repository(repo)
        if not git.exists():
            git.mkdir(parents=True)
            run_git(git, "init", "-q", "-b", "main")
        for old in git.iterdir():
            if old.name != ".git":
                old.unlink()
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.name not in skip:
                content = path.read_bytes()
                if path.suffix == ".safetensors":
                    content = self._store_object(git, content)
                (git / path.name).write_bytes(content)
        run_git(git, "add", "-A")
        run_git(git, "commit", "-q", "--allow-empty", "-m", "publish")
        commit = run_git(git, "rev-parse", "HEAD").strip()
        self.prime(repo, commit)
        return commit

    def prime(self, repo: str, commit: str) -> None:
        """Tell the back server, which is offline, what the newest commit is."""
        name = f"cache-0/api/models/{repo}/revision"
        head = json.dumps({"sha": commit, "lastModified": "2026-11-29T00:00:00.000000"})
        for revision in (commit, "main"):
            folder = self.root / name / revision
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "meta_head.json").write_text(head)

    def forget(self) -> None:
        """Empty the front server's cache, so that it sees what the back one has now."""
        shutil.rmtree(self.root / "cache-1", ignore_errors=True)
        (self.root / "cache-1").mkdir()

    def start(self) -> None:
        """Start both servers and wait until they answer."""
        back, front = (f"127.0.0.1:{port}" for port in self.ports)
        for i, (own, extra) in enumerate(
            [
                (back, f'mirrors-path = ["{self.root / "mirror"}"]\n[accessibility]\noffline = true\n'),
                (
                    front,
                    (
                        f'hf-scheme = "http"\nhf-netloc = "{back}"\nhf-lfs-netloc ='
                        f' "{back}"\nmetadata-cache-ttl = 0\n'
                    ),
                ),
            ]
        ):
            cache = self.root / f"cache-{i}"
            cache.mkdir(parents=True, exist_ok=True)
            config = self.root / f"server-{i}.toml"
            config.write_text(
                f'[basic]\nhost = "127.0.0.1"\nport = {self.ports[i]}\nrepos-path = "{cache}"\n'
                f'mirror-netloc = "{own}"\nmirror-lfs-netloc = "{own}"\n{extra}'
            )
            command = [
                sys.executable,
                "-m",
                "olah.server",
                "--config",
                str(config),
                "--log-path",
                str(self.root / f"logs-{i}"),
            ]
            with (self.root / f"server-{i}.log").open("wb") as log:
                environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
                self.processes.append(
                    subprocess.Popen(command, stdout=log, stderr=log, cwd=self.root, env=environment)
                )
        for port in self.ports:
            wait_for_answer(port)

    def stop(self) -> None:
        """Stop both servers."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @staticmethod
    def _store_object(git: Path, content: bytes) -> bytes:
        """Put bytes where LFS keeps them; returns the pointer that is committed instead."""
        oid = hashlib.sha256(content).hexdigest()
        target = git / ".git" / "lfs" / "objects" / oid[:2] / oid[2:4] / oid
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(content)}\n".encode()


def run_git(folder: Path, *arguments: str) -> str:
    """Run git with an identity of its own and no configuration of the machine."""
    names = {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "tests"), ("EMAIL", "tests@localhost"))
    }
    environment = {**os.environ, **names, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    return subprocess.run(
        ["git", *arguments], cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout


def wait_for_answer(port: int) -> None:
    """Wait until somebody answers HTTP on a port."""
    for _ in range(START_SECONDS * 10):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"no server on port {port} after {START_SECONDS} s")
