"""A proxy between a client and an S3 server on this machine that does what bad networks do.

As a program it saves and loads through such a network for as long as one likes, and tells what
became of that: `python -m tests.support.servers.wire_proxy --rounds 100 --share 0.2`.
"""

from __future__ import annotations

import argparse
import http.client
import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import ray_dcp
from ray_dcp.errors import (
    CheckpointNotFoundError,
    CommitUnknownError,
    DamagedCheckpointError,
    SaveCancelledError,
    StorageError,
)
from ray_dcp.store.location import Location
from ray_dcp.store.object_storage import ObjectStorage
from ray_dcp.store.opening import open_storage
from tests.support.servers.proxies import HttpProxy, ProxyHandler
from tests.support.servers.s3 import DevStore, fresh_place, port_of, server_on_memory_disk, through

FAULTS = (
    "drop", "lost", "swallow", "stall", "truncate", "shorten", "flip", "flip-request", "stale",
    "503", "503-done", "429", "429-done",
)  # fmt: skip
"""`drop`: the connection is closed before the server is asked; `lost`: after that, without an
answer. `swallow`: there is never an answer. `stall`: in the midst of a body nothing more comes.
`truncate`: the connection is closed there. `shorten`: half of the body is told to be all of it.
`flip`: a bit of what is answered differs; `flip-request`: of what is sent. `stale`: a listing is
the one before. The others are statuses, in place of what the server does or after it (`-done`)."""


