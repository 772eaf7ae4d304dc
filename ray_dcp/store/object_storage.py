"""`ObjectStorage`: keys to bytes in a bucket of S3, GCS or Azure, by obstore.

**Uploads** (`ObjectWriter`). A file that fits one request is put by one, created only if absent. A
longer one is a multipart upload, several parts at a time, that obstore makes in a thread of its
own: it takes the pieces from here without copying them, and aborts the upload when it learns that
no more will come.

**Errors** (`object_failure`). Errors of obstore become `StorageError`s that say which call on which
key failed. A message never shows signatures or tokens, which URLs may carry.
"""

from __future__ import annotations

import builtins
import math
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ray_dcp.core.processes import ProcessLock, start_thread
from ray_dcp.errors import InvalidRequestError, StorageError, StorageRefusedError
from ray_dcp.store.create_probe import creates_if_absent_in
from ray_dcp.store.location import split_url
from ray_dcp.store.object_stores import (
    ObjectOptions,
    base_url,
    client_of,
    forget_store,
    make_store,
    name_of_store,
    provider_of,
)
from ray_dcp.store.retry import Retrying
from ray_dcp.store.storage import (
    MEMORY,
    OBJECT_STORE,
    BytesLike,
    Entry,
    KeyExistsError,
    KeyMissingError,
    OnceWriter,
    PartWriter,
    ReadTraits,
    StorageTraits,
    as_bytes_view,
    check_key,
    check_range,
    is_temporary,
)

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


_LOCK = ProcessLock()
# Why cleared in a child: the uploads that would give bytes back are not there.
_BUDGETS: dict[tuple[int, int], UploadBudget] = {}
os.register_at_fork(after_in_child=_BUDGETS.clear)


def budget_of(options: ObjectOptions) -> UploadBudget:
    """Returns the budget that all files with these options share in this process."""
    key = (options.upload_bytes, 2 * (options.request_bytes + _PIECE_BYTES))
    with _LOCK:
        return _BUDGETS.setdefault(key, UploadBudget(*key))


class ObjectWriter(OnceWriter):
    """Implements `PartWriter`; what can't change is not copied.

    Args:
        storage: Where to.
        key: The key.
    """

    def __init__(self, storage: ObjectStorage, key: str) -> None:
        self._storage = storage
        self._request_bytes = storage._options.request_bytes
        self._budget = budget_of(storage._options)
        self._own = _Own()
        self._num_bytes = 0
        self._head: list[npt.NDArray[np.uint8]] = []
        self._upload: _Upload | None = None
        super().__init__(storage._where(key), key)

    def _publish(self) -> None:
        """Puts the file, or ends its upload.

        A longer file than one request is looked for first; see `StorageTraits.create_if_absent`.
        """
        if self._upload is None:
            self._storage._create(self._key, self._head or b"", "publish")
        else:
            self._check_free()
            self._upload.finish()
        self._drop()

    def _discard(self) -> None:
        # The store removes the parts that were uploaded.
        if self._upload is not None:
            self._upload.give_up()
        self._drop()
        self._budget.forget(self._own)

    def _append(self, data: BytesLike) -> None:
        view = as_bytes_view(data)
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            if self._num_bytes + len(piece) > self._request_bytes * _MOST_PARTS:
                raise StorageError(
                    f"could not write {self._where}: it gets longer than {_MOST_PARTS} parts of "
                    f"{self._request_bytes} bytes; raise the storage option "
                    f"request_bytes, or lower part_bytes",
                    key=self._key,
                )
            self._budget.take(self._own, len(piece), self._has_ended)
            self._hand_over(self._counted(piece, copy=not isinstance(data, bytes)))
            self._num_bytes += len(piece)

    def _has_ended(self) -> bool:
        return self._upload is not None and self._upload.ended

    def _counted(self, piece: memoryview, copy: bool) -> npt.NDArray[np.uint8]:
        """Returns a piece as an array that gives its bytes back when nothing refers to it."""
        array = np.frombuffer(piece, np.uint8)
        if provider_of(self._storage._store) is None:
            # Why: obstore's store in memory keeps what it is given.
            self._budget.give_back(self._own, len(piece))
            return array.copy()
        array = array.copy() if copy else array.view()
        weakref.finalize(array, self._budget.give_back, self._own, len(piece)).atexit = False
        return array

    def _hand_over(self, array: npt.NDArray[np.uint8]) -> None:
        if self._upload is None:
            self._head.append(array)
            if self._num_bytes + len(array) <= self._request_bytes:
                return
            # Careful: not a method of this writer, which is aborted when nobody refers to it.
            put = partial(self._storage._put_parts, self._key)
            self._upload = _Upload(put, self._budget)
            while self._head:
                self._upload.add(self._head.pop(0))
        else:
            self._upload.add(array)

    def _check_free(self) -> None:
        try:
            self._storage._size(self._key, "publish")
        except KeyMissingError:
            return
        raise KeyExistsError(f"could not publish {self._where}: it exists already", key=self._key)

    def _drop(self) -> None:
        self._head.clear()
        self._upload = None


