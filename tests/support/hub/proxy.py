"""A small proxy in front of the hub that keeps the hub's own answers, so that tests are quick, and spoils
some of them on request.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

PIECE = 64 << 10
#: headers that belong to one connection
HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


@dataclass
class Answer:
    """What goes back: `body` may be shorter than `length` says. `pause` is slept before each piece, `cut`
    ends the connection after so many bytes.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    length: int | None = None
    pause: float = 0.0
    cut: int | None = None
    reset: bool = False


@dataclass
class Request:
    """What was asked."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def file(self) -> str:
        """The file's name, of a request for one; else ""."""
        return self.path.partition("?")[0].rpartition("/")[2] if "/resolve/" in self.path else ""

    @property
    def is_data(self) -> bool:
        """Whether a file's bytes are asked for as the client downloads them: all of it, or the rest of it."""
        return (
            self.method == "GET"
            and bool(self.file)
            and not self.headers.get("range", "bytes=0-").partition("-")[2]
        )


Fault = Callable[[Request, Answer], Answer | None]


@dataclass
class Proxy:
    """`fault(request, answer)` may return another answer; `rate` limits all bodies together, in bytes a
    second.
    """

    upstream: str
    fault: Fault | None = None
    rate: float | None = None
    requests: list[Request] = field(default_factory=list)
    sent: int = 0
    _kept: dict[tuple[str, str, str, bytes], Answer] = field(default_factory=dict)
    _asking: dict[tuple[str, str, str, bytes], threading.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _server: ThreadingHTTPServer | None = None
    _free_at: float = 0.0

    def start(self) -> None:
        """Listen on a free port."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy.serve(self)

            do_HEAD = do_POST = do_GET  # noqa: N815  # the names that http.server calls

            def log_message(self, *arguments: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                """Clients that are killed are what the tests are about."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT must be."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def reset(self) -> None:
        """No fault, no limit, nothing counted; the kept answers stay."""
        self.fault, self.rate, self.sent = None, None, 0
        self.requests.clear()

    def forget(self) -> None:
        """The hub has changed: ask it again."""
        self._kept.clear()

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        length = int(handler.headers.get("content-length") or 0)
        headers = {key.lower(): value for key, value in handler.headers.items()}
        request = Request(handler.command, handler.path, headers, handler.rfile.read(length))
        try:
            answer = self._ask(request)
        except (OSError, http.client.HTTPException) as error:
            answer = Answer(502, {}, repr(error).encode())
        if self.fault is not None:
            answer = (
                self.fault(request, Answer(answer.status, dict(answer.headers), answer.body, answer.length))
                or answer
            )
        with self._lock:
            self.requests.append(request)
        try:
            self._send(handler, request, answer)
        except OSError:
            handler.close_connection = True

    def _ask(self, request: Request) -> Answer:
        """The hub's answer, from memory if it was asked before."""
        key = (request.method, request.path, request.headers.get("range", ""), request.body)
        with self._lock:
            asking = self._asking.setdefault(key, threading.Lock())
        with asking:
            if key not in self._kept:
                self._kept[key] = self._ask_upstream(request)
            return self._kept[key]

    def _ask_upstream(self, request: Request) -> Answer:
        connection = http.client.HTTPConnection(urlsplit(self.upstream).netloc, timeout=300)
        try:
            skip = {"host", "connection", "accept-encoding", "content-length"}
            headers = {name: value for name, value in request.headers.items() if name not in skip}
            connection.request(request.method, request.path, request.body or None, headers)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        kept = {
            name.lower(): value.replace(self.upstream, self.endpoint) for name, value in response.getheaders()
        }
        size = int(kept.get("content-length", len(body)))
        return Answer(
            response.status, {name: value for name, value in kept.items() if name not in HOP}, body, size
        )

    def _send(self, handler: BaseHTTPRequestHandler, request: Request, answer: Answer) -> None:
        handler.send_response_only(answer.status)
        for name, value in answer.headers.items():
            handler.send_header(name, value)
        handler.send_header(
            "content-length", str(len(answer.body) if answer.length is None else answer.length)
        )
        handler.end_headers()
        if request.method == "HEAD":
            return
        body = answer.body if answer.cut is None else answer.body[: answer.cut]
        for at in range(0, len(body), PIECE):
            piece = body[at : at + PIECE]
            time.sleep(answer.pause + self._wait_for_turn(len(piece)))
            handler.wfile.write(piece)
        if answer.cut is not None or len(body) != (len(body) if answer.length is None else answer.length):
            handler.close_connection = True
            if answer.reset:
                reset_connection(handler)

    def _wait_for_turn(self, size: int) -> float:
        """Seconds until the link has room; also counts."""
        with self._lock:
            self.sent += size
            if self.rate is None:
                return 0.0
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size / self.rate
            return self._free_at - now


def reset_connection(handler: BaseHTTPRequestHandler) -> None:
    """Close so that the other side sees a reset, not an orderly end."""
    import socket
    import struct

    handler.wfile.flush()
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
