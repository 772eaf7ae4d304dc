"""A proxy between a client and an HTTP server on this machine that does what bad networks do."""

from __future__ import annotations

import http.client
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = (
    "drop", "lost", "swallow", "stall", "truncate", "shorten", "flip", "flip-request", "stale",
    "503", "503-done", "429", "429-done",
)  # fmt: skip
"""`drop`: the connection is closed before the server is asked; `lost`: after that, without an
answer. `swallow`: there is never an answer. `stall`: in the midst of a body nothing more comes.
`truncate`: the connection is closed there. `shorten`: half of the body is told to be all of it.
`flip`: a bit of what is answered differs; `flip-request`: of what is sent. `stale`: a listing is
the one before. The others are statuses, in place of what the server does or after it (`-done`)."""


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


class BadProxy:
    """Passes requests on to a server on this machine, but for those that go wrong.

    Args:
        port: Of the server.
        seed: Of what happens by chance.

    Attributes:
        port: Where it listens.
        share: Which part of the requests goes wrong by chance.
        faults: In which ways.
        hits: How often each of them happened.
    """

    def __init__(self, port: int, seed: int = 0) -> None:
        self.share = 0.0
        self.faults: Sequence[str] = FAULTS
        self.hits: Counter[str] = Counter()
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
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._listings: dict[str, list[bytes]] = {}
        self._next: list[str] = []
        self._over = threading.Event()
        proxy = self

        class Handler(_Handler):
            server_port = port

            def pass_on(self) -> None:
                began_s = time.monotonic()
                try:
                    self.answer(proxy)
                finally:
                    proxy.lasted.append((began_s, time.monotonic()))

        self._listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._listener.daemon_threads = True
        self._listener.block_on_close = False
        self.port: int = self._listener.server_address[1]
        threading.Thread(target=self._listener.serve_forever, args=(0.01,), daemon=True).start()

    def next_fault(self, fault: str, *, times: int = 1) -> None:
        """Has this happen to the next requests, and to no other."""
        with self._lock:
            self._next = [fault] * times

    def close(self) -> None:
        """Takes no more connections, and lets go of those that stall."""
        self._over.set()
        self._listener.shutdown()
        self._listener.server_close()

    def _fault(self, method: str, is_listing: bool, has_body: bool) -> str:
        with self._lock:
            if self._next:
                fault = self._next.pop()
                self.hits[fault] += 1
                return fault
            if self._random.random() >= self.share:
                return ""
            able = [
                fault
                for fault in self.faults
                if (fault != "stale" or is_listing)
                and (fault != "flip-request" or has_body)
                and (fault not in ("stall", "truncate", "shorten", "flip") or method == "GET")
            ]
            fault = self._random.choice(able) if able else ""
            self.hits[fault] += 1
            return fault

    def _flipped(self, data: bytes) -> bytes:
        with self._lock:
            at = self._random.randrange(len(data)) if data else 0
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if data else data

    def _listing(self, path: str, data: bytes, *, stale: bool) -> bytes:
        with self._lock:
            seen = self._listings.setdefault(path, [])
            if not stale or not seen:
                seen.append(data)
            return seen[-1] if not stale else seen[0]

    def altered(self, data: bytes, at: int) -> bytes:
        """Returns bytes of which one differs, and counts that."""
        self.num_altered += 1
        changed = bytearray(data)
        changed[at] ^= 1
        return bytes(changed)

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


class _Handler(BaseHTTPRequestHandler):
    """The requests of one connection."""

    protocol_version = "HTTP/1.1"
    server_port = 0
    _server: http.client.HTTPConnection | None = None

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
        raise NotImplementedError

    def finish(self) -> None:
        if self._server is not None:
            self._server.close()
        super().finish()

    def answer(self, proxy: BadProxy) -> None:
        threading.Event().wait(proxy.delay_s)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        proxy.seen.append(f"{self.command} {self.path}")
        if body and proxy.alters(self.command, self.path):
            body = proxy.altered(body, -1)
        refusal = proxy.refusal
        refused = refusal if refusal and refusal.takes(self.command, self.path) else None
        if refused is not None and not refused.passes_on:
            return self.refuse(refused.status, refused.code)
        is_listing = self.command == "GET" and "list-type=2" in self.path
        fault = proxy._fault(self.command, is_listing, bool(body))
        if fault in ("drop", "swallow"):
            if fault == "swallow":
                proxy._over.wait(60)
            return self.refuse(CUT)
        if fault in ("503", "429"):
            return self.refuse(int(fault), "SlowDown")
        if fault == "flip-request":
            body = proxy._flipped(body)
        status, headers, data = self.ask(body)
        if refused is not None:
            return self.refuse(refused.status, refused.code)
        if fault in ("lost", "503-done", "429-done"):
            return self.refuse(CUT if fault == "lost" else int(fault[:3]), "SlowDown")
        if data and proxy.alters_answer(self.command, self.path):
            data = proxy.altered(data, -9)
        if is_listing and status == 200:
            data = proxy._listing(self.path, data, stale=fault == "stale")
        length = len(data)
        if fault == "flip":
            data = proxy._flipped(data)
        if fault == "shorten":
            data, length = data[: length // 2], length // 2
        self.send_response_only(status)
        for name, value in headers.items():
            if name not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        is_head = self.command == "HEAD"
        told = headers.get("content-length") if is_head else None
        self.send_header("content-length", told or str(length))
        self.end_headers()
        if fault in ("stall", "truncate"):
            self.wfile.write(data[: len(data) // 2])
            if fault == "stall":
                proxy._over.wait(60)
            return self.refuse(CUT)
        if not is_head:
            self.wfile.write(data)
        return None

    def ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Sends the request on; returns status, headers and body of the answer."""
        if self._server is None:
            self._server = http.client.HTTPConnection("127.0.0.1", self.server_port)
        # Why unchanged: the client has signed the headers, its Host among them.
        self._server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            self._server.putheader(name, value)
        self._server.endheaders(body or None)
        answer = self._server.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, headers, answer.read()

    def refuse(self, status: int, code: str = "") -> None:
        """Answers with an error of S3, or closes the connection without an answer."""
        if status == CUT:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        text = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)