class _Upload:
    """A multipart upload in a thread of its own; pieces go in at one end.

    Args:
        put: Uploads the pieces of an iterator.
        budget: Of which the pieces are; those who wait for room look again at the end.
    """

    def __init__(self, put: Callable[[_Pieces], object], budget: UploadBudget) -> None:
        self._pieces = _Pieces()
        self._error: BaseException | None = None
        self.ended = False
        self._thread = start_thread(partial(self._run, put, budget), "ray_dcp upload")

    def add(self, piece: npt.NDArray[np.uint8]) -> None:
        """Appends a piece.

        Raises:
            StorageError: The upload has failed.
        """
        if self.ended:
            self._raise()
        self._pieces.put(piece)

    def finish(self) -> None:
        """Ends the file and waits until it is there.

        Raises:
            StorageError: The upload has failed.
        """
        self._pieces.put(StopIteration())
        self._thread.join()
        if self._error is not None:
            self._raise()

    def give_up(self) -> None:
        """Ends the upload without a file, and waits until its parts are removed."""
        self._pieces.drop()
        self._pieces.put(_GivenUpError())
        self._thread.join()

    def _run(self, put: Callable[[_Pieces], object], budget: UploadBudget) -> None:
        try:
            put(self._pieces)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that writes
            self._error = error
        finally:
            self.ended = True
            self._pieces.drop()
            budget.wake()

    def _raise(self) -> None:
        error = self._error
        if isinstance(error, StorageError):
            # Why another: the same error may be raised in several calls, each with its traceback.
            raise type(error)(error.message, key=error.key) from error
        raise error or StorageError("the upload has ended")


class _GivenUpError(Exception):
    """Tells the thread of an upload that no more pieces come, and that there is to be no file."""


class _Pieces(SimpleQueue["npt.NDArray[np.uint8] | Exception"]):
    """An iterator over pieces that come from another thread, up to an exception. Read once."""

    def __iter__(self) -> Iterator[npt.NDArray[np.uint8]]:
        return self

    def __next__(self) -> npt.NDArray[np.uint8]:
        piece = self.get()
        if isinstance(piece, Exception):
            self.put(piece)  # for whoever asks again
            raise piece
        return piece

    def drop(self) -> None:
        """Lets go of what was not read."""
        with suppress(Empty):
            while True:
                self.get_nowait()


_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_TEXT = re.compile(r"<Message>([^<]*)</Message>")
_RETRIES = re.compile(r"(?:after|retried) (\d+) (?:retries|times)")
_QUERY = re.compile(r"\?[^\s)]*")
_OF_CREDENTIALS = ("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired")
_MOST_CHARS = 400
_WHOLE = "non-partial response"
"""What obstore says of a server that answers 200 to a range, as rclone's does."""

