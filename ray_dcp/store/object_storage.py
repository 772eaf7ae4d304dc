"""`ObjectStorage`: keys to bytes in a bucket of S3, GCS or Azure, by obstore.

Uploads of long files are in `object_writer`; what errors mean in `object_errors`.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from ray_dcp.errors import StorageError
from ray_dcp.store.create_probe import creates_if_absent_in
from ray_dcp.store.object_errors import (
    ConflictError,
    is_about_credentials,
    is_past_the_end,
    object_failure,
    worth_s,
)
from ray_dcp.store.object_options import ObjectOptions
from ray_dcp.store.object_stores import (
    base_url,
    client_of,
    forget_store,
    make_store,
    name_of_store,
    place_in,
    provider_of,
)
from ray_dcp.store.object_writer import ObjectWriter
from ray_dcp.store.paths import TEMP_PREFIX, as_bytes_view, check_key, check_range
from ray_dcp.store.retrying import Retrying
from ray_dcp.store.storage import (
    MEMORY,
    OBJECT_STORE,
    Entry,
    KeyExistsError,
    KeyMissingError,
    PartWriter,
    ReadTraits,
    StorageTraits,
)

__all__ = ["ObjectStorage"]

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

    Example:
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
                name_of_store(self._store), self._probe_put, self._probe_get, self._probe_delete
            ),
            durable=provider_of(self._store) is not None,
            shared=provider_of(self._store) is not None,
            exclusive_parts=False,
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

    def write(
        self, key: str, data: bytes | bytearray | memoryview, *, create: bool = False
    ) -> None:
        """See `Storage.write`."""
        check_key(key)
        # Why copied: obstore's store in memory keeps what it is given.
        view = as_bytes_view(data) if provider_of(self._store) else bytes(as_bytes_view(data))
        path = self._path(key)
        if create:
            self._asked("create", key, partial(self._create, path, view))
        else:
            self._asked(
                "write", key,
                lambda: self._obstore.put(self._calls, path, view, use_multipart=False),
            )  # fmt: skip

    def open_writer(self, key: str, *, sync: bool = True) -> PartWriter:
        """See `Storage.open_writer`; `sync` changes nothing."""
        check_key(key)
        return ObjectWriter(
            self._store, self._path(key), key, self._where(key), self._options,
            create=self._create, look=partial(self._obstore.head, self._calls),
            ask=partial(self._asked, "publish", key),
            ask_once=partial(self._asked, "publish", key, repeat=False),
        )  # fmt: skip

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
                    self._delete_one(path)

    def _create(self, path: str, body: Any) -> None:
        """Puts a key if there is none.

        Careful: one whose answer was lost is asked again, and may meet itself. Callers read back
        what is there and compare it with what they wrote.
        """
        try:
            self._obstore.put(self._calls, path, body, mode="create", use_multipart=False)
        except self._obstore.exceptions.AlreadyExistsError as error:
            # Why looked at: obstore says the same of a conflict with another request (409), after
            # which there may be no such key.
            try:
                self._obstore.head(self._calls, path)
            except FileNotFoundError:
                raise ConflictError("the store answered a conflict with another request") from error
            raise

    def _delete(self, paths: builtins.list[str]) -> None:
        self._obstore.delete(self._calls, paths)

    def _delete_one(self, path: str) -> None:
        try:
            self._asked("delete", path, partial(self._delete, [path]))
        except KeyMissingError:
            return

    def _range(self, key: str, start: int, num_bytes: int | None) -> bytes:
        wanted = {"offset": start} if num_bytes is None else (start, start + num_bytes)
        options = {"range": wanted} if start or num_bytes is not None else {}
        path = self._path(key)

        def get() -> bytes:
            return bytes(self._obstore.get(self._calls, path, options=options).bytes())

        return self._asked("read", key, get)

    def _size(self, key: str) -> int:
        path = self._path(key)
        found = self._asked("read", key, lambda: self._obstore.head(self._calls, path))
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

    # For the probe of conditional creation

    def _probe_put(self, name: str, data: bytes) -> bool:
        path = self._path(TEMP_PREFIX + name)
        try:
            self._asked("create", TEMP_PREFIX + name, partial(self._create, path, data))
        except KeyExistsError:
            return False
        return True

    def _probe_get(self, name: str) -> bytes | None:
        path = self._path(TEMP_PREFIX + name)
        try:
            return self._asked(
                "read", TEMP_PREFIX + name,
                lambda: bytes(self._obstore.get(self._calls, path).bytes()),
            )  # fmt: skip
        except KeyMissingError:
            return None

    def _probe_delete(self, name: str) -> None:
        self._delete_one(self._path(TEMP_PREFIX + name))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self._store, self._root, self._options))

    @classmethod
    def at(cls, scheme: str, rest: str, options: dict[str, object]) -> ObjectStorage:
        """Returns the storage of a URL.

        Args:
            scheme: Of the URL.
            rest: Bucket and path.
            options: See `object_options.split_options`.

        Raises:
            InvalidRequestError: obstore is missing, or an option is not understood.
        """
        bucket, _, root = rest.partition("/")
        store, ours = make_store(scheme, bucket, options)
        return cls(store, root, options=ours)

    @classmethod
    def within(cls, store: Any, url: str) -> ObjectStorage:
        """Returns the storage of a path or URL in a ready store."""
        url = place_in(store, url).url
        return cls(store, url[len(base_url(store)) :])

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
                    key = item["path"].removeprefix(head)
                    if key.startswith(prefix) and not _is_hidden(key):
                        found.append(Entry(key, int(item["size"])))
            return found

        return sorted(self._asked("list", "", listed), key=lambda entry: entry.key)


def _rebuild(store: Any, root: str, options: ObjectOptions) -> ObjectStorage:
    return ObjectStorage(store, root, options=options)


def _is_hidden(key: str) -> bool:
    # Why "/" at the end: consoles make empty objects of such names for folders.
    return key.endswith("/") or key.rpartition("/")[2].startswith(TEMP_PREFIX)


def _is_of_the_store(error: Exception) -> bool:
    is_obstore = type(error).__module__.partition(".")[0] == "obstore"
    return is_obstore or isinstance(
        error, (OSError, NotImplementedError, ValueError, ConflictError)
    )
