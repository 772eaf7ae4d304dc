"""`PartWriterConformance`: every promise of the `PartWriter` protocol as a test.

A part of `storage_conformance.StorageConformance`, which is the one to subclass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import pytest

from ray_dcp.errors import StorageError
from ray_dcp.store.storage import Entry, KeyExistsError, KeyMissingError, Storage

__all__ = [
    "RACERS",
    "PartWriterConformance",
    "expect",
    "expect_equal",
    "expect_keys",
    "expect_winners",
    "race",
]

RACERS = 16
"""Threads in a race."""


class PartWriterConformance:
    """Tests that a storage's writers keep what `ray_dcp.store.storage.PartWriter` promises."""

    @pytest.fixture
    def storage(self) -> Storage:
        """Gives an empty storage; to be overridden."""
        pytest.fail(f"{type(self).__name__} must define the fixture 'storage'")

    @pytest.mark.parametrize("sync", [True, False])
    @pytest.mark.parametrize("sizes", [(), (1,), (4096,), (5, 0, 7), (3, 300_000, 4093, 9_000_001)])
    def test_a_writer_joins_what_it_was_given(
        self, storage: Storage, sizes: tuple[int, ...], sync: bool
    ) -> None:
        """The committed value is all writes in order, of exactly their length."""
        pieces = [bytes([65 + index]) * size for index, size in enumerate(sizes)]
        writer = storage.open_writer("x/part", sync=sync)
        for piece in pieces:
            writer.write(piece)
        writer.commit()
        expect(storage.read("x/part") == b"".join(pieces), "the committed bytes differ")
        expect_equal(storage.list(), [Entry("x/part", sum(sizes))])

    def test_a_writer_consumes_what_it_is_given(self, storage: Storage) -> None:
        """Memory may be reused after each write."""
        room = bytearray(1_000_000)
        writer = storage.open_writer("part")
        for number in (1, 2, 3):
            room[:] = bytes([number]) * len(room)
            writer.write(memoryview(room))
        room[:] = bytes(len(room))
        writer.commit()
        expected = b"".join(bytes([number]) * len(room) for number in (1, 2, 3))
        expect(storage.read("part") == expected, "a write kept only a reference")

    def test_nothing_is_visible_before_commit(self, storage: Storage) -> None:
        """Neither by `read` nor by `list`."""
        writer = storage.open_writer("part")
        writer.write(b"x" * 10_000_000)
        with pytest.raises(KeyMissingError):
            storage.read("part")
        expect_keys(storage, [])
        writer.commit()
        expect_keys(storage, ["part"])

    def test_an_aborted_writer_leaves_nothing(self, storage: Storage) -> None:
        """`abort` drops everything, may come twice, and ends the writer."""
        writer = storage.open_writer("part")
        writer.write(b"x" * 10_000_000)
        writer.abort()
        writer.abort()
        expect_keys(storage, [])
        with pytest.raises(StorageError):
            writer.write(b"y")
        with pytest.raises(StorageError):
            writer.commit()
        expect_keys(storage, [])

    def test_abort_after_commit_changes_nothing(self, storage: Storage) -> None:
        """`abort` in a `finally` is safe, and so is a second commit."""
        writer = storage.open_writer("part")
        writer.write(b"data")
        writer.commit()
        writer.abort()
        writer.commit()
        expect_equal(storage.read("part"), b"data")

    def test_commit_refuses_a_taken_key_and_keeps_its_value(self, storage: Storage) -> None:
        """A key that was published meanwhile stays as it is."""
        writer = storage.open_writer("part")
        writer.write(b"second")
        storage.write("part", b"first")
        with pytest.raises(KeyExistsError) as caught:
            writer.commit()
        expect_equal(caught.value.key, "part")
        writer.abort()
        expect_equal(storage.read("part"), b"first")
        expect_keys(storage, ["part"])

    def test_a_commit_race_has_exactly_one_winner(self, storage: Storage) -> None:
        """Of 16 writers of one key, one publishes, and its bytes are there.

        Several may where `traits` does not promise `create_if_absent`; one's bytes are there.
        """
        values = [bytes([number]) * 10_000 for number in range(RACERS)]
        writers = [storage.open_writer("part") for _ in values]
        for writer, value in zip(writers, values, strict=True):
            writer.write(value)
        won = race(lambda number: writers[number].commit())
        expect_winners(storage, won)
        expect(storage.read("part") in [values[number] for number in won], "no winner's bytes")
        expect_keys(storage, ["part"])


def expect_winners(storage: Storage, won: list[int]) -> None:
    """Fails unless one of `race` won; or some, if the storage promises no more."""
    enough = len(won) == 1 if storage.traits.create_if_absent else bool(won)
    expect(enough, f"{len(won)} of {RACERS} created one key")


def race(act: Callable[[int], None]) -> list[int]:
    """Runs `act(0)` … `act(15)` at once; returns which did not meet `KeyExistsError`."""
    barrier = threading.Barrier(RACERS)
    won: list[int] = []
    failed: list[BaseException] = []

    def run(number: int) -> None:
        barrier.wait()
        try:
            act(number)
            won.append(number)
        except KeyExistsError:
            pass
        except BaseException as exc:  # noqa: BLE001 - raised in the test's own thread
            failed.append(exc)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return won


def expect(holds: bool, otherwise: str) -> None:
    """Fails the test with a message unless something holds."""
    if not holds:
        pytest.fail(otherwise)


def expect_equal(found: object, expected: object) -> None:
    """Fails the test unless two values are equal; long ones are told in part."""
    expect(found == expected, f"expected {expected!r}, found {found!r}"[:500])


def expect_keys(storage: Storage, expected: Iterable[str]) -> None:
    """Fails the test unless a storage lists exactly these keys."""
    expect_equal([entry.key for entry in storage.list()], list(expected))