_WAY_OUT = {
    "NoSuchBucket": "create the bucket, or correct its name",
    "ContainerNotFound": "create the container, or correct its name",
    "ExpiredToken": "the token has expired: give a credential_provider that renews it",
    "RequestTimeTooSkewed": "set this machine's clock",
    "SignatureDoesNotMatch": "check the secret key in storage_options or the environment",
    "InvalidAccessKeyId": "check the access key in storage_options or the environment",
    "AccessDenied": "give these credentials the right to do that, or choose another place",
    "SlowDown": "the store throttles: lower num_threads or num_requests, or retry later",
    "BadDigest": "the network altered what was sent: use https, and check network and memory",
    "QuotaExceeded": "free space there, or save elsewhere",
    "StorageFull": "free space there, or save elsewhere",
}
_BY_STATUS = {
    "401": "check the credentials in storage_options or the environment",
    "403": "check the credentials in storage_options or the environment, and their rights",
    "404": "check the name of the bucket or container",
    "429": "the store throttles: lower num_threads or num_requests, or retry later",
    "500": "the store failed; retry later",
    "503": "the store is busy or down; retry later",
    "507": "free space there, or save elsewhere",
}
_CUT = (
    "error sending request", "error decoding response body", "error reading a body",
    "connection closed", "connection reset", "incomplete message", "timed out", "TimedOut",
    "IncompleteMessage", "ConnectionReset", "error trying to connect", "Connection refused",
    "Wrong size", "operation timed out", "response body error", "kind: Interrupted",
)  # fmt: skip


_CONNECT_S = 10.0
"""How long a refused connection, an unknown host or an answer that can't be read is tried again:
nobody is there, or somebody else."""
_PASSING_CODES = (
    "RequestTimeout", "OperationAborted", "ConditionalRequestConflict", "SlowDown",
    "BadDigest", "XAmzContentSHA256Mismatch",
)  # fmt: skip
"""The last two: the body was altered on its way."""
_PASSING = ("408", "429", "500", "502", "503", "504")


_INVALID = "Got invalid"
"""What obstore says of an answer that was cut off or altered, or of a server that is none of S3."""


class ConflictError(Exception):
    """A key could not be created, and yet there is none: another request was in the way."""


class AlteredError(Exception):
    """An answer contradicts itself: it was cut off or altered on its way."""


def is_past_the_end(error: BaseException) -> bool:
    """Tells whether the store refused a range because the value is too short for it."""
    text = str(error)
    return "416" in _STATUS.findall(text) or "InvalidRange" in text or "range starting at" in text


def is_about_credentials(error: BaseException) -> bool:
    """Tells whether the store refused the credentials, which may be others by now."""
    text = str(error)
    return _first(_STATUS, text) in ("401", "403") or _first(_CODE, text) in _OF_CREDENTIALS


def worth_s(error: BaseException) -> float:
    """Returns for how long a call is worth further tries, in seconds from the first one.

    Returns:
        0 where the answer will be the same next time: 403, a request that is malformed.
    """
    text = str(error)
    if isinstance(error, ConflictError | AlteredError):
        return math.inf
    if _INVALID in text:
        return _CONNECT_S
    if _STATUS.search(text):
        passes = _first(_STATUS, text) in _PASSING or _first(_CODE, text) in _PASSING_CODES
        return math.inf if passes else 0.0
    if "kind: Connect" in text:
        return _CONNECT_S
    return math.inf if _is_cut(text) else 0.0


def _is_cut(text: str) -> bool:
    return not _STATUS.search(text) and any(sign in text for sign in _CUT)


def object_failure(error: BaseException, doing: str, key: str, where: str) -> StorageError:
    """Returns the `StorageError` that says what an error of obstore means.

    Args:
        error: What obstore raised.
        doing: Verb for the message: "write", "read".
        key: The key concerned.
        where: URL of the key.

    Returns:
        `KeyMissingError`, `KeyExistsError`, or a `StorageError` with the answer of the store, how
        often it was asked, and a way out.

    Examples:
        >>> print(object_failure(ValueError("no"), "read", "a", "s3://b/a"))
        could not read s3://b/a: no (ValueError, not retried) [key a]
    """
    text = str(error)
    name = type(error).__name__
    status, code = _first(_STATUS, text), _first(_CODE, text)
    is_bucket = code in ("NoSuchBucket", "ContainerNotFound")
    if isinstance(error, FileNotFoundError) and not is_bucket:
        return KeyMissingError(f"could not {doing} {where}: there is no such key", key=key)
    if name == "AlreadyExistsError" or (name == "PreconditionError" and doing == "create"):
        return KeyExistsError(f"could not {doing} {where}: it exists already", key=key)
    retries = _first(_RETRIES, " ".join([*getattr(error, "__notes__", ()), text])) or "0"
    told = f"retried {retries} times" if retries != "0" else "not retried"
    said = _said(text, status, code)
    way_out = _WAY_OUT.get(code) or _BY_STATUS.get(status)
    if _WHOLE in text:
        way_out = (
            "this server can't serve ranges: use another, or reach it through fsspec: "
            "Location(path, filesystem=s3fs.S3FileSystem(...))"
        )
    if way_out is None and (_is_cut(text) or isinstance(error, AlteredError) or _INVALID in text):
        way_out = "the connection failed: check the endpoint and the network, then retry"
    message = f"could not {doing} {where}: {said} ({name}, {told})"
    # Why not of a cut connection: that is no answer.
    is_refused = bool(status) and worth_s(error) == 0
    cls = StorageRefusedError if is_refused else StorageError
    return cls(message + (f"; {way_out}" if way_out else ""), key=key or None)


