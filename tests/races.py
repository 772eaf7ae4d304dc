"""Committers who race for one slot of a checkpoint, on any store that has conditions."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ray_dcp.commit_protocol.commands import CreateRecord, RecordCreated, SlotTaken
from ray_dcp.format.manifest import AbortRecord, encode_record
from ray_dcp.runtime.tasks import perform
from ray_dcp.store.opening import as_target, open_storage
from ray_dcp.store.storage import Storage


def race_for_a_slot(storage: Storage, num_committers: int) -> list[int]:
    """Has committers create a record in one slot; returns who is told that it won.

    All others have to be told who stands there.
    """
    target = as_target("memory://the-storage-is-given")
    barrier = threading.Barrier(num_committers)
    results: dict[int, object] = {}

    def commit(number: int) -> None:
        record = encode_record(AbortRecord(attempt=f"{number:016x}", reason="race", rank=None))
        barrier.wait()
        results[number] = perform(CreateRecord(target, 1, record), lambda _: storage)

    threads = [threading.Thread(target=commit, args=(n,)) for n in range(num_committers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {type(result) for result in results.values()} <= {RecordCreated, SlotTaken}, results
    won = [n for n, result in results.items() if isinstance(result, RecordCreated)]
    taken = {r.attempt for r in results.values() if isinstance(r, SlotTaken)}
    assert taken == {f"{n:016x}" for n in won}
    return won


def race_often(place: Callable[[str], object], num_committers: int, rounds: int) -> None:
    """Races again and again. Each time exactly one has to win."""
    for number in range(rounds):
        storage = open_storage(place(f"{number}"))
        assert storage.traits.create_if_absent, storage
        won = race_for_a_slot(storage, num_committers)
        assert len(won) == 1, f"round {number}: {won}"
