"""Waits with a deadline for the futures that storage plug-ins return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ray_dcp.errors import DeadlineError, InvalidRequestError

__all__ = ["await_future"]


def await_future(future: Any, timeout_s: float, *, doing: str, rank: int) -> Any:
    """Returns the value of a future of a storage plug-in.

    Accepts a `torch.futures.Future`, anything with its `wait()` and (optionally) `value()`, and
    a `concurrent.futures.Future`.

    Args:
        future: What `write_data` or `read_data` returned.
        timeout_s: Deadline in seconds.
        doing: What made the future, such as `"MyWriter.write_data"`, for messages.
        rank: This rank.

    Raises:
        DeadlineError: The future did not complete in time.
        InvalidRequestError: It is no future.
        BaseException: Whatever the future failed with.

    Careful: a future that has neither `add_done_callback` nor `result` is waited for in a
    daemon thread, which stays behind when the deadline passes.
    """
    if not hasattr(future, "wait") and not hasattr(future, "result"):
        raise InvalidRequestError(
            f"{doing} must return a torch.futures.Future, but returned "
            f"{type(future).__name__}; return one whose set_result was called if the work is "
            f"already done",
            rank=rank,
        )
    completed = threading.Event()
    if hasattr(future, "add_done_callback"):
        future.add_done_callback(lambda _: completed.set())
        get = _getter(future)
    else:
        get = _in_thread(_getter(future), completed)
    if not completed.wait(timeout_s):
        raise DeadlineError(
            f"{doing} returned a future that did not complete within {timeout_s:g} s on rank "
            f"{rank}; raise the timeout, or find what the storage waits for",
            rank=rank,
        )
    return get()


def _getter(future: Any) -> Callable[[], Any]:
    def get() -> Any:
        if not hasattr(future, "wait"):
            return future.result()
        waited = future.wait()
        return future.value() if hasattr(future, "value") else waited

    return get


def _in_thread(get: Callable[[], Any], completed: threading.Event) -> Callable[[], Any]:
    values: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            values.append(get())
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
            errors.append(error)
        completed.set()

    threading.Thread(target=run, name="ray_dcp-await", daemon=True).start()

    def outcome() -> Any:
        if errors:
            raise errors[0]
        return values[0]

    return outcome
