"""Committers who race for one slot of a checkpoint, on any store that has conditions.

`python -m tests.races` has 16 of them race 50 times on every store, on a local S3 server too, which
takes minutes there: SeaweedFS has most of 16 wait for seconds.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
import uuid
from pathlib import Path

from ray_dcp.format.manifest import AbortRecord, encode_record
from ray_dcp.protocol.commands import CreateRecord, RecordCreated, SlotTaken
from ray_dcp.runtime.tasks import perform
from ray_dcp.store.location import Location
from ray_dcp.store.opening import as_target, open_storage
from ray_dcp.store.storage import Storage

COMMITTERS, ROUNDS = 16, 50


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


def places(directory: Path) -> dict[str, object]:
    """Returns where to race: every kind of store with conditions that needs no server."""
    import fsspec
    from obstore.store import LocalStore, MemoryStore

    from ray_dcp.store.location import url_below

    local = fsspec.filesystem("file")
    (directory / "obstore").mkdir()
    return {
        "local": lambda name: str(directory / "local" / name),
        "memory": lambda name: url_below(f"memory://races-{uuid.uuid4().hex}", name),
        "obstore in memory": _in(MemoryStore()),
        "obstore on a disk": _in(LocalStore(str(directory / "obstore"))),
        "fsspec, local": lambda name: Location(str(directory / "fsspec" / name), filesystem=local),
    }  # fmt: skip


def _in(store: object) -> object:
    return lambda name: Location(f"races/{name}", filesystem=store)


def race_often(place: object, num_committers: int, rounds: int) -> float:
    """Races again and again; returns seconds. Each time exactly one has to win."""
    begin_s = time.perf_counter()
    for number in range(rounds):
        storage = open_storage(place(f"{number}"))
        assert storage.traits.create_if_absent, storage
        won = race_for_a_slot(storage, num_committers)
        assert len(won) == 1, f"round {number}: {won}"
    return time.perf_counter() - begin_s


def main() -> None:
    """Prints a line for each store."""
    from ray_dcp.testing.dev_store import DevStore
    from tests.azurite import azurite

    directory = Path(tempfile.mkdtemp(prefix="races-"))
    data = f"/dev/shm/races-{uuid.uuid4().hex}"
    try:
        for name, place in places(directory).items():
            _tell(name, place)
        with azurite(directory):
            from tests.integration.test_azure_storage import make_container

            made = make_container()
            _tell("Azure (Azurite)", lambda name: made / name)
        with DevStore(data, volume_mb=64) as server:
            run = server.location / uuid.uuid4().hex
            _tell("S3 (SeaweedFS)", lambda name: run / name)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(data, ignore_errors=True)


def _tell(name: str, place: object) -> None:
    seconds = race_often(place, COMMITTERS, ROUNDS)
    print(
        f"  {name:20} {ROUNDS} races of {COMMITTERS}: one winner each, {seconds:.1f} s", flush=True
    )


if __name__ == "__main__":
    main()
