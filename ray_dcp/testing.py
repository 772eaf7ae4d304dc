"""`StorageConformance`: tests of every guarantee of the `Storage` protocol, for any storage.

Subclass it in a test module with a fixture `storage` that returns an empty storage::

    class TestMyStorage(StorageConformance):
        @pytest.fixture
        def storage(self, tmp_path):
            return MyStorage(tmp_path / "checkpoint")
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import pytest

from ray_dcp.errors import InvalidRequestError, StorageError
from ray_dcp.store.storage import (
    BytesLike,
    Entry,
    KeyExistsError,
    KeyMissingError,
    PartWriter,
    Storage,
    StorageTraits,
)

RACERS = 16
"""Number of threads in a race."""


def expect_winners(storage: Storage, won: list[int]) -> None:
    """Fails unless exactly one racer won, or several without `create_if_absent`."""
    enough = len(won) == 1 if storage.traits.create_if_absent else bool(won)
    expect(enough, f"{len(won)} of {RACERS} created one key")


def race(act: Callable[[int], None]) -> list[int]:
    """Runs `act(0)` … `act(15)` concurrently; returns those that did not raise `KeyExistsError`."""
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
    """Fails the test with a message unless a condition holds."""
    if not holds:
        pytest.fail(otherwise)


def expect_equal(found: object, expected: object) -> None:
    """Fails the test unless two values are equal; the message is truncated."""
    expect(found == expected, f"expected {expected!r}, found {found!r}"[:500])


def expect_keys(storage: Storage, expected: Iterable[str]) -> None:
    """Fails the test unless a storage lists exactly these keys."""
    expect_equal([entry.key for entry in storage.list()], list(expected))


_BAD_KEYS = (
    "", "/", "/etc/passwd", "..", "../outside", "a/../b", "a/..", ".", "./a", "a/./b", "a//b",
    "a/", "a\\b", "..\\outside", "a\0b", "a\nb",
)  # fmt: skip


class StorageConformance:
    """Tests that a storage fulfils the protocol of `ray_dcp.store.storage`."""

    RACES = 5
    """Number of races of 16 threads to create a key; lower it for a slow server."""

    @pytest.fixture
    def storage(self) -> Storage:
        """Returns an empty storage. Subclasses override it."""
        pytest.fail(f"{type(self).__name__} must define the fixture 'storage'")

    # protocol

    def test_it_is_a_storage_with_a_url_and_traits(self, storage: Storage) -> None:
        """All attributes of the protocol exist."""
        expect(isinstance(storage, Storage), "the Storage protocol is not fulfilled")
        expect(isinstance(storage.url, str) and bool(storage.url), "url is empty")
        expect(isinstance(storage.traits, StorageTraits), "traits are no StorageTraits")
        expect(isinstance(storage.open_writer("k"), PartWriter), "not a PartWriter")

    def test_an_untouched_storage_is_empty_also_after_its_traits_were_tried(
        self, storage: Storage
    ) -> None:
        """`traits` never change, and their trial leaves no keys."""
        expect_keys(storage, [])
        with pytest.raises(KeyMissingError):
            storage.read("a")
        first = storage.traits
        expect_equal(storage.traits, first)
        expect_keys(storage, [])
        storage.write("a", b"1")
        expect_equal(storage.traits, first)
        expect_keys(storage, ["a"])

    # write and read

    @pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000])
    def test_what_was_written_is_read(
        self, storage: Storage, data: bytes, wrap: Callable[[bytes], BytesLike]
    ) -> None:
        """`read` returns the bytes of `write`, also in subfolders and for any type of buffer."""
        for key in ("a", "x/y/z"):
            storage.write(key, wrap(data))
            expect_equal(storage.read(key), data)

    def test_write_replaces_a_value_and_consumes_its_bytes(self, storage: Storage) -> None:
        """Without `create`, the last write wins, even if it is shorter."""
        storage.write("a", b"a long value")
        source = bytearray(b"new")
        storage.write("a", source)
        source[:] = b"old"
        expect_equal(storage.read("a"), b"new")

    def test_create_refuses_a_taken_key_until_it_is_deleted(self, storage: Storage) -> None:
        """`create` never replaces a value."""
        storage.write("a", b"first", create=True)
        with pytest.raises(KeyExistsError):
            storage.write("a", b"second", create=True)
        expect_equal(storage.read("a"), b"first")
        expect_keys(storage, ["a"])
        storage.delete(["a"])
        storage.write("a", b"second", create=True)
        expect_equal(storage.read("a"), b"second")

    def test_a_create_race_has_exactly_one_winner(self, storage: Storage) -> None:
        """Of 16 threads that create a key, exactly one wins, and its bytes are stored.

        Without `create_if_absent`, several may win, and the bytes of one of them are stored.
        """
        for round_ in range(self.RACES):
            key = f"slot-{round_}"
            values = [bytes([number]) * 1000 for number in range(RACERS)]

            def create(number: int, key: str = key, values: Sequence[bytes] = values) -> None:
                storage.write(key, values[number], create=True)

            won = race(create)
            expect_winners(storage, won)
            expect(storage.read(key) in [values[number] for number in won], "no winner's bytes")

    def test_a_reader_never_sees_half_a_replacement(self, storage: Storage) -> None:
        """`write` is atomic: readers see the old bytes or the new bytes."""
        values = [bytes([number]) * 100_000 for number in range(8)]
        storage.write("a", values[0])
        stop = threading.Event()
        seen: set[bytes] = set()

        def watch() -> None:
            while not stop.is_set():
                seen.add(storage.read("a"))

        watcher = threading.Thread(target=watch)
        watcher.start()
        for value in values * 4:
            storage.write("a", value)
        stop.set()
        watcher.join()
        expect(seen <= set(values), "a reader saw a mixture of two values")

    # ranges

    def test_a_range_is_cut_at_the_end_of_the_value(self, storage: Storage) -> None:
        """`read` returns fewer bytes, or none, past the end."""
        data = b"0123456789"
        storage.write("a", data)
        for start, num_bytes in ((0, 0), (3, 4), (9, 1), (10, 0), (10, 5), (8, 100), (50, 1)):
            expect_equal(storage.read("a", start, num_bytes), data[start : start + num_bytes])
        for start in (4, 99):
            expect_equal(storage.read("a", start), data[start:])

    def test_read_into_fills_its_target(self, storage: Storage) -> None:
        """`read_into` fills its target and nothing beyond."""
        data = b"0123456789"
        storage.write("a", data)
        for start, num_bytes in ((0, 10), (3, 4), (9, 1), (10, 0), (0, 0)):
            room = bytearray(b"#" * (num_bytes + 2))
            storage.read_into("a", start, memoryview(room)[1 : 1 + num_bytes])
            expect_equal(bytes(room), b"#" + data[start : start + num_bytes] + b"#")

    def test_read_into_past_the_end_is_an_error(self, storage: Storage) -> None:
        """`read_into` never leaves a target partly filled without an error."""
        storage.write("a", b"0123456789")
        for start, num_bytes in ((0, 11), (10, 1), (9, 2), (500, 1)):
            with pytest.raises(StorageError) as caught:
                storage.read_into("a", start, memoryview(bytearray(num_bytes)))
            expect(not isinstance(caught.value, KeyMissingError), "the key is there")
            expect_equal(caught.value.key, "a")

    def test_read_into_sees_a_replaced_value(self, storage: Storage) -> None:
        """Caches between reads never return the bytes of a replaced value."""
        room = bytearray(3)
        for value in (b"old", b"new"):
            storage.write("a", value)
            storage.read_into("a", 0, memoryview(room))
            expect_equal(bytes(room), value)
        storage.delete(["a"])
        with pytest.raises(KeyMissingError):
            storage.read_into("a", 0, memoryview(room))

    @pytest.mark.parametrize(("start", "num_bytes"), [(-1, 1), (0, -1)])
    def test_a_negative_range_is_refused(
        self, storage: Storage, start: int, num_bytes: int
    ) -> None:
        """Negative starts and lengths are invalid requests."""
        storage.write("a", b"0123456789")
        with pytest.raises(InvalidRequestError):
            storage.read("a", start, num_bytes)

    def test_many_threads_may_read_one_key(self, storage: Storage) -> None:
        """`read_into` is thread-safe."""
        data = bytes(range(256)) * 4096
        storage.write("a", data)

        def check(number: int) -> None:
            room = bytearray(65_536)
            for start in range(number * 1000, len(data) - len(room), 100_003):
                storage.read_into("a", start, memoryview(room))
                expect(room == data[start : start + len(room)], f"wrong bytes from {start}")

        expect(len(race(check)) == RACERS, "some threads failed")

    # missing keys

    @pytest.mark.parametrize("key", ["missing", "x/missing", "x", "file/below"])
    def test_reading_a_missing_key_says_so(self, storage: Storage, key: str) -> None:
        """Neither folders nor paths below a value are keys."""
        storage.write("x/there", b"1")
        storage.write("file", b"1")
        with pytest.raises(KeyMissingError) as caught:
            storage.read(key)
        expect_equal(caught.value.key, key)
        with pytest.raises(KeyMissingError):
            storage.read_into(key, 0, memoryview(bytearray(1)))

    # key safety

    @pytest.mark.parametrize("key", _BAD_KEYS)
    def test_a_key_that_could_leave_the_root_is_refused(self, storage: Storage, key: str) -> None:
        """Every method refuses unsafe keys before it has any effect."""
        calls: list[Callable[[], object]] = [
            lambda: storage.read(key),
            lambda: storage.read_into(key, 0, memoryview(bytearray(1))),
            lambda: storage.write(key, b"1"),
            lambda: storage.write(key, b"1", create=True),
            lambda: storage.open_writer(key),
            lambda: storage.delete([key]),
        ]
        for call in calls:
            with pytest.raises(InvalidRequestError):
                call()
        expect_keys(storage, [])

    # list

    def test_list_gives_keys_and_sizes_sorted_at_any_depth(self, storage: Storage) -> None:
        """`list` returns all keys below the root."""
        for key in ("b", "a/2", "a/1", "a-", "a/x/y", "c"):
            storage.write(key, key.encode())
        expected = [Entry(key, len(key)) for key in ("a-", "a/1", "a/2", "a/x/y", "b", "c")]
        expect_equal(storage.list(), expected)

    def test_list_takes_any_prefix(self, storage: Storage) -> None:
        """A prefix is a prefix of the key's text, not a folder."""
        keys = ["a-", "a/1", "a/x/y", "ab", "b"]
        for key in reversed(keys):
            storage.write(key, b"1")
        for prefix in ("a", "a/", "a/x", "a/x/y", "b", "zz", "../"):
            found = [entry.key for entry in storage.list(prefix)]
            expect_equal(found, [key for key in keys if key.startswith(prefix)])

    # delete

    def test_delete_removes_keys_and_only_those(self, storage: Storage) -> None:
        """`delete` accepts any iterable and ignores missing keys; a folder is not a key."""
        for key in ("a", "x/b", "x/c", "d"):
            storage.write(key, b"1")
        for _ in range(2):
            storage.delete(key for key in ("a", "x/b", "x", "never", "no/where", "a/below"))
        storage.delete([])
        expect_keys(storage, ["d", "x/c"])

    def test_writers_and_deleters_of_one_folder_do_not_disturb_each_other(
        self, storage: Storage
    ) -> None:
        """A folder that disappears with its last key is created again with the next one."""

        def churn(number: int) -> None:
            for round_ in range(20):
                key = f"x/y/{number}-{round_}"
                storage.write(key, b"1", create=True)
                storage.delete([key])

        expect(len(race(churn)) == RACERS, "some threads failed")
        expect_keys(storage, [])

    # writers

    @pytest.mark.parametrize("sync", [True, False])
    @pytest.mark.parametrize("sizes", [(), (1,), (4096,), (5, 0, 7), (3, 300_000, 4093, 9_000_001)])
    def test_a_writer_joins_what_it_was_given(
        self, storage: Storage, sizes: tuple[int, ...], sync: bool
    ) -> None:
        """The committed value is the exact concatenation of all writes."""
        pieces = [bytes([65 + index]) * size for index, size in enumerate(sizes)]
        writer = storage.open_writer("x/part", sync=sync)
        for piece in pieces:
            writer.write(piece)
        writer.commit()
        expect(storage.read("x/part") == b"".join(pieces), "the committed bytes differ")
        expect_equal(storage.list(), [Entry("x/part", sum(sizes))])

    def test_a_writer_consumes_what_it_is_given(self, storage: Storage) -> None:
        """The caller may reuse its buffer after each write."""
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
        """Neither `read` nor `list` shows a file before its commit."""
        writer = storage.open_writer("part")
        writer.write(b"x" * 10_000_000)
        with pytest.raises(KeyMissingError):
            storage.read("part")
        expect_keys(storage, [])
        writer.commit()
        expect_keys(storage, ["part"])
        writer.abort()  # safe in a `finally`, and so is a second commit
        writer.commit()
        expect_keys(storage, ["part"])

    def test_an_aborted_writer_leaves_nothing(self, storage: Storage) -> None:
        """`abort` discards everything, may be called twice, and ends the writer."""
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

    @pytest.mark.parametrize("num_bytes", [6, 10_000_000])
    def test_commit_refuses_a_taken_key_and_keeps_its_value(
        self, storage: Storage, num_bytes: int
    ) -> None:
        """A key that was published meanwhile keeps its value."""
        writer = storage.open_writer("part")
        writer.write(b"x" * num_bytes)
        storage.write("part", b"first")
        with pytest.raises(KeyExistsError) as caught:
            writer.commit()
        expect_equal(caught.value.key, "part")
        writer.abort()
        expect_equal(storage.read("part"), b"first")
        expect_keys(storage, ["part"])

    def test_a_commit_race_has_exactly_one_winner(self, storage: Storage) -> None:
        """Of 16 writers of a key, exactly one publishes, and its bytes are stored.

        Without `create_if_absent`, several may publish, and the bytes of one of them are stored.
        """
        values = [bytes([number]) * 10_000 for number in range(RACERS)]
        writers = [storage.open_writer("part") for _ in values]
        for writer, value in zip(writers, values, strict=True):
            writer.write(value)
        won = race(lambda number: writers[number].commit())
        expect_winners(storage, won)
        expect(storage.read("part") in [values[number] for number in won], "no winner's bytes")
        expect_keys(storage, ["part"])
