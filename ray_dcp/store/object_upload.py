"""`Upload`: a multipart upload, in a thread of its own.

Several parts are in flight. The thread reads them from a queue without copying them, and aborts the
upload if the writer is aborted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

import numpy as np
import numpy.typing as npt

from ray_dcp.core.processes import start_thread, wait_all


class Upload:
    """Runs a multipart upload in a thread of its own, which reads the parts from a queue.

    Args:
        put: Uploads the parts of an iterator.
    """

    def __init__(self, put: Callable[[Parts], object]) -> None:
        self._parts = Parts()
        self._ended: Future[None] = Future()
        start_thread(partial(self._run, put), "ray_dcp upload")

    def add(self, part: npt.NDArray[np.uint8]) -> None:
        """Appends a part.

        Raises:
            StorageError: The upload has failed.
        """
        if self._ended.done():
            self._ended.result()
        self._parts.put(part)

    def finish(self) -> None:
        """Completes the upload and waits until the file exists.

        Raises:
            StorageError: The upload has failed.
        """
        self._parts.put(StopIteration())
        self._ended.result()

    def give_up(self) -> None:
        """Aborts the upload, and waits until its parts are removed."""
        self._parts.drop()
        self._parts.put(GivenUpError())
        wait_all([self._ended])

    def _run(self, put: Callable[[Parts], object]) -> None:
        try:
            put(self._parts)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that writes
            self._parts.drop()
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)


class GivenUpError(Exception):
    """Raised in the thread of an upload that is aborted."""


class Parts(SimpleQueue["npt.NDArray[np.uint8] | Exception"]):
    """Iterates once over parts from another thread; a queued exception ends the iteration."""

    def __iter__(self) -> Iterator[npt.NDArray[np.uint8]]:
        return self

    def __next__(self) -> npt.NDArray[np.uint8]:
        part = self.get()
        if isinstance(part, Exception):
            self.put(part)  # for further calls
            raise part
        return part

    def drop(self) -> None:
        """Drops all parts that were not read."""
        with suppress(Empty):
            while True:
                self.get_nowait()
