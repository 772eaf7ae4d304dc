"""Saves and loads through a network that drops, stalls, cuts, repeats and alters what passes."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest
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
from ray_dcp.store.opening import open_storage
from tests.support.servers.proxy import FAULTS, BadProxy
from tests.support.servers.s3 import DevStore, fresh_place, port_of, proxy_before, through

RETRY_S, REQUEST_S = 4, 1
"""How long a call of the storage is tried again, and how long a request may take."""


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
    has what was saved last, bit for bit.

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
        self._proxy = BadProxy(port_of(server), seed)
        self._proxy.faults = faults
        self._share = share
        self._place = fresh_place(server)
        self._may_stand: dict[str, set[int]] = {}
        """Numbers of the states that may be in a folder; 0 for none."""

    def rounds(self, num_rounds: int) -> Played:
        """Saves and loads so many times, every second time over what is there."""
        # Why before: what a bucket can do is tried once in a process.
        ray_dcp.save(state_of(0), checkpoint_id=self._place / "first", no_dist=True)
        with closing(self._proxy), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in range(1, num_rounds + 1):
                self._round(number, f"step-{number // 2}")
        self.played.outcomes += Counter({f"({k})": n for k, n in self._proxy.hits.items()})
        return self.played

    def _round(self, number: int, name: str) -> None:
        clean = self._place / name
        there = through(self._proxy, clean, retry_timeout_s=RETRY_S, timeout=f"{REQUEST_S}s")
        before = self._may_stand.setdefault(name, {0})
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


ROUNDS = (20, 20) if os.environ.get("RAY_DCP_THOROUGH") else (5, 8)
QUICK = tuple(fault for fault in FAULTS if fault not in ("swallow", "stall"))


@pytest.mark.parametrize(
    ("share", "faults", "rounds"),
    [(0.1, FAULTS, ROUNDS[0]), (0.4, QUICK, ROUNDS[1])],
    ids=["bad", "worse"],
)
def test_no_save_is_lost_or_invented_and_no_load_is_wrong(server, share, faults, rounds):
    played = Play(server, 7, share, faults).rounds(rounds)
    assert played.violations == []
    assert played.outcomes["save: ok"] > 0
    assert played.outcomes["load: ok"] > 0
    assert sum(count for what, count in played.outcomes.items() if what[0] == "(") > 0


@pytest.fixture
def proxy(server):
    yield from proxy_before(server)


@pytest.fixture
def far(place, proxy):
    """The same place, through the network."""
    clean = open_storage(place)
    clean.write("a", bytes(range(256)) * 40)
    clean.write("b/c", b"1")
    return open_storage(through(proxy, place, retry_timeout_s=RETRY_S))


@pytest.mark.parametrize("fault", ["truncate", "shorten", "drop", "lost", "503", "429-done"])
def test_one_bad_answer_is_asked_for_again(far, proxy, fault):
    for act, expected in (
        (lambda: [entry.key for entry in far.list()], ["a", "b/c"]),
        (lambda: far.read("a", 256, 1000), (bytes(range(256)) * 5)[:1000]),
        (lambda: filled(far, 512, 5120), bytes(range(256)) * 20),
    ):
        proxy.next_fault(fault)
        assert act() == expected
    assert proxy.hits[fault] == 3


def filled(storage, start, num_bytes):
    target = bytearray(num_bytes)
    storage.read_into("a", start, memoryview(target))
    return bytes(target)


def test_answers_that_never_make_sense_are_told_with_what_to_check(far, proxy):
    proxy.share, proxy.faults = 1.0, ("shorten",)
    with pytest.raises(StorageError, match=r"retried \d+ times.*check the endpoint"):
        far.list()
