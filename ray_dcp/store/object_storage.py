"""`ObjectStorage`: a storage in a bucket of S3, GCS or Azure, accessed through obstore.

A file that fits one request is written by a single conditional put; a longer one is a multipart
upload (`object_upload`). What an error means, and whether it is worth another call, is said in
`object_errors`.
"""

from __future__ import annotations

import builtins
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from ray_dcp.errors import InvalidRequestError, StorageError
from ray_dcp.store.conditional_create import creates_if_absent_in
from ray_dcp.store.location import split_url
from ray_dcp.store.object_clients import (
    base_url,
    client_of,
    credentials_text,
    forget_store,
    make_store,
    name_of_store,
    pickled,
    provider_of,
    unpickled,
)
from ray_dcp.store.object_errors import (
    AlteredError,
    ConflictError,
    is_about_credentials,
    is_past_the_end,
    object_failure,
    worth_s,
)
from ray_dcp.store.object_options import ObjectOptions
from ray_dcp.store.object_upload import Upload
from ray_dcp.store.retries import Retrying
from ray_dcp.store.storage import (
    MEMORY,
    OBJECT_STORE,
    BytesLike,
    Entry,
    KeyExistsError,
    KeyMissingError,
    OnceWriter,
    PartWriter,
    PublishedFile,
    ReadTraits,
    Reused,
    StorageTraits,
    as_bytes_view,
    check_key,
    check_range,
    is_temporary,
    too_short,
)

T = TypeVar("T")

_READ_CHUNK_BYTES = 1 << 20
"""Minimum length of the chunks in which a received body is copied into its target."""
_MOST_DELETED = 1000


_MOST_PARTS = 10_000
"""S3's limit of parts per upload."""
_ROOM: dict[tuple[int, int], SimpleQueue[None]] = {}


def _room_of(options: ObjectOptions) -> SimpleQueue[None]:
    """Returns a queue with a token for each part that the uploads of a process may hold in memory.

    *Why a `SimpleQueue`*: Python's garbage collector may return a token inside of any call, and
    its `put` is reentrant. *Why whole parts*: parts that each lack a few bytes could wait for each
    other forever.
    """
    room: SimpleQueue[None] = SimpleQueue()
    for _ in range(max(1, int(options.upload_bytes / options.request_bytes))):
        room.put(None)
    return _ROOM.setdefault((int(options.upload_bytes), int(options.request_bytes)), room)


class ObjectWriter(OnceWriter):
    """Implements `PartWriter`; fills one part after the other.

    Args:
        storage: Storage to write to.
        key: The key.
    """

    def __init__(self, storage: ObjectStorage, key: str) -> None:
        self._storage = storage
        self._part_bytes = int(storage._options.request_bytes)
        self._part = np.empty(self._part_bytes, np.uint8)
        self._fill = 0
        self._num_parts = 0
        self._room = _room_of(storage._options)
        self._held: list[weakref.finalize[Any, Any]] = []
        self._upload: Upload | None = None
        super().__init__(storage._url_of(key), key)

    def _append(self, data: BytesLike) -> None:
        view = np.frombuffer(as_bytes_view(data), np.uint8)
        while len(view):
            if self._fill == self._part_bytes:
                self._send()
            piece = view[: self._part_bytes - self._fill]
            self._part[self._fill : self._fill + len(piece)] = piece
            self._fill += len(piece)
            view = view[len(piece) :]

    def _publish(self) -> None:
        """Puts the file, or completes its multipart upload.

        A multipart upload checks first that the key is free; see `StorageTraits.create_if_absent`.
        """
        if self._upload is None:
            body = self._part[: self._fill] if self._fill else b""
            self._storage._create(self._key, body, "publish")
            return
        self._send()
        with suppress(KeyMissingError):
            self._storage._size(self._key, "publish")
            raise KeyExistsError(
                f"could not publish {self._where}: it exists already", key=self._key
            )
        self._upload.finish()

    def _discard(self) -> None:
        # The store removes the parts that were uploaded.
        if self._upload is not None:
            self._upload.give_up()
        # Why: an exception that the caller keeps may refer to a part indefinitely.
        for give_back in self._held:
            give_back()

    def _send(self) -> None:
        """Passes the part to the upload, which starts with the first one, and begins another."""
        if self._num_parts == _MOST_PARTS:
            raise StorageError(
                f"could not write {self._where}: it gets longer than {_MOST_PARTS} parts of "
                f"{self._part_bytes} bytes; raise the storage option request_bytes, or lower "
                f"part_bytes",
                key=self._key,
            )
        if self._upload is None:
            # Careful: a bound method would keep this writer alive, and prevent abort on deletion.
            self._upload = Upload(partial(self._storage._put_parts, self._key))
        part = self._part[: self._fill]
        self._part, self._fill = np.empty(self._part_bytes, np.uint8), 0
        self._num_parts += 1
        # Why not in memory: obstore's in-memory store keeps a reference to the part.
        if provider_of(self._storage._store) is not None:
            self._room.get()
            give_back = weakref.finalize(part, self._room.put, None)
            give_back.atexit = False
            self._held = [one for one in self._held if one.alive] + [give_back]
        self._upload.add(part)


