"""Each call of the user and its phases, told to DCP's logger in DCP's form."""

from __future__ import annotations

import logging
import time
import uuid
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import c10d_logger
from torch.distributed.checkpoint import logger as _stock

DCP_LOGGER: logging.Logger = _stock._dcp_logger
"""The logger that DCP's own functions use: handlers that a job put there hear ray_dcp too."""

_PHASES = {
    "capturing": "local_step",
    "planning": "local_step",
    "opening": "read_metadata",
    "staging": "write_data",
    "writing": "write_data",
    "reading": "read_data",
}
"""Phases of a rank, and what DCP calls them. What a rank waits for depends on what it did."""
_WAITS = {
    "local_step": "global_step",
    "write_data": "finish_checkpoint",
    "read_data": "finish_load",
}


class OperationLog:
    """One call of the user, from its begin to its end; a context manager.

    Args:
        operation: Name of the function.
        checkpoint_id: As given to it.
        storage_writer: As given to it.
        storage_reader: As given to it.
        planner: As given to it.
    """

    def __init__(
        self,
        operation: str,
        *,
        checkpoint_id: Any = None,
        storage_writer: Any = None,
        storage_reader: Any = None,
        planner: Any = None,
    ) -> None:
        self.operation = operation
        self._id = str(uuid.uuid4().int)
        given = checkpoint_id or getattr(storage_writer or storage_reader, "checkpoint_id", None)
        self._checkpoint_id = None if given is None else str(given)
        self._fields: dict[str, Any] = {"checkpoint_id": self._checkpoint_id, "uuid": self._id}
        named = {
            "storage_writer": storage_writer,
            "storage_reader": storage_reader,
            "planner": planner,
        }
        for name, value in named.items():
            if value is not None:
                self._fields[name] = type(value).__name__
        self._begun_s: dict[str, float] = {}
        self._phase: str | None = None
        self.rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def __enter__(self) -> OperationLog:
        self._tell(self.operation, "begun")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        what = "done" if error is None else "failed"
        self._end_phase(error)
        self._tell(self.operation, what, error)

    def enter(self, phase: str) -> None:
        """Notes that a rank begins with something else; see `RankProgress.enter`."""
        name = _PHASES.get(phase)
        if phase == "waiting" and self._phase is not None:
            name = _WAITS.get(self._phase)
        if name is None or name == self._phase:
            return
        self._end_phase(None)
        self._phase = name
        self._tell(name, "begun")

    def uploading(self, handle: Any) -> None:
        """Tells of what goes on in the background, to its end.

        Args:
            handle: A future.
        """
        self._tell("upload", "begun")

        def ended(future: Any) -> None:
            error = None if future.cancelled() else Future.exception(future)
            self._tell("upload", "done" if error is None else "failed", error)

        # Why the base's methods: a handle notes who looks at it, and to log is not to look.
        Future.add_done_callback(handle, ended)

    def _end_phase(self, error: BaseException | None) -> None:
        phase, self._phase = self._phase, None
        if phase is not None:
            self._tell(phase, "done" if error is None else "failed", error)

    def _tell(self, phase: str, what: Any, error: BaseException | None = None) -> None:
        now_s = time.monotonic()
        seconds = None
        if what == "begun":
            self._begun_s[phase] = now_s
        else:
            seconds = now_s - self._begun_s.get(phase, now_s)
        level = logging.ERROR if what == "failed" else logging.DEBUG
        if DCP_LOGGER.isEnabledFor(level):
            DCP_LOGGER.log(level, self._message(phase, what, seconds, error))

    def _message(
        self, phase: str, what: str, seconds: float | None, error: BaseException | None
    ) -> dict[str, Any]:
        """Returns the dict that DCP's decorator would log."""
        message = dict(self._fields)
        message.update(c10d_logger._get_msg_dict(phase))
        message["event"] = {"begun": "start", "done": "end", "failed": "exception"}[what]
        message["time"] = time.time_ns()
        message["log_exceptions"] = True
        if seconds is not None and error is None:
            message["times_spent"] = int(seconds * 1e9)
        if error is not None:
            message["error"] = f"{error}"
        return message