def _said(text: str, status: str, code: str) -> str:
    if status:
        told = _first(_TEXT, text)
        return (
            f"the store answered {status}"
            + (f" {code}" if code else "")
            + (f", {told}" if told else "")
        )
    line = _QUERY.sub("?…", text.split("\n\nDebug source")[0].replace("\n", " "))
    return line[:_MOST_CHARS].strip()


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    # Why one line: Azure puts ids of the request and the time behind it.
    return found[1].strip().partition("\n")[0] if found else ""


T = TypeVar("T")

_READ_CHUNK_BYTES = 1 << 20
"""A body is copied into its target in steps of at least this length, as it comes."""
_MOST_DELETED = 1000


class ObjectStorage:
    """Implements `Storage` on one prefix of a bucket. Safe to use from several threads.

    Nothing is touched before the first read or write. Keys lie at `<root>/<key>`, where stock DCP
    finds them.

    Args:
        store: A store of obstore. Connections belong to it; it is never closed here.
        root: Prefix below that of the store; empty for its root.
        options: See `ObjectOptions`.
        retrying: Repeats calls whose connection failed; made from the options by default.

    Attributes:
        request_bytes: Length that a read should have at least, when there is so much to read: each
            one costs a round trip.

    Examples:
        >>> from obstore.store import MemoryStore
        >>> storage = ObjectStorage(MemoryStore(), "run/step-1")
        >>> storage.write("a", b"1", create=True)
        >>> storage.read("a"), [entry.key for entry in storage.list()]
        (b'1', ['a'])
    """

    request_bytes = 8 << 20

    def __init__(
        self,
        store: Any,
        root: str = "",
        *,
        options: ObjectOptions | None = None,
        retrying: Retrying | None = None,
    ) -> None:
        self._store = store
        self._base = base_url(store)
        self._root = root.strip("/")
        self._options = options or ObjectOptions()
        client = client_of(store, self._options.retry_timeout_s)
        # Why another client: that of `store` repeats requests by itself, which parts need.
        self._calls = client.calls
        self._retrying = retrying or client.retrying

    def __repr__(self) -> str:
        return f"ObjectStorage({self.url!r})"

    @property
    def url(self) -> str:
        """`s3://`, `gs://` or `az://`, bucket and prefix."""
        return f"{self._base}/{self._root}" if self._root else self._base

    @property
    def read_traits(self) -> ReadTraits:
        """Of a store that is far away, or of one in memory."""
        return MEMORY if provider_of(self._store) is None else OBJECT_STORE

    @property
    def traits(self) -> StorageTraits:
        """Durable and shared; whether it creates if absent is tried once for each store.

        See `ray_dcp.store.create_probe`: a few small objects are put and removed again below the
        place.

        Raises:
            StorageError: It could not be tried, as where this process may only read.
        """
        return StorageTraits(
            create_if_absent=creates_if_absent_in(
                name_of_store(self._store), self._create, self._range, self.delete
            ),
            durable=provider_of(self._store) is not None,
            shared=provider_of(self._store) is not None,
        )

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """See `Storage.read`."""
        check_key(key)
        check_range(key, start, num_bytes)
        if num_bytes == 0:
            self._size(key)
            return b""
        try:
            return self._range(key, start, num_bytes)
        except StorageError as error:
            if error.__cause__ is None or not is_past_the_end(error.__cause__):
                raise
        # Why asked: some servers answer so for a key that is not there.
        self._size(key)
        return b""

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See `Storage.read_into`."""
        check_key(key)
        view = as_bytes_view(target)
        check_range(key, start, len(view))
        done = 0

        def fill() -> None:
            nonlocal done
            found = self._obstore.get(
                self._calls,
                self._path(key),
                options={"range": (start + done, start + len(view))},
            )
            for chunk in found.stream(min_chunk_size=_READ_CHUNK_BYTES):
                view[done : done + len(chunk)] = memoryview(chunk)
                done += len(chunk)
            _check_whole(found, start + done)

        size = None
        try:
            if len(view):
                self._asked("read", key, fill)
            else:
                size = self._size(key)
        except StorageError as error:
            if error.__cause__ is None or not is_past_the_end(error.__cause__):
                raise
            size = self._size(key)
        if done < len(view) or (size is not None and size < start):
            raise StorageError(
                f"{self._where(key)} is too short: wanted bytes [{start}, {start + len(view)}), "
                f"but it ends at {start + done if size is None else size}",
                key=key,
            )

    def write(self, key: str, data: BytesLike, *, create: bool = False) -> None:
        """See `Storage.write`."""
        check_key(key)
        # Why copied: obstore's store in memory keeps what it is given.
        view = as_bytes_view(data) if provider_of(self._store) else bytes(as_bytes_view(data))
        if create:
            self._create(key, view)
            return
        path = self._path(key)
        put = partial(self._obstore.put, self._calls, path, view, use_multipart=False)
        self._asked("write", key, put)

    def open_writer(self, key: str, *, sync: bool = True) -> PartWriter:
        """See `Storage.open_writer`; `sync` changes nothing."""
        check_key(key)
        return ObjectWriter(self, key)

    def delete(self, keys: Iterable[str]) -> None:
        """See `Storage.delete`."""
        paths = [self._path(check_key(key, unpublished=True)) for key in keys]
        for start in range(0, len(paths), _MOST_DELETED):
            some = paths[start : start + _MOST_DELETED]
            try:
                self._asked("delete", "", partial(self._delete, some))
            except KeyMissingError:
                # Why one by one: not every store takes a missing key as deleted.
                for path in some:
                    with suppress(KeyMissingError):
                        self._asked("delete", path, partial(self._delete, [path]))

    def _create(self, key: str, body: Any, doing: str = "create") -> None:
        """Puts a key if there is none.

        Careful: one whose answer was lost is asked again, and may meet itself. Callers read back
        what is there and compare it with what they wrote.
        """
        path = self._path(key)

        def put() -> None:
            try:
                self._obstore.put(self._calls, path, body, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError as error:
                # Why looked at: obstore says the same of a conflict with another request (409),
                # after which there may be no such key.
                try:
                    self._obstore.head(self._calls, path)
                except FileNotFoundError:
                    raise ConflictError(
                        "the store answered a conflict with another request"
                    ) from error
                raise

        self._asked(doing, key, put)

    def _put_parts(self, key: str, pieces: Iterator[Any]) -> None:
        """Puts the pieces of a long file by a multipart upload.

        Careful: never again after an error, as the pieces are gone then and the file would be
        shorter. The client of this store repeats the request of each part by itself.
        """
        put = partial(
            self._obstore.put,
            self._store,
            self._path(key),
            pieces,
            use_multipart=True,
            chunk_size=self._options.request_bytes,
            max_concurrency=self._options.num_requests,
        )
        self._asked("publish", key, put, repeat=False)

    def _delete(self, paths: builtins.list[str]) -> None:
        self._obstore.delete(self._calls, paths)

    def _range(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        wanted = {"offset": start} if num_bytes is None else (start, start + num_bytes)
        options = {"range": wanted} if start or num_bytes is not None else {}
        path = self._path(key)

        def get() -> bytes:
            found = self._obstore.get(self._calls, path, options=options)
            data = bytes(found.bytes())
            _check_whole(found, found.range[0] + len(data))
            return data

        return self._asked("read", key, get)

    def _size(self, key: str, doing: str = "read") -> int:
        path = self._path(key)
        found = self._asked(doing, key, lambda: self._obstore.head(self._calls, path))
        return int(found["size"])

    def _asked(self, doing: str, key: str, act: Callable[[], T], *, repeat: bool = True) -> T:
        """Returns what the store answers.

        Args:
            doing: Verb for messages.
            key: The key concerned.
            act: Asks it.
            repeat: Asks again what may pass.

        Raises:
            StorageError: What `object_failure` makes of its error.
        """

        def failed(error: Exception) -> str:
            return object_failure(error, doing, key, self._where(key)).message

        try:
            return self._retrying.call(act, worth_s, failed, doing) if repeat else act()
        except StorageError:
            raise
        except Exception as exc:
            if not _is_of_the_store(exc):
                raise
            if is_about_credentials(exc):
                # Why: those of the environment are read when a client is made, and may be renewed.
                forget_store(self._store)
            raise object_failure(exc, doing, key, self._where(key)) from exc
        except BaseException as exc:
            if type(exc).__name__ != "PanicException":
                raise
            raise StorageError(
                f"could not {doing} {self._where(key)}: the client library broke down: {exc}; "
                f"check the endpoint in storage_options or the environment",
                key=key or None,
            ) from None

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if self._root else key

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    @property
    def _obstore(self) -> Any:
        # Why inside: obstore is an extra.
        import obstore
        import obstore.exceptions

        return obstore

    def __reduce__(self) -> tuple[object, ...]:
        return (partial(ObjectStorage, options=self._options), (self._store, self._root))

    @classmethod
    def at(cls, scheme: str, rest: str, options: dict[str, object]) -> ObjectStorage:
        """Returns the storage of a URL.

        Args:
            scheme: Of the URL.
            rest: Bucket and path.
            options: See `object_stores.split_options`.

        Raises:
            InvalidRequestError: obstore is missing, or an option is not understood.
        """
        bucket, _, root = rest.partition("/")
        store, ours = make_store(scheme, bucket, options)
        return cls(store, root, options=ours)

    @classmethod
    def within(cls, store: Any, url: str) -> ObjectStorage:
        """Returns the storage of a path or URL in a ready store.

        Args:
            store: A store of obstore; its prefix is part of the place.
            url: Path below the store's prefix, or URL that begins with the store's own; may be
                empty.
        """
        base = base_url(store)
        if not split_url(url)[0]:
            return cls(store, url)
        if url != base and not url.startswith(f"{base}/"):
            raise InvalidRequestError(
                f"expected a path in the given store, or a URL that begins with {base}/, but "
                f"found {url!r}",
                key="checkpoint_id",
            )
        return cls(store, url[len(base) :])

    # Last: below it, `list` in an annotation would mean this method.
    def list(self, prefix: str = "") -> list[Entry]:
        """See `Storage.list`."""
        # Why by folder: stores list by folders, while a prefix is any beginning of a key.
        folder = prefix.rpartition("/")[0]
        is_folder = not {"", ".", ".."} & set(folder.split("/"))
        place = self._path(folder) if is_folder else self._root
        head = f"{self._root}/" if self._root else ""

        def listed() -> builtins.list[Entry]:
            found = []
            for chunk in self._obstore.list(self._calls, place or None, chunk_size=1000):
                for item in chunk:
                    if item["path"] == self._root:
                        continue  # an empty object that stands for the folder
                    if not item["path"].startswith(head):
                        raise AlteredError(f"a listing of {head} has {item['path'][:200]!r}")
                    key = item["path"].removeprefix(head)
                    # Why "/" at the end: consoles make empty objects of such names for folders.
                    is_hidden = key.endswith("/") or is_temporary(key)
                    if key.startswith(prefix) and not is_hidden:
                        found.append(Entry(key, int(item["size"])))
            return found

        return sorted(self._asked("list", "", listed), key=lambda entry: entry.key)


def _check_whole(found: Any, stop: int) -> None:
    """Checks that as many bytes came as the answer said.

    Raises:
        AlteredError: It is fewer.
    """
    if stop != found.range[1]:
        raise AlteredError(f"{found.range[1] - stop} bytes of what was told did not come")


def _is_of_the_store(error: Exception) -> bool:
    is_obstore = type(error).__module__.partition(".")[0] == "obstore"
    return is_obstore or isinstance(
        error, (OSError, NotImplementedError, ValueError, ConflictError, AlteredError)
    )
