"""Saves and loads through a network that drops, stalls, cuts, repeats and alters what passes."""

from __future__ import annotations

import pytest

from ray_dcp.errors import StorageError
from ray_dcp.store.opening import open_storage
from tests.support.servers.s3 import proxy_before, through
from tests.support.servers.wire_proxy import FAULTS, RETRY_S, Play, WireProxy

QUICK = tuple(fault for fault in FAULTS if fault not in ("swallow", "stall"))


@pytest.mark.parametrize(
    ("share", "faults", "rounds"), [(0.1, FAULTS, 5), (0.4, QUICK, 8)], ids=["bad", "worse"]
)
def test_no_save_is_lost_or_invented_and_no_load_is_wrong(server, share, faults, rounds):
    """For longer: `python -m tests.support.servers.wire_proxy`."""
    played = Play(server, 7, share, faults).rounds(rounds)
    assert played.violations == []
    assert played.outcomes["save: ok"] > 0
    assert played.outcomes["load: ok"] > 0
    assert sum(count for what, count in played.outcomes.items() if what[0] == "(") > 0


@pytest.fixture
def proxy(server):
    yield from proxy_before(server, WireProxy)


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
