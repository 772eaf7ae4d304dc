"""Proxies between a client and an HTTP server on this machine; one refuses what it is told to.

Another one does what bad networks do: see `wire_proxy`.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ProxyHandler(BaseHTTPRequestHandler):
    """The requests of one connection; a proxy says in `pass_on` what becomes of each."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def handle_any(self) -> None:
        # Why: who gave up a request, or was refused another one, closed its connection.
        try:
            self.pass_on()
        except OSError:
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815

    def pass_on(self) -> None:
        """Answers a request."""
        raise NotImplementedError

    def body(self) -> bytes:
        """Returns what the client sends."""
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def ask(self, server: http.client.HTTPConnection, body: bytes) -> http.client.HTTPResponse:
        """Sends the request on, and returns the answer of the server."""
        # Why unchanged: the client has signed the headers, its Host among them.
        server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            server.putheader(name, value)
        server.endheaders(body or None)
        return server.getresponse()

    def cut(self) -> None:
        """Closes the connection without an answer."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def refuse(self, status: int, code: str) -> None:
        """Answers with an error of S3."""
        text = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)


class HttpProxy:
    """Takes connections, each in a thread, until it is closed.

    Args:
        handler: Of the requests.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, handler: type[ProxyHandler]) -> None:
        self._listener = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._listener.daemon_threads = True
        self._listener.block_on_close = False
        self.port: int = self._listener.server_address[1]
        threading.Thread(target=self._listener.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """Takes no more connections."""
        self._listener.shutdown()
        self._listener.server_close()


CUT = 0
"""In place of a status: the connection is closed without an answer."""


@dataclass
class Refusal:
    """Which requests are refused, and how.

    Args:
        status: Of the answer, or `CUT`.
        code: Of S3's error.
        hits: Tells of method, path and query whether it concerns a request.
        after: So many of them pass first.
        times: So many are refused then; None for all.
        passes_on: The server is asked all the same; only its answer is replaced.
    """

    status: int
    code: str
    hits: Callable[[str, str], bool]
    after: int = 0
    times: int | None = None
    passes_on: bool = False
    seen: int = 0
    refused: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def takes(self, method: str, path: str) -> bool:
        """Counts a request; returns whether it is refused."""
        if not self.hits(method, path):
            return False
        with self.lock:
            self.seen += 1
            behind = self.seen - self.after
            is_hit = behind > 0 and (self.times is None or behind <= self.times)
            self.refused += is_hit
        return is_hit


class RefusingProxy(HttpProxy):
    """Passes requests on to a server on this machine, but for those that are to be refused."""

    def __init__(self, port: int) -> None:
        self.refusal: Refusal | None = None
        self.alters: Callable[[str, str], bool] = lambda method, path: False
        """Tells of method and path whether a byte of the body is changed on its way."""
        self.alters_answer = self.alters
        """The same of the body that the server answers."""
        self.num_altered = 0
        self.seen: list[str] = []
        """Method and path of each request."""
        self.delay_s = 0.0
        """How far away the server seems: so long an answer takes at least."""
        self.lasted: list[tuple[float, float]] = []
        """When each request came and when its answer went, by a clock that never goes back."""
        proxy = self

        class Handler(ProxyHandler):
            _server: http.client.HTTPConnection | None = None

            def finish(self) -> None:
                if self._server is not None:
                    self._server.close()
                super().finish()

            def pass_on(self) -> None:
                began_s = time.monotonic()
                try:
                    self._answer()
                finally:
                    proxy.lasted.append((began_s, time.monotonic()))

            def _answer(self) -> None:
                threading.Event().wait(proxy.delay_s)
                body = self.body()
                proxy.seen.append(f"{self.command} {self.path}")
                if body and proxy.alters(self.command, self.path):
                    proxy.num_altered += 1
                    body = body[:-1] + bytes([body[-1] ^ 1])
                refusal = proxy.refusal
                refused = refusal if refusal and refusal.takes(self.command, self.path) else None
                if refused is not None and not refused.passes_on:
                    self._refuse(refused)
                    return
                if self._server is None:
                    self._server = http.client.HTTPConnection("127.0.0.1", port)
                answer = self.ask(self._server, body)
                data = answer.read()
                if refused is not None:
                    self._refuse(refused)
                    return
                if data and proxy.alters_answer(self.command, self.path):
                    proxy.num_altered += 1
                    data = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
                self.send_response_only(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection"):
                        self.send_header(name, value)
                if answer.getheader("content-length") is None:
                    self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _refuse(self, refusal: Refusal) -> None:
                if refusal.status == CUT:
                    self.cut()
                else:
                    self.refuse(refusal.status, refusal.code)

        super().__init__(Handler)

    def forget(self) -> None:
        """Counts from here."""
        self.seen.clear()
        self.lasted.clear()

    @property
    def depth(self) -> int:
        """Most requests of which each came when the answer of the one before had gone."""
        count, last_s = 0, 0.0
        for began_s, ended_s in sorted(self.lasted, key=lambda one: one[1]):
            if began_s >= last_s:
                count, last_s = count + 1, ended_s
        return count