class ObjectStorage:
    """Implements `Storage` on one prefix of a bucket. Thread-safe.

    The store is not accessed before the first read or write. The objects have the names
    `<root>/<key>`, where stock DCP expects them.

    Args:
        store: A store of obstore. It owns the connections and is never closed here.
        root: Prefix below that of the store; empty for its root.
        options: See `ObjectOptions`.
        retrying: Retries failed calls; made from `options` by default.

    Attributes:
        request_bytes: Length that a read should have at least, as every request costs a round trip.

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
        # Why a second client: `store` retries by itself, which only multipart uploads need.
        self._calls = client.calls
        self._retrying = retrying or client.retrying

    def __repr__(self) -> str:
        return f"ObjectStorage({self.url!r})"

    @property
    def url(self) -> str:
        """URL with the scheme `s3`, `gs` or `az`, the bucket and the prefix."""
        return f"{self._base}/{self._root}" if self._root else self._base

    @property
    def place(self) -> str:
        """See `place_of`: the prefix, and the server that has the bucket."""
        return f"{name_of_store(self._store)} {self.url}"

    @property
    def read_traits(self) -> ReadTraits:
        """Traits of a remote store, or of an in-memory store."""
        return MEMORY if provider_of(self._store) is None else OBJECT_STORE

    @property
    def traits(self) -> StorageTraits:
        """Durable and shared; `create_if_absent` is found by a trial, once per store.

        See `creates_if_absent_in`: the trial creates and removes a few small objects below
        the root.

        Raises:
            StorageError: The trial failed, for example because this process may only read.
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
        # Why checked: some servers give the same answer for a missing key.
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
                self._call("read", key, fill)
            else:
                size = self._size(key)
        except StorageError as error:
            if error.__cause__ is None or not is_past_the_end(error.__cause__):
                raise
            size = self._size(key)
        if done < len(view) or (size is not None and size < start):
            end = start + done if size is None else size
            raise too_short(self._url_of(key), key, start, len(view), end)

    def write(self, key: str, data: BytesLike, *, create: bool = False) -> None:
        """See `Storage.write`."""
        check_key(key)
        # Why copied: obstore's in-memory store keeps a reference to the buffer.
        view = as_bytes_view(data) if provider_of(self._store) else bytes(as_bytes_view(data))
        if create:
            self._create(key, view)
            return
        path = self._path(key)
        put = partial(self._obstore.put, self._calls, path, view, use_multipart=False)
        self._call("write", key, put)

    def open_writer(self, key: str, *, sync: bool = True) -> PartWriter:
        """See `Storage.open_writer`; `sync` changes nothing."""
        check_key(key)
        return ObjectWriter(self, key)

    def reuse(self, key: str, source: PublishedFile, end: bytes, *, sync: bool) -> Reused | None:
        """See `reuse_file`: lets the store copy the object; no byte passes through this process.

        obstore's copy takes no condition on the source. Therefore the ETag that was looked at must
        be that of the source after the copy as well, and the copy must have the same length and
        last bytes; else the copy is removed. A store copies an object of at most 5 GB at once;
        longer ones are written.
        """
        check_key(key)
        if not source.url.startswith(f"{self._base}/"):
            return None
        old = f"{source.url.removeprefix(self._base).strip('/')}/{source.key}"
        wanted, path = (source.num_bytes, end), self._path(key)
        tag, *found = self._end_of(old, key, len(end), source.num_bytes)
        if not tag or tuple(found) != wanted:
            return None
        with suppress(KeyMissingError):
            self._size(key, "publish")
            return None
        is_same = False
        try:
            self._call("copy", key, partial(self._obstore.copy, self._calls, old, path))
            again, *after = self._end_of(path, key, len(end), source.num_bytes)
            tag_after = self._end_of(old, key, len(end), source.num_bytes)[0]
            is_same = bool(again) and tuple(after) == wanted and tag_after == tag
        finally:
            if not is_same:
                self.delete([key])
        return "copied" if is_same else None

    def _end_of(self, path: str, key: str, length: int, size: int) -> tuple[str, int, bytes]:
        """Returns ETag, length and last bytes of an object that should have a length."""

        def get() -> tuple[str, int, bytes]:
            wanted = {"range": (size - length, size)}
            found = self._obstore.get(self._calls, path, options=wanted)
            return str(found.meta["e_tag"] or ""), int(found.meta["size"]), bytes(found.bytes())

        return self._call("read", key, get)

    def delete(self, keys: Iterable[str]) -> None:
        """See `Storage.delete`."""
        paths = [self._path(check_key(key, unpublished=True)) for key in keys]
        for start in range(0, len(paths), _MOST_DELETED):
            some = paths[start : start + _MOST_DELETED]
            try:
                self._call("delete", "", partial(self._delete, some))
            except KeyMissingError:
                # Why one by one: not every store ignores missing keys in a bulk delete.
                for path in some:
                    with suppress(KeyMissingError):
                        self._call("delete", path, partial(self._delete, [path]))

    def _create(self, key: str, body: Any, doing: str = "create") -> None:
        """Puts a key unless it exists.

        *Careful*: if the answer is lost, the put is retried and may find its own object. Callers
        read the key back and compare it with what they wrote.
        """
        path = self._path(key)

        def put() -> None:
            try:
                self._obstore.put(self._calls, path, body, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError as error:
                # Why checked: obstore raises the same error for a conflict with another request
                # (409), after which the key may not exist.
                try:
                    self._obstore.head(self._calls, path)
                except FileNotFoundError:
                    raise ConflictError(
                        "the store answered a conflict with another request"
                    ) from error
                raise

        self._call(doing, key, put)

    def _put_parts(self, key: str, pieces: Iterator[Any]) -> None:
        """Puts the pieces of a long file by a multipart upload.

        *Careful*: it is not retried as a whole, as the pieces are consumed and the file would be
        too short. The client retries the request of each part by itself.
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
        self._call("publish", key, put, repeat=False)

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

        return self._call("read", key, get)

    def _size(self, key: str, doing: str = "read") -> int:
        path = self._path(key)
        found = self._call(doing, key, lambda: self._obstore.head(self._calls, path))
        return int(found["size"])

    def _call(self, doing: str, key: str, act: Callable[[], T], *, repeat: bool = True) -> T:
        """Calls the store and returns its answer.

        Args:
            doing: Verb for messages.
            key: The key concerned.
            act: Makes the call.
            repeat: Retry transient errors.

        Raises:
            StorageError: The call failed; see `object_failure`.
        """

        def failed(error: Exception) -> str:
            return object_failure(error, doing, key, self._url_of(key)).message

        try:
            return self._retrying.call(act, worth_s, failed, doing) if repeat else act()
        except StorageError:
            raise
        except Exception as exc:
            if not _is_of_the_store(exc):
                raise
            if is_about_credentials(exc):
                # Why: a client reads credentials of the environment once; they may be renewed.
                forget_store(self._store)
            used = credentials_text(self._store)
            raise object_failure(exc, doing, key, self._url_of(key), used) from exc
        except BaseException as exc:
            if type(exc).__name__ != "PanicException":
                raise
            raise StorageError(
                f"could not {doing} {self._url_of(key)}: the client library broke down: {exc}; "
                f"check the endpoint in storage_options or the environment",
                key=key or None,
            ) from None

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if self._root else key

    def _url_of(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    @property
    def _obstore(self) -> Any:
        # Why imported here: obstore is an optional dependency.
        import obstore
        import obstore.exceptions

        return obstore

    def __reduce__(self) -> tuple[object, ...]:
        return (partial(_unpickled, self._options), (pickled(self._store), self._root))

    @classmethod
    def at(cls, scheme: str, rest: str, options: dict[str, object]) -> ObjectStorage:
        """Returns the storage of a URL.

        Args:
            scheme: Scheme of the URL.
            rest: Bucket and path.
            options: See `object_stores.split_options`.

        Raises:
            InvalidRequestError: obstore is not installed, or an option is unknown.
        """
        bucket, _, root = rest.partition("/")
        store, ours = make_store(scheme, bucket, options)
        return cls(store, root, options=ours)

    @classmethod
    def within(cls, store: Any, url: str) -> ObjectStorage:
        """Returns the storage of a path or URL in a given store.

        Args:
            store: A store of obstore, possibly with a prefix.
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
        # Why by folder: stores list whole folders, while `prefix` may end inside of a name.
        folder = prefix.rpartition("/")[0]
        is_folder = not {"", ".", ".."} & set(folder.split("/"))
        place = self._path(folder) if is_folder else self._root
        head = f"{self._root}/" if self._root else ""

        def listed() -> builtins.list[Entry]:
            found = []
            for chunk in self._obstore.list(self._calls, place or None, chunk_size=1000):
                for item in chunk:
                    if item["path"] == self._root:
                        continue  # an empty object that represents the folder
                    if not item["path"].startswith(head):
                        raise AlteredError(f"a listing of {head} has {item['path'][:200]!r}")
                    key = item["path"].removeprefix(head)
                    # Why "/" at the end: consoles represent folders by empty objects of such names.
                    is_hidden = key.endswith("/") or is_temporary(key)
                    if key.startswith(prefix) and not is_hidden:
                        found.append(Entry(key, int(item["size"])))
            return found

        return sorted(self._call("list", "", listed), key=lambda entry: entry.key)


def _unpickled(options: ObjectOptions, store: Any, root: str) -> ObjectStorage:
    return ObjectStorage(unpickled(store), root, options=options)


def _check_whole(found: Any, stop: int) -> None:
    """Checks that the body is as long as the header of the answer states.

    Raises:
        AlteredError: The body is shorter.
    """
    if stop != found.range[1]:
        raise AlteredError(f"the answer lacks {found.range[1] - stop} of its bytes")


def _is_of_the_store(error: Exception) -> bool:
    is_obstore = type(error).__module__.partition(".")[0] == "obstore"
    return is_obstore or isinstance(
        error, (OSError, NotImplementedError, ValueError, ConflictError, AlteredError)
    )
