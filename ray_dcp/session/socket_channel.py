"""`Channel`: an authenticated connection between two processes of a job.

Both ends know a key, and prove that they do before a byte is unpickled.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import pickle
import secrets
import socket
from contextlib import suppress
from typing import Any

from ray_dcp.core import bounds

_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)
"""An idle connection closes 25 s after the last sign of the other machine; and no device on the way
drops it before. While bytes are under way only `heartbeat_timeout_s` bounds the silence. *Why* no
`TCP_USER_TIMEOUT`: it would also close the connection to a process that is merely stopped, and has
much to read (measured)."""

_NONCE_BYTES = 32
_READ_BYTES = 1 << 20

CLOSED = (EOFError, OSError, asyncio.TimeoutError)
"""Errors of a connection that can't be made, or is closed."""

open_sockets: set[socket.socket] = set()
"""The open sockets of this process. *Why*: as long as a forked child has them, the end of its
parent closes none, and nobody detects it."""


def _close_in_child() -> None:
    for one in list(open_sockets):
        one.close()
    open_sockets.clear()


os.register_at_fork(after_in_child=_close_in_child)


class Channel:
    """An authenticated connection for numbered messages. Used in the event loop's thread.

    Args:
        sock: The connected socket.
        reader: Reads from it.
        writer: Writes to it.
    """

    def __init__(
        self, sock: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._sock, self._reader, self._writer = sock, reader, writer

    @classmethod
    async def begin(cls, sock: socket.socket, key: bytes, *, serves: bool) -> Channel:
        """Returns the channel over a connected socket; closes the socket if that fails.

        Args:
            sock: The socket.
            key: The key that both ends know.
            serves: Whether this end accepted the connection.

        Raises:
            PermissionError: The other end does not know the key.
            OSError: The connection is closed.
            TimeoutError: The other end does not answer.
        """
        open_sockets.add(sock)
        channel = None
        try:
            for option in _OPTIONS:
                sock.setsockopt(*option)
            channel = cls(sock, *await asyncio.open_connection(sock=sock, limit=_READ_BYTES))
            limit_s = min(bounds.SERVED_S, bounds.HANDSHAKE_S) if serves else bounds.HANDSHAKE_S
            await asyncio.wait_for(channel._authenticate(key, serves), limit_s)
        except BaseException:
            if channel is not None:
                channel.close()
            open_sockets.discard(sock)
            sock.close()
            raise
        return channel

    async def _authenticate(self, key: bytes, serves: bool) -> None:
        """Proves to the other end that this one knows the key, and checks the same."""
        own, roles = secrets.token_bytes(_NONCE_BYTES), (b"serves", b"calls")
        mine, theirs = roles if serves else reversed(roles)
        self._writer.write(own)
        other = await self._reader.readexactly(_NONCE_BYTES)
        if serves:
            # Why the caller first: a stranger gets no proof of the key.
            await self._check(key, theirs + own + other)
        self._writer.write(hmac.digest(key, mine + other + own, "sha256"))
        if not serves:
            await self._check(key, theirs + own + other)

    async def _check(self, key: bytes, signed: bytes) -> None:
        found = await self._reader.readexactly(32)
        if not hmac.compare_digest(found, hmac.digest(key, signed, "sha256")):
            raise PermissionError("the other end does not know the key of this session")

    def send(self, number: int, message: Any) -> None:
        """Begins to send a message; drops it if the connection is closed."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if not self._writer.is_closing():
            self._writer.write(number.to_bytes(8, "big") + len(data).to_bytes(8, "big"))
            self._writer.write(data)

    async def receive(self) -> tuple[int, bytes]:
        """Returns the next message: its number and its pickled content.

        Raises:
            EOFError: The connection is closed.
            OSError: The same.
        """
        head = await self._reader.readexactly(16)
        data = await self._reader.readexactly(int.from_bytes(head[8:], "big"))
        return int.from_bytes(head[:8], "big"), data

    def close(self) -> None:
        """Closes the connection, once what was sent has left."""
        self._writer.close()
        open_sockets.discard(self._sock)

    async def closed(self, timeout_s: float) -> None:
        """Closes the connection; returns when what was sent has left, or `timeout_s` has passed."""
        self.close()
        # Suppressed: the other end closed it first, or does not read.
        with suppress(*CLOSED):
            await asyncio.wait_for(self._writer.wait_closed(), timeout_s)