class WireProxy(HttpProxy):
    """Passes requests on to a server on this machine, some of them badly.

    Args:
        port: Of the server.
        seed: Of what happens.

    Attributes:
        share: Which part of the requests goes wrong.
        faults: Of which kinds.
        hits: How often each kind happened.
    """

    def __init__(self, port: int, seed: int = 0) -> None:
        self.share = 0.0
        self.faults: Sequence[str] = FAULTS
        self.hits: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._listings: dict[str, list[bytes]] = {}
        self._next = ""
        self._over = threading.Event()
        proxy = self

        class Handler(ProxyHandler):
            def pass_on(self) -> None:
                body = self.body()
                is_listing = self.command == "GET" and "list-type=2" in self.path
                fault = proxy._fault(self.command, is_listing, bool(body))
                if fault == "drop":
                    return self.cut()
                if fault == "swallow":
                    proxy._over.wait(60)
                    return self.cut()
                if fault in ("503", "429"):
                    return self.refuse(int(fault), "SlowDown")
                if fault == "flip-request":
                    body = proxy._flipped(body)
                status, headers, data = self._ask(body)
                if fault == "lost":
                    return self.cut()
                if fault in ("503-done", "429-done"):
                    return self.refuse(int(fault[:3]), "SlowDown")
                if is_listing and status == 200:
                    data = proxy._listing(self.path, data, stale=fault == "stale")
                length = len(data)
                if fault == "flip":
                    data = proxy._flipped(data)
                if fault == "shorten":
                    data, length = data[: length // 2], length // 2
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                is_head = self.command == "HEAD"
                told = next((v for n, v in headers if n.lower() == "content-length"), None)
                self.send_header("content-length", told if is_head and told else str(length))
                self.end_headers()
                if fault in ("stall", "truncate"):
                    self.wfile.write(data[: len(data) // 2])
                    if fault == "stall":
                        proxy._over.wait(60)
                    return self.cut()
                if not is_head:
                    self.wfile.write(data)
                return None

            def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
                with closing(http.client.HTTPConnection("127.0.0.1", port)) as server:
                    answer = self.ask(server, body)
                    return answer.status, answer.getheaders(), answer.read()

        super().__init__(Handler)

    def next_fault(self, fault: str) -> None:
        """Has this happen to the next request, and to no other."""
        with self._lock:
            self._next = fault

    def close(self) -> None:
        """Takes no more connections, and lets go of those that stall."""
        self._over.set()
        super().close()

    def _fault(self, method: str, is_listing: bool, has_body: bool) -> str:
        with self._lock:
            if self._next:
                fault, self._next = self._next, ""
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


RETRY_S, REQUEST_S, SLACK_S = 4, 1, 3.0
"""Bounds of a call of the storage: how long it is tried again, how long a request may take, and
what a quiet machine needs beyond both."""
LOADED = 100
"""How many times a request without faults a machine under load may need beyond them."""


ALLOWED = (
    StorageError, DamagedCheckpointError, CommitUnknownError, CheckpointNotFoundError,
    SaveCancelledError,
)  # fmt: skip
"""What a network may do to a save or a load."""


@dataclass
class Played:
    """What became of saves and loads."""

    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    """Of the calls of a storage."""
    plain_s: float = 0.0
    """How long the slowest call without faults took."""


@contextmanager
def timed_calls(played: Played) -> Iterator[None]:
    """Takes down how long calls of object storages last, but for uploads, whose parts repeat."""
    inner = ObjectStorage._asked

    def asked(self: ObjectStorage, doing: str, key: str, act: Any, **more: Any) -> Any:
        began_s = time.monotonic()
        try:
            return inner(self, doing, key, act, **more)
        finally:
            took_s = time.monotonic() - began_s
            if more.get("repeat", True):
                played.longest_s = max(played.longest_s, took_s)
            slack_s = max(SLACK_S, LOADED * played.plain_s)
            if more.get("repeat", True) and took_s > RETRY_S + REQUEST_S + slack_s:
                played.violations.append(f"{doing} of {key!r} took {took_s:.1f} s")

    ObjectStorage._asked = asked  # type: ignore[method-assign]
    try:
        yield
    finally:
        ObjectStorage._asked = inner  # type: ignore[method-assign]


def state_of(number: int) -> dict[str, Any]:
    """Returns a state of which every byte depends on a number."""
    generator = torch.Generator().manual_seed(number)
    tensors = {f"w{i}": torch.randn(50, 40, generator=generator) for i in range(3)}
    return {**tensors, "long": torch.randn(400, 500, generator=generator), "step": number}


def is_state(found: dict[str, Any], number: int) -> bool:
    """Whether a state is that of a number."""
    expected = state_of(number)
    return found["step"] == number and all(
        torch.equal(found[name], value)
        for name, value in expected.items()
        if isinstance(value, torch.Tensor)
    )


class Play:
    """Saves and loads through a bad network, and judges each of them.

    A save that returns has saved; what it reports as failed does not appear; a load that returns
    has what was saved last, bit for bit; no call of the storage lasts longer than it says.

    Args:
        server: What is behind the network.
        seed: Of what happens.
        share: Which part of the requests goes wrong.
        faults: Of which kinds.
    """

    def __init__(
        self, server: DevStore, seed: int, share: float, faults: Sequence[str] = FAULTS
    ) -> None:
        self.played = Played()
        self._proxy = WireProxy(port_of(server), seed)
        self._proxy.faults = faults
        self._share = share
        self._place = fresh_place(server)
        self._may_stand: dict[str, set[int]] = {}
        """Numbers of the states that may be in a folder; 0 for none."""

    def rounds(self, num_rounds: int) -> Played:
        """Saves and loads so many times, every second time over what is there."""
        # Why before: what a bucket can do is tried once in a process.
        ray_dcp.save(state_of(0), checkpoint_id=self._place / "first", no_dist=True)
        with closing(self._proxy), timed_calls(self.played), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in range(1, num_rounds + 1):
                self._round(number, f"step-{number // 2}")
        self.played.outcomes += Counter({f"({k})": n for k, n in self._proxy.hits.items()})
        return self.played

    def _round(self, number: int, name: str) -> None:
        clean = self._place / name
        there = through(self._proxy, clean, retry_timeout_s=RETRY_S, timeout=f"{REQUEST_S}s")
        before = self._may_stand.setdefault(name, {0})
        began_s = time.monotonic()
        open_storage(there).list()
        self.played.plain_s = max(self.played.plain_s, time.monotonic() - began_s)
        self._proxy.share = self._share
        error = self._tried("save", number, lambda: ray_dcp.save(
            state_of(number), checkpoint_id=there, no_dist=True
        ))  # fmt: skip
        if error is None:
            self._may_stand[name] = {number}
        elif isinstance(error, CommitUnknownError):
            before.add(number)
        self._load("load", number, name, there)
        self._proxy.share = 0.0
        error = self._load("clean load", number, name, clean)
        nothing = isinstance(error, CheckpointNotFoundError) and 0 in self._may_stand[name]
        if error is not None and not nothing:
            self._violated("clean load", number, error)

    def _load(self, what: str, number: int, name: str, place: Location) -> BaseException | None:
        found: dict[str, Any] = {k: v * 0 for k, v in state_of(number).items()}
        error = self._tried(
            what, number, lambda: ray_dcp.load(found, checkpoint_id=place, no_dist=True)
        )
        if error is None and not any(is_state(found, one) for one in self._may_stand[name] - {0}):
            self._violated(what, number, f"loaded {found['step']} of {self._may_stand[name]}")
        return error

    def _tried(self, what: str, number: int, act: Callable[[], object]) -> BaseException | None:
        try:
            act()
        except Exception as error:
            self.played.outcomes[f"{what}: {type(error).__name__}"] += 1
            # Why the last: a listing from before a commit hides it, and the vote finds it then.
            if not isinstance(error, ALLOWED) and "Expected slot" not in str(error):
                self._violated(what, number, error)
            return error
        self.played.outcomes[f"{what}: ok"] += 1
        return None

    def _violated(self, what: str, number: int, why: object) -> None:
        self.played.violations.append(f"{what} {number}: {type(why).__name__}: {why}")


def main() -> None:
    """Plays as long as it is told to, and exits with 1 after a violation."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=100)
    options.add_argument("--share", type=float, default=0.2)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--faults", default=",".join(FAULTS))
    given = options.parse_args()
    servers = server_on_memory_disk()
    play = Play(next(servers), given.seed, given.share, given.faults.split(","))
    played = play.rounds(given.rounds)
    servers.close()
    for what, count in sorted(played.outcomes.items()):
        print(f"{count:6} {what}")
    print(f"longest call of the storage: {played.longest_s:.1f} s")
    print(*played.violations, sep="\n")
    sys.exit(bool(played.violations))


if __name__ == "__main__":
    main()
