"""What calls of the user return and log: `LoadReport`, `CommittedMetadata` and `OperationLog`.

A save returns torch's `Metadata`, filled from the chunk table on first access: ranks receive only
the manifest of a commit, and most never use the chunks. Each call and its phases are logged to
DCP's logger in DCP's form.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any

from torch.distributed import c10d_logger
from torch.distributed.checkpoint import logger as _stock
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from ray_dcp.commit_protocol.messages import SaveOutcome, Target
from ray_dcp.core.phases import Step
from ray_dcp.core.values import ChunkTable
from ray_dcp.errors import CheckpointError, CheckpointNotFoundError
from ray_dcp.events import contained
from ray_dcp.format.manifest import Manifest, decode_record, record_key
from ray_dcp.format.metadata import ATTEMPT_ATTRIBUTE, encode_metadata
from ray_dcp.io.checkpoint import checkpoint_from
from ray_dcp.store.opening import open_storage
from ray_dcp.torch_adapter.tensors import dtype_of
from ray_dcp.view.wording import count_text, seconds_text, size_text

_NAMES_SHOWN = 3


@dataclass(frozen=True, kw_only=True, repr=False)
class LoadReport:
    """The result of `ray_dcp.load` or `ray_dcp.load_newest` on this rank.

    Examples:
        >>> report = LoadReport(loaded=("w",), missing=(), unexpected=("b",), cast=())
        >>> report.unexpected_keys
        ['b']
        >>> report
        LoadReport(None, native, 1 loaded, 1 unexpected (b), 0 B read in 0.00 ms)
    """

    loaded: tuple[str, ...]
    """FQNs that were loaded, in the order of the state dict."""
    missing: tuple[str, ...]
    """FQNs that the checkpoint lacks; their values are unchanged. Only with
    `LoadOptions(strict=False)`; otherwise missing FQNs are an error."""
    unexpected: tuple[str, ...]
    """FQNs of the checkpoint that the state dict did not request."""
    cast: tuple[tuple[str, str, str], ...]
    """`(FQN, dtype in the checkpoint, dtype of the target)` of each value whose dtypes differ."""
    resized: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    """`(FQN, shape in the checkpoint, shape of the target)` of each value whose shapes differ,
    which `LoadOptions.resize` allows."""
    bytes_needed: int = 0
    """Bytes that the targets of all ranks hold."""
    bytes_read: int = 0
    """Bytes that all ranks read, from storage or from the memory of the nodes."""
    bytes_from_peers: int = 0
    """Bytes that ranks received from another rank, which had read them for all; see
    `LoadOptions.share_reads`. Not included in `bytes_read`."""
    bytes_read_instead: int = 0
    """The part of `bytes_read` that another rank should have sent, but did not (it hung, or the
    object store failed), so that it was read from storage. 0 if no rank failed to send."""
    bytes_from_memory: int = 0
    """The part of `bytes_read` that came from the memory of the nodes instead of storage, after an
    asynchronous save with `SaveOptions(keep_in_memory=...)`."""
    path: str = "native"
    """The path of the load: `"native"`, `"planner hooks"` (a user's planner ran) or
    `"foreign storage"` (a third-party reader; no checksums, and only this field and `checkpoint_id`
    are known)."""
    checkpoint_id: str | None = None
    """Path or URL that was loaded; None if only a third-party reader knows it."""
    step: int | None = None
    """Step that was loaded, which `load_newest` reads from the folder's name; None for `load`."""
    skipped: tuple[tuple[str, CheckpointError], ...] = ()
    """`(path or URL, error)` of newer steps that `load_newest` skipped, newest first. The error is
    a `CheckpointNotFoundError` if none is committed, otherwise it describes the damage. Equal on
    all ranks."""
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Duration of each phase on this rank: `plan` (find the stored chunks and assign the reads,
    until all ranks were ready), `read`, and `finish` (until all ranks had read). Summed over all
    tries of `load_newest`."""

    def __repr__(self) -> str:
        told = [f"{len(self.loaded)} loaded"]
        for what in ("missing", "unexpected", "cast", "resized", "skipped"):
            found = getattr(self, what)
            names = [one if isinstance(one, str) else one[0] for one in found[:_NAMES_SHOWN]]
            if found:
                more = ", …" if len(found) > _NAMES_SHOWN else ""
                told.append(f"{len(found)} {what} ({', '.join(names)}{more})")
        memory = self.bytes_from_memory
        some = f" ({size_text(memory)} from memory)" if memory else ""
        took = seconds_text(sum(self.seconds.values()))
        told.append(f"{size_text(self.bytes_read)} read{some} in {took}")
        return f"LoadReport({self.checkpoint_id!r}, {self.path}, {', '.join(told)})"

    @property
    def damaged(self) -> tuple[tuple[str, CheckpointError], ...]:
        """The part of `skipped` that was committed and can't be loaded."""
        return tuple(
            (path, error)
            for path, error in self.skipped
            if not isinstance(error, CheckpointNotFoundError)
        )

    @property
    def missing_keys(self) -> list[str]:
        """The missing FQNs, as `torch.nn.Module.load_state_dict` names them."""
        return list(self.missing)

    @property
    def unexpected_keys(self) -> list[str]:
        """The unexpected FQNs, as `torch.nn.Module.load_state_dict` names them."""
        return list(self.unexpected)


class CommittedMetadata(Metadata):
    """The `Metadata` of a committed checkpoint, read on first access.

    It equals torch's `Metadata` with the same fields, and is pickled as one. `of` creates it; the
    constructor is that of `Metadata`. An access that fails is tried again by the next one.

    Attributes:
        attempt: The attempt that was committed; "" if unknown.
        slot: The slot of its manifest; 0 if unknown.
        differing: Names whose values differ between the ranks; see `SaveReport.differing`.
    """

    attempt: str = ""
    slot: int = 0
    differing: tuple[str, ...] = ()

    @property
    def created_s(self) -> float | None:
        """When the checkpoint was committed, in seconds since 1970 by the coordinator's clock.

        The same on all ranks; None if it is not known without reading.
        """
        data = self.__dict__.get("_manifest", b"")
        record = decode_record(data) if data else None
        return record.created_s if isinstance(record, Manifest) else None

    def __repr__(self) -> str:
        """Returns one line, without reading; that of torch's class has all tensors and chunks."""
        known, parts = self.__dict__, []
        data = known.get("_manifest", b"")
        record = decode_record(data) if data else None
        if isinstance(record, Manifest):
            size, files = size_text(record.payload_bytes), count_text(len(record.files), "file")
            parts += [count_text(record.num_tensors, "tensor"), f"{size} in {files}"]
        elif "state_dict_metadata" in known:
            parts.append(count_text(len(self.state_dict_metadata), "value"))
        parts += [f"attempt {self.attempt}"] if self.attempt else []
        return f"{type(self).__name__}({', '.join(parts)})"

    @classmethod
    def of(cls, target: Target, outcome: SaveOutcome) -> CommittedMetadata:
        """Returns the metadata of what a save committed, read from its storage on access."""

        def load() -> Metadata:
            storage = open_storage(target)
            record = outcome.manifest or storage.read(record_key(outcome.slot))
            checkpoint = checkpoint_from(storage, "native", outcome.slot, record)
            if checkpoint.attempt != outcome.attempt:
                raise CheckpointNotFoundError(
                    f"expected the checkpoint that attempt {outcome.attempt} committed, but "
                    f"{checkpoint.attempt} has replaced it; load what stands there",
                    checkpoint_id=target.url,
                )
            return metadata_of(
                checkpoint.table, checkpoint_id=target.url, attempt=checkpoint.attempt
            )

        self = cls.__new__(cls)
        self.attempt, self.slot = outcome.attempt, outcome.slot
        self.differing = outcome.differing
        self.__dict__.update(_manifest=outcome.manifest, _load=load, _lock=threading.Lock())
        return self

    def __getattribute__(self, name: str) -> Any:
        # Why not __getattr__: the class has the defaults of torch's dataclass fields as attributes.
        if name in _FIELDS and name not in object.__getattribute__(self, "__dict__"):
            self._fill()
        return object.__getattribute__(self, name)

    def _fill(self) -> None:
        lock = self.__dict__.get("_lock")
        if lock is None:
            return
        with lock:
            load = self.__dict__.get("_load")
            if load is None:
                return
            loaded = load()
            for field in _FIELDS:
                self.__dict__.setdefault(field, getattr(loaded, field))
            del self.__dict__["_load"]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Metadata):
            return NotImplemented
        return all(getattr(self, field) == getattr(other, field) for field in _FIELDS)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return (Metadata, tuple(getattr(self, field) for field in _FIELDS))


_FIELDS = tuple(field.name for field in fields(Metadata))


def metadata_of(
    table: ChunkTable,
    *,
    checkpoint_id: str | None = None,
    attempt: str | None = None,
    empty_mappings: bool = False,
) -> Metadata:
    """Returns torch's `Metadata` of a committed chunk table, which stock DCP reads as `.metadata`.

    Args:
        table: The chunk table.
        checkpoint_id: Value for `storage_meta`.
        attempt: The attempt that committed the table; also in `storage_meta`.
        empty_mappings: Include mappings without values, which DCP never does.

    Raises:
        UnsupportedValueError: The table has a dtype that this torch lacks.

    Complexity: linear; a few us per chunk.
    """
    # Why first: it refuses names that are no torch dtype; everything else in this pickle is ours.
    for dtype in table.dtypes:
        dtype_of(dtype)
    data = encode_metadata(
        table,
        checkpoint_id=checkpoint_id or "",
        attempt=attempt or "",
        empty_mappings=empty_mappings,
    )
    metadata: Metadata = pickle.loads(data)
    del metadata.__dict__[ATTEMPT_ATTRIBUTE]
    metadata.storage_meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=attempt)
    return metadata


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
