"""What proxies between a client and an HTTP server on this machine have in common."""

from __future__ import annotations

import http.client
import socket
import threading
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
