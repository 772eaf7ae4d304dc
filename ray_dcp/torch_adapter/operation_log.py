"""`OperationLog`: each call and its phases in DCP's logger, in DCP's form."""

from __future__ import annotations

import logging
import time
import uuid
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from torch.distributed import c10d_logger
from torch.distributed.checkpoint import logger as _stock

from ray_dcp.core.phases import Step
from ray_dcp.events import contained

DCP_LOGGER: logging.Logger = _stock._dcp_logger
"""The logger of DCP's own functions: handlers that a job installed receive ray_dcp's calls too."""


class OperationLog:
    """Logs one call of the user from begin to end; a context manager.

    Args:
        operation: Name of the function.
        checkpoint_id: Argument of the function.
        plug_ins: The planner and the storage that were passed to it, by argument.
    """

    def __init__(self, operation: str, *, checkpoint_id: Any = None, **plug_ins: Any) -> None:
        self.operation = operation
        storage = plug_ins.get("storage_writer") or plug_ins.get("storage_reader")
        given = checkpoint_id or getattr(storage, "checkpoint_id", None)
        self._fields: dict[str, Any] = {
            "checkpoint_id": None if given is None else str(given),
            "uuid": str(uuid.uuid4().int),
            **{name: type(one).__name__ for name, one in plug_ins.items() if one is not None},
        }
        self._begun_s: dict[str, float] = {}
        self._phase = ""

    def __enter__(self) -> OperationLog:
        self._log(self.operation, "start", time.perf_counter())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._log_end(self.operation, time.perf_counter(), error)

    def enter(self, step: Step | None, now_s: float, error: BaseException | None = None) -> None:
        """Logs that a rank begins another step; see `PhaseClock.on_step`."""
        if step is not None and step.dcp in ("", self._phase):
            return
        if self._phase:
            self._log_end(self._phase, now_s, error)
        self._phase = "" if step is None else step.dcp
        if self._phase:
            self._log(self._phase, "start", now_s)

    def uploading(self, handle: Any) -> None:
        """Logs the upload in the background, and its end.

        Args:
            handle: Future of the upload.
        """
        self._log("upload", "start", time.perf_counter())

        def ended(future: Any) -> None:
            error = None if future.cancelled() else Future.exception(future)
            self._log_end("upload", time.perf_counter(), error)

        # Why the base class's method: a handle records who looks at it, and a log should not count.
        Future.add_done_callback(handle, ended)

    def _log_end(self, phase: str, now_s: float, error: BaseException | None) -> None:
        self._log(phase, "end" if error is None else "exception", now_s, error)

    def _log(
        self, phase: str, event: str, now_s: float, error: BaseException | None = None
    ) -> None:
        """Logs the dict that DCP's decorator would log."""
        if event == "start":
            self._begun_s[phase] = now_s
        level = logging.DEBUG if error is None else logging.ERROR
        with contained(f"The log of {self.operation}"):
            if not DCP_LOGGER.isEnabledFor(level):
                return
            message = {**self._fields, **c10d_logger._get_msg_dict(phase)}
            message |= {"event": event, "time": time.time_ns(), "log_exceptions": True}
            if event == "end":
                message["times_spent"] = int((now_s - self._begun_s[phase]) * 1e9)
            if error is not None:
                message["error"] = f"{error}"
            DCP_LOGGER.log(level, message)
