"""`ObjectWriter`: uploads one file front to back; long ones in parts, several at a time.

A file that fits one request is put by one, created only if absent. A longer one is a multipart
upload that obstore makes in a thread of its own: it takes the pieces from here without copying
them, and aborts the upload when it is told that no more will come.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_dcp.errors import StorageError
from ray_dcp.store.object_options import ObjectOptions
from ray_dcp.store.object_stores import provider_of
from ray_dcp.store.paths import as_bytes_view
from ray_dcp.store.storage import KeyExistsError, KeyMissingError

__all__ = ["ObjectWriter", "UploadBudget"]

_Ask = Callable[[Callable[[], Any]], Any]

_PIECE_BYTES = 4 << 20
"""Pieces are handed over in this length, so that memory comes back soon after its part is sent."""
_MOST_PARTS = 10_000
"""S3's limit of parts in an upload."""


class UploadBudget:
    """Counts the bytes that uploads of a process refer to. For several threads.

    *Why a file has a share of its own*: a part is sent when it is full, and one that lacks a few
    bytes would otherwise wait for ever for room that other such parts take.

    Args:
        most_bytes: Of all files together.
        own_bytes: What a file may always have.
    """

    def __init__(self, most_bytes: int, own_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._own_bytes = own_bytes
        # Why reentrant: memory may be given back by the garbage collector, inside of any call.
        self._changed = threading.Condition(threading.RLock())
        self._bytes = 0
        self.highest_bytes = 0

    def take(self, own: _Own, num_bytes: int, until: Callable[[], bool]) -> None:
        """Waits until there is room for more bytes of a file, or until something else happened.

        Args:
            own: Counter of the file.
            num_bytes: How many more.
            until: Ends the wait.
        """
        with self._changed:
            while not (
                own.num_bytes + num_bytes <= self._own_bytes
                or self._bytes + num_bytes <= self._most_bytes
                or until()
            ):
                self._changed.wait()
            own.num_bytes += num_bytes
            self._bytes += num_bytes
            self.highest_bytes = max(self.highest_bytes, self._bytes)

    def give_back(self, own: _Own, num_bytes: int) -> None:
        """Takes that nothing refers to so many bytes of a file any more."""
        with self._changed:
            if not own.is_over:
                own.num_bytes -= num_bytes
                self._bytes -= num_bytes
                self._changed.notify_all()

    def forget(self, own: _Own) -> None:
        """Takes that a file was given up.

        Why: an error that its owner keeps may keep pieces of it for ever.
        """
        with self._changed:
            self._bytes -= own.num_bytes
            own.num_bytes, own.is_over = 0, True
            self._changed.notify_all()

    def wake(self) -> None:
        """Has everybody look again whether to go on waiting."""
        with self._changed:
            self._changed.notify_all()


class _Own:
    """How many bytes of one file uploads refer to."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_over = False


_LOCK = threading.Lock()
_BUDGETS: dict[tuple[int, int], UploadBudget] = {}


def budget_of(options: ObjectOptions) -> UploadBudget:
    """Returns the budget that all files with these options share in this process."""
    key = (options.upload_bytes, 2 * (options.request_bytes + _PIECE_BYTES))
    with _LOCK:
        return _BUDGETS.setdefault(key, UploadBudget(*key))


class ObjectWriter:
    """Implements `PartWriter`.

    Args:
        store: A store of obstore.
        path: Where in it.
        key: For messages.
        where: URL of the key, for messages.
        options: Length of parts, how many at a time, memory.
        create: Puts a path if there is none.
        look: Raises where nothing is at a path.
        ask: Calls the store and gives its errors their meaning.
        ask_once: As `ask`, but never calls twice.
    """

    def __init__(
        self,
        store: Any,
        path: str,
        key: str,
        where: str,
        options: ObjectOptions,
        *,
        create: Callable[[str, Any], None],
        look: Callable[[str], object],
        ask: _Ask,
        ask_once: _Ask,
    ) -> None:
        self._store = store
        self._create = create
        self._look = look
        self._path = path
        self._key = key
        self._where = where
        self._options = options
        self._ask = ask
        self._ask_once = ask_once
        self._budget = budget_of(options)
        self._own = _Own()
        self._state = "open"
        self._num_bytes = 0
        self._head: list[npt.NDArray[np.uint8]] = []
        self._upload: _Upload | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See `PartWriter.write`: copies, unless the bytes can't change."""
        self._add(data, copy=not isinstance(data, bytes))

    def commit(self) -> None:
        """See `PartWriter.commit`; does nothing when it was committed.

        A longer file than one request is looked for first; see `StorageTraits.exclusive_parts`.
        """
        if self._state == "committed":
            return
        self._check_open()
        try:
            if self._upload is None:
                self._put_whole()
            else:
                self._check_free()
                self._upload.finish()
        except BaseException:
            self.abort()
            raise
        self._state = "committed"
        self._drop()

    def abort(self) -> None:
        """See `PartWriter.abort`. Parts that were uploaded are removed by the store."""
        if self._state != "open":
            return
        self._state = "aborted"
        if self._upload is not None:
            self._upload.give_up()
        self._drop()
        self._budget.forget(self._own)

    def __del__(self) -> None:
        # Why: a writer dropped without commit must leave neither a thread nor an upload behind.
        if getattr(self, "_state", None) == "open" and hasattr(self, "_upload"):
            self.abort()

    def _add(self, data: bytes | bytearray | memoryview, *, copy: bool) -> None:
        self._check_open()
        view = as_bytes_view(data)
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            if self._num_bytes + len(piece) > self._options.request_bytes * _MOST_PARTS:
                raise StorageError(
                    f"could not write {self._where}: it gets longer than {_MOST_PARTS} parts of "
                    f"{self._options.request_bytes} bytes; raise the storage option "
                    f"request_bytes, or lower part_bytes",
                    key=self._key,
                )
            self._budget.take(self._own, len(piece), self._has_ended)
            self._hand_over(self._counted(piece, copy))
            self._num_bytes += len(piece)

    def _has_ended(self) -> bool:
        return self._upload is not None and self._upload.ended

    def _counted(self, piece: memoryview, copy: bool) -> npt.NDArray[np.uint8]:
        """Returns a piece as an array that gives its bytes back when nothing refers to it."""
        array = np.frombuffer(piece, np.uint8)
        if provider_of(self._store) is None:
            # Why: obstore's store in memory keeps what it is given.
            self._budget.give_back(self._own, len(piece))
            return array.copy()
        array = array.copy() if copy else array.view()
        weakref.finalize(array, self._budget.give_back, self._own, len(piece)).atexit = False
        return array

    def _hand_over(self, array: npt.NDArray[np.uint8]) -> None:
        if self._upload is None:
            self._head.append(array)
            if self._num_bytes + len(array) <= self._options.request_bytes:
                return
            self._upload = _Upload(self._store, self._path, self._options, self._ask_once)
            while self._head:
                self._upload.add(self._head.pop(0))
        else:
            self._upload.add(array)

    def _put_whole(self) -> None:
        body: Any = self._head or b""
        self._ask(lambda: self._create(self._path, body))

    def _check_free(self) -> None:
        try:
            self._ask(lambda: self._look(self._path))
        except KeyMissingError:
            return
        raise KeyExistsError(f"could not publish {self._where}: it exists already", key=self._key)

    def _check_open(self) -> None:
        if self._state != "open":
            raise StorageError(
                f"the writer of {self._where} was {self._state}; open another", key=self._key
            )

    def _drop(self) -> None:
        self._head.clear()
        self._upload = None


class _Upload:
    """A multipart upload in a thread of its own; pieces go in at one end."""

    def __init__(
        self,
        store: Any,
        path: str,
        options: ObjectOptions,
        ask: _Ask,
    ) -> None:
        self._pieces = _Pieces()
        self._error: BaseException | None = None
        self.ended = False
        self._budget = budget_of(options)
        self._thread = threading.Thread(
            target=self._run, args=(store, path, options, ask), daemon=True
        )
        self._thread.start()

    def add(self, piece: npt.NDArray[np.uint8]) -> None:
        """Appends a piece.

        Raises:
            StorageError: The upload has failed.
        """
        if self.ended:
            self._raise()
        self._pieces.add(piece)

    def finish(self) -> None:
        """Ends the file and waits until it is there.

        Raises:
            StorageError: The upload has failed.
        """
        self._pieces.end(None)
        self._thread.join()
        if self._error is not None:
            self._raise()

    def give_up(self) -> None:
        """Ends the upload without a file, and waits until its parts are removed."""
        self._pieces.end(_GivenUpError())
        self._thread.join()

    def _run(
        self,
        store: Any,
        path: str,
        options: ObjectOptions,
        ask: _Ask,
    ) -> None:
        import obstore

        pieces: Any = self._pieces

        # Careful: never again after an error, as the pieces are gone then and the file would be
        # shorter. obstore repeats the request of each part by itself.
        def put() -> None:
            obstore.put(
                store, path, pieces, use_multipart=True,
                chunk_size=options.request_bytes, max_concurrency=options.num_requests,
            )  # fmt: skip

        try:
            ask(put)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that writes
            self._error = error
        finally:
            self.ended = True
            self._pieces.drop()
            self._budget.wake()

    def _raise(self) -> None:
        error = self._error
        if isinstance(error, StorageError):
            # Why another: the same error may be raised in several calls, each with its traceback.
            raise type(error)(error.message, key=error.key) from error
        raise error or StorageError("the upload has ended")


class _GivenUpError(Exception):
    """Tells the thread of an upload that no more pieces come, and that there is to be no file."""


class _Pieces:
    """An iterator over pieces that come from another thread. Read once: it can't be repeated."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pieces: deque[npt.NDArray[np.uint8]] = deque()
        self._is_over = False
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[npt.NDArray[np.uint8]]:
        return self

    def __next__(self) -> npt.NDArray[np.uint8]:
        with self._changed:
            while not self._pieces and not self._is_over:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            if not self._pieces:
                raise StopIteration
            return self._pieces.popleft()

    def add(self, piece: npt.NDArray[np.uint8]) -> None:
        """Appends a piece."""
        with self._changed:
            self._pieces.append(piece)
            self._changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """Takes that there are no more; with an error, that the reader is to fail by it."""
        with self._changed:
            self._is_over = True
            self._error = error
            self._changed.notify_all()

    def drop(self) -> None:
        """Lets go of what was not read."""
        with self._changed:
            self._pieces.clear()
