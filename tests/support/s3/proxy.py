"""A small proxy in front of an object store that spoils some of its answers on request."""

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
SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code>'
    b"<Message>Please reduce your request rate.</Message></Error>"
)


@dataclass(frozen=True)
class Request:
    """What was asked: `number` counts from 1."""

    number: int
    method: str
    path: str
    range: str | None

    @property
    def name(self) -> str:
        """The object's name."""
        return urlsplit(self.path).path.rpartition("/")[2]

    @property
    def data(self) -> bool:
        """Whether bytes of a weight file are asked for."""
        return self.method == "GET" and self.name.endswith(".safetensors")


@dataclass(frozen=True)
class Fault:
    """What is done to an answer: 503 in its place; so many bytes of the body, then the connection is closed;
    a pause before each piece; or the answer is lost although the store has done what it was asked for.
    """

    refuse: bool = False
    cut: int | None = None
    pause: float = 0.0
    lose: bool = False


@dataclass
class Proxy:
    """`fault(request)` says what becomes of the answer; `requests` are those that came, `sent` the bytes of
    weight files that went out.
    """

    upstream: str
    fault: Callable[[Request], Fault | None] = lambda request: None
    requests: list[Request] = field(default_factory=list)
    sent: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        """Listen on a free port."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                proxy.serve(self)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815  # the names that http.server calls

            def log_message(self, *arguments: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Clients that are killed are what the tests are about."""

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    @property
    def endpoint(self) -> str:
        """What AWS_ENDPOINT_URL must be."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def reset(self) -> None:
        """No fault, nothing counted."""
        self.fault, self.sent = lambda request: None, 0
        self.requests.clear()

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        with self._lock:
            number = len(self.requests) + 1
            request = Request(number, handler.command, handler.path, handler.headers.get("range"))
            self.requests.append(request)
        fault = self.fault(request) or Fault()
        try:
            if fault.refuse:
                self._send(handler, 503, [("content-type", "application/xml")], SLOW_DOWN, fault)
                return
            status, headers, answer = self._ask(handler, body)
            if fault.lose:
                handler.close_connection = True
                return
            self._send(handler, status, headers, answer, fault, request.data)
        except (OSError, http.client.HTTPException):
            handler.close_connection = True

    def _ask(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """The store's answer. The host is sent on as it came: it is signed."""
        connection = http.client.HTTPConnection(urlsplit(self.upstream).netloc, timeout=120)
        try:
            connection.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
            for name, value in handler.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            response = connection.getresponse()
            answer = response.read()
            headers = [(name, value) for name, value in response.getheaders() if name.lower() not in HOP]
            if handler.command == "HEAD":
                headers.append(("content-length", response.getheader("content-length") or "0"))
            return response.status, headers, answer
        finally:
            connection.close()

    def _send(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        headers: list[tuple[str, str]],
        body: bytes,
        fault: Fault,
        data: bool = False,
    ) -> None:
        handler.send_response_only(status)
        for name, value in headers:
            handler.send_header(name, value)
        if handler.command != "HEAD":
            handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        if handler.command == "HEAD":
            return
        for at in range(0, len(body), PIECE):
            piece = body[at : min(at + PIECE, len(body) if fault.cut is None else fault.cut)]
            time.sleep(fault.pause)
            handler.wfile.write(piece)
            with self._lock:
                self.sent += len(piece) if data else 0
            if len(piece) < min(PIECE, len(body) - at):
                handler.close_connection = True
                return
