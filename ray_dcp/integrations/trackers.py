"""Experiment trackers and monitoring: saves and loads in W&B, MLflow, TensorBoard and others.

A tracker records the events of its process (`ray_dcp.events`) from its creation until `close`. It
works in a thread of its own, so that a service that fails, is slow or hangs neither delays nor
fails a save. An error is logged as a WARNING, once until a record succeeds again.

Events describe the rank of their process. Usually rank 0 creates the tracker; every rank may create
an `OpenTelemetryTracker` or a `PrometheusTracker`. The number at the end of a checkpoint's name is
its step; items of a manager's step have names of their own, such as `ray_dcp/model/load_seconds`.

Examples:
    >>> import ray_dcp, torch
    >>> class Names(Tracker):
    ...     def record(self, event, at_s):
    ...         print(event.name)
    >>> with Names():
    ...     _ = ray_dcp.save({"w": torch.ones(2)}, checkpoint_id="memory://doc-tracked/step-1")
    save.capture
    save.plan
    save.write
    save.commit
    save.committed
"""

from __future__ import annotations

import atexit
import contextvars
import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ray_dcp import events
from ray_dcp.coordinator.metrics import METRICS, SECONDS, count_end
from ray_dcp.core import bounds
from ray_dcp.core.processes import OwnProcess, start_thread
from ray_dcp.errors import InvalidRequestError
from ray_dcp.events import Event, contained
from ray_dcp.format.names import SHARED_FOLDER, TAGS, StepNames, tags_in
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import as_target, open_storage, place_below
from ray_dcp.view.run_listing import step_of

__all__ = [
    "MlflowTracker",
    "OpenTelemetryTracker",
    "PrometheusTracker",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
]

logger = logging.getLogger(__name__)

T = TypeVar("T", bound="Tracker")

STEP = "ray_dcp/step"
"""The axis of the numbers in W&B."""
_MOST_WAITING = 1000
"""Events that wait for a slow service; more are dropped. A save has six."""


class Tracker:
    """Records events in a thread of its own; a context manager that closes itself.

    A subclass implements `record`, and may implement `finish`. Its `__init__` calls
    `super().__init__()` last, as events are recorded from then on. A forked child records nothing.
    """

    def __init__(self) -> None:
        self._process = OwnProcess()
        self._waiting: queue.Queue[tuple[contextvars.Context, float, Event] | None]
        self._waiting = queue.Queue(_MOST_WAITING)
        self._is_told = False
        self._num_dropped = 0
        self._thread = start_thread(self._run, f"ray_dcp {type(self).__name__}")
        self._unsubscribe: Callable[[], None] | None = events.subscribe(self._enqueue)
        atexit.register(self.close, bounds.TRACKER_END_S)

    def record(self, event: Event, at_s: float) -> None:
        """Records an event. Runs in the tracker's thread, in the context of the emitting code.

        Args:
            event: The event.
            at_s: When it was emitted, in seconds since 1970.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Does what is left to do after the last event. Runs in the tracker's thread."""

    def close(self, timeout_s: float = 30.0) -> None:
        """Ends the subscription, and waits until all events are recorded. May be called repeatedly.

        Args:
            timeout_s: How long to wait, in seconds. Afterwards, what is not recorded is lost, and a
                WARNING is logged.
        """
        unsubscribe, self._unsubscribe = self._unsubscribe, None
        if unsubscribe is None or not self._process.is_this:
            return
        unsubscribe()
        atexit.unregister(self.close)
        until_s = time.monotonic() + timeout_s
        try:
            self._waiting.put(None, timeout=timeout_s)
            self._thread.join(max(0.0, until_s - time.monotonic()))
        except queue.Full:
            pass
        num_lost = self._num_dropped + self._waiting.qsize()
        if num_lost or self._thread.is_alive():
            text = "%s did not record about %d events: its service was too slow"
            logger.warning(text, type(self).__name__, max(1, num_lost))

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _enqueue(self, event: Event) -> None:
        """Queues an event, in the thread that emits it."""
        if not self._process.is_this:
            return
        try:
            self._waiting.put_nowait((contextvars.copy_context(), time.time(), event))
        except queue.Full:
            self._num_dropped += 1
            if self._num_dropped == 1:
                with contained("The log of a tracker"):
                    logger.warning("%s drops events: its service is too slow", type(self).__name__)

    def _run(self) -> None:
        while (taken := self._waiting.get()) is not None:
            context, at_s, event = taken
            self._guard(partial(context.run, self.record, event, at_s))
        self._guard(self.finish)

    def _guard(self, act: Callable[[], object]) -> None:
        try:
            act()
            self._is_told = False
        except Exception as error:  # noqa: BLE001 - whatever a service raises, training goes on
            with contained("The log of a tracker"):
                level = logging.DEBUG if self._is_told else logging.WARNING
                text = "%s could not record an event: %s: %s"
                logger.log(level, text, type(self).__name__, type(error).__name__, error)
            self._is_told = True


class _ValuesTracker(Tracker):
    """Turns events into named numbers of a step."""

    def __init__(self) -> None:
        self._failed: Counter[str] = Counter()
        super().__init__()

    def record(self, event: Event, at_s: float) -> None:
        step, item = _step_and_item(event.checkpoint_id)
        head = f"ray_dcp/{item}/" if item else "ray_dcp/"
        values = {f"{head}{name}": value for name, value in self._values(event).items()}
        if values:
            self.log(values, step, at_s)
        if event.name == "save.committed":
            self.commit(event, None if item else step)

    def log(self, values: dict[str, float], step: int | None, at_s: float) -> None:
        """Records numbers of a step; the step is None for a checkpoint without a number."""
        raise NotImplementedError

    def commit(self, event: Event, step: int | None) -> None:
        """Records that a checkpoint was committed."""

    def _values(self, event: Event) -> dict[str, float]:
        kind = event.name.partition(".")[0]
        match event.outcome:
            case "committed":
                found = {"save_durable_seconds": event.seconds, "written_bytes": event.num_bytes}
                stall_s = {} if event.stall_s is None else {"save_stall_seconds": event.stall_s}
                return {**found, **stall_s}
            case "loaded":
                return {"load_seconds": event.seconds, "read_bytes": event.num_bytes}
            case "exported":
                return {"export_seconds": event.seconds}
            case outcome if event.is_end:
                name = f"{kind}s_{outcome}"
                self._failed[name] += 1
                return {name: self._failed[name]}
            case phase:
                return {f"{kind}_{phase}_seconds": event.seconds}


class WandbTracker(_ValuesTracker):
    """Records checkpoints and their times in a run of Weights & Biases.

    Each committed step is a version of the artifact `checkpoint-<run id>`, which refers to the
    files where they lie; nothing is uploaded. Its aliases are `latest`, `step-<number>` and the
    tags of the step. Tags that are set later are added with the next commit, or by `close`. Times
    and bytes have the names `ray_dcp/...` and join the row of the next `run.log`. Of several
    checkpoints between two calls, each later one joins the row of a later call; `close` logs rows
    of their own for those that are left. So they change no step of the training's rows before.

    Args:
        run: The run; by default the active one.
        root: Location of the run's steps, for their tags; by default where the steps are saved.
            Needed where a `Location` has storage options or a filesystem.

    Raises:
        InvalidRequestError: There is no active run.
    """

    def __init__(self, run: Any = None, *, root: AnyPlace | None = None) -> None:
        import wandb

        chosen: Any = wandb.run if run is None else run
        if chosen is None:
            raise InvalidRequestError("expected an active run: call wandb.init() before", key="run")
        self._run_of_wandb = chosen
        self._artifact = wandb.Artifact
        self._root = None if root is None else as_target(root)
        self._logged: dict[int, tuple[Event, frozenset[str] | None]] = {}
        self._rows: deque[dict[str, float]] = deque()
        self._row_step: int | None = None
        define = self._run_of_wandb.define_metric
        define(STEP)
        define("ray_dcp/*", step_metric=STEP)
        super().__init__()

    def log(self, values: dict[str, float], step: int | None, at_s: float) -> None:
        """See `_ValuesTracker`."""
        found = {**values, **({} if step is None else {STEP: step})}
        last = self._rows[-1] if self._rows else {}
        if not last or last.get(STEP) != step or not values.keys().isdisjoint(last):
            self._rows.append(found)
            self._end_row()
        else:
            last.update(found)
        if len(self._rows) == 1:
            self._log_first(found)

    def _log_first(self, values: dict[str, float]) -> None:
        """Adds values of the first row to W&B's row, which the next `run.log` ends."""
        # Why not committed: a row of its own would shift the steps of the training's rows, and W&B
        # drops what a caller logs with a step that has passed.
        self._run_of_wandb.log(values, commit=False)
        self._row_step = self._step_of_wandb()

    def _end_row(self) -> None:
        """Begins the next row if the training has ended W&B's row since the first was added."""
        step = self._step_of_wandb() if len(self._rows) > 1 else None
        if len(self._rows) > 1 and (step is None or step != self._row_step):
            self._rows.popleft()
            if len(self._rows) > 1:
                self._log_first(self._rows[0])

    def _step_of_wandb(self) -> int | None:
        """Returns the step of W&B's row; None where several processes log to one run."""
        try:
            return int(self._run_of_wandb.step)
        except Exception:  # noqa: BLE001 - what a shared run raises is W&B's own
            return None

    def commit(self, event: Event, step: int | None) -> None:
        """Logs an artifact for the step, and new tags of earlier ones."""
        if step is not None and not event.rank and event.checkpoint_id is not None:
            self._logged.pop(step, None)
            self._logged[step] = (event, None)
            self._refer_all()

    def finish(self) -> None:
        """Logs the rows that are left, and adds tags that were set since the last commit."""
        if len(self._rows) > 1:
            self._run_of_wandb.log({}, commit=True)
        while len(self._rows) > 1:
            self._rows.popleft()
            self._run_of_wandb.log(self._rows[0], commit=len(self._rows) > 1)
        if self._logged:
            self._refer_all()

    def _refer_all(self) -> None:
        """Logs the steps that are new or have new tags.

        W&B makes no other version of equal content, but adds the aliases, and moves `latest`, which
        can't be left out. Therefore the newest step is the last one.
        """
        *_, newest = self._logged
        place = str(self._logged[newest][0].checkpoint_id)
        tags: dict[int, frozenset[str]] = {}
        with contained(f"Reading the tags of steps beside {place}"):
            tags = tags_of(self._root or place.rpartition("/")[0])
        is_any = False
        for step, (event, known) in list(self._logged.items()):
            has = tags.get(step, frozenset()) | (known or frozenset())
            if has != known or (is_any and step == newest):
                self._refer(event, step, ["latest", f"step-{step}", *sorted(has)])
                self._logged[step] = (event, has)
                is_any = True

    def _refer(self, event: Event, step: int, aliases: list[str]) -> None:
        place, name = str(event.checkpoint_id), str(event.checkpoint_id).rpartition("/")[2]
        target = place if self._root is None else place_below(self._root, name)
        url = open_storage(target).url
        about = {"step": step, "attempt": event.attempt, "world_size": event.world_size, "url": url}
        made = self._artifact(f"checkpoint-{self._run_of_wandb.id}", "model", metadata=about)
        # Why without checksums: W&B would read all bytes.
        uri = url if "://" in url else Path(url).as_uri()
        made.add_reference(uri, None if uri.startswith("file:") else name, checksum=False)
        self._run_of_wandb.log_artifact(made, aliases=aliases)


class MlflowTracker(_ValuesTracker):
    """Records checkpoints and their times in a run of MLflow.

    Times and bytes are metrics `ray_dcp/...` of the step. Each committed checkpoint is an artifact
    `checkpoints/<name>.json` with its URL, and the tag `ray_dcp.latest` of the run has the newest.

    Args:
        run_id: The run; by default the active one.
        client: An `MlflowClient`; by default one for the current tracking URI.

    Raises:
        InvalidRequestError: There is no active run.
    """

    def __init__(self, run_id: str | None = None, *, client: Any = None) -> None:
        import mlflow
        from mlflow.entities import Metric

        active: Any = mlflow.active_run() if run_id is None else None
        if run_id is None and active is None:
            raise InvalidRequestError(
                "expected an active run: call mlflow.start_run() before, or pass run_id",
                key="run_id",
            )
        self._run_id = run_id or str(active.info.run_id)
        self._client = client or mlflow.MlflowClient()
        self._metric = Metric
        super().__init__()

    def log(self, values: dict[str, float], step: int | None, at_s: float) -> None:
        """See `_ValuesTracker`."""
        found = [self._metric(name, v, int(at_s * 1e3), step or 0) for name, v in values.items()]
        self._client.log_batch(self._run_id, metrics=found)

    def commit(self, event: Event, step: int | None) -> None:
        """Writes the artifact and the tag."""
        if event.rank or event.checkpoint_id is None:
            return
        name = event.checkpoint_id.rstrip("/").rpartition("/")[2]
        about = {**event.as_dict(), "step": step}
        self._client.log_dict(self._run_id, about, f"checkpoints/{name}.json")
        self._client.set_tag(self._run_id, "ray_dcp.latest", event.checkpoint_id)


class TensorBoardTracker(_ValuesTracker):
    """Records times, bytes and failures as scalars `ray_dcp/...` for TensorBoard.

    Args:
        writer: A `SummaryWriter` of torch or tensorboardX. The caller closes it.

    Raises:
        InvalidRequestError: `writer` has no `add_scalar`.
    """

    def __init__(self, writer: Any) -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise InvalidRequestError(f"expected a SummaryWriter, found {writer!r}", key="writer")
        self._writer = writer
        super().__init__()

    def log(self, values: dict[str, float], step: int | None, at_s: float) -> None:
        """See `_ValuesTracker`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=at_s)

    def finish(self) -> None:
        """Flushes the writer."""
        self._writer.flush()


class OpenTelemetryTracker(Tracker):
    """Records each save and load as a span `ray_dcp.save` or `ray_dcp.load`, its phases below it.

    The parent is the span that was current where the save or load was called.

    Args:
        tracer_provider: By default the global one.
    """

    def __init__(self, tracer_provider: Any = None) -> None:
        from opentelemetry import context, trace

        self._trace, self._current = trace, context.get_current
        self._tracer = trace.get_tracer("ray_dcp", tracer_provider=tracer_provider)
        self._phases: dict[tuple[object, ...], list[tuple[Event, float, Any]]] = {}
        super().__init__()

    def record(self, event: Event, at_s: float) -> None:
        """Keeps a phase; at an end, makes the spans."""
        key = (event.name.partition(".")[0], event.checkpoint_id, event.mode, event.rank)
        if not event.is_end:
            self._phases.setdefault(key, []).append((event, at_s, self._current()))
            return
        phases = self._phases.pop(key, [])
        parent = phases[0][2] if phases else self._current()
        span = self._start_span(f"ray_dcp.{key[0]}", event, at_s, parent)
        below = self._trace.set_span_in_context(span, parent)
        for phase, end_s, _ in phases:
            child = self._start_span(f"ray_dcp.{phase.name}", phase, end_s, below)
            child.end(int(end_s * 1e9))
        if event.error is not None:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, event.error))
        span.end(int(at_s * 1e9))

    def _start_span(self, name: str, event: Event, end_s: float, context: Any) -> Any:
        fields: dict[str, Any] = event.as_dict()
        about = {f"ray_dcp.{name}": value for name, value in fields.items() if value != ""}
        start = int((end_s - event.seconds) * 1e9)
        return self._tracer.start_span(name, context, attributes=about, start_time=start)


class PrometheusTracker(Tracker):
    """Counts saves and loads for `prometheus_client`, in a job without Ray.

    The names are those that Ray exports in a job with it: `ray_dcp_saves_total` and so on. The
    caller exports the registry, for example by `prometheus_client.start_http_server`.

    Args:
        registry: By default the global one.

    Raises:
        ValueError: The registry has metrics of these names.
    """

    def __init__(self, registry: Any = None) -> None:
        import prometheus_client

        self._registry = prometheus_client.REGISTRY if registry is None else registry
        self._metrics: dict[str, Any] = {}
        for name, (kind, description, tags) in METRICS.items():
            more = {"buckets": SECONDS} if kind == "Histogram" else {}
            if kind != "Gauge":  # those are of node stagers, which only Ray has
                make = getattr(prometheus_client, kind)
                self._metrics[name] = make(
                    f"ray_{name}", description, tags, registry=self._registry, **more
                )
        super().__init__()

    def record(self, event: Event, at_s: float) -> None:
        """Counts the end of a save or load."""
        if event.is_end:
            count_end(event, lambda name: _Labelled(self._metrics[name]))

    def finish(self) -> None:
        """Removes the metrics from the registry."""
        for metric in self._metrics.values():
            self._registry.unregister(metric)


class _Labelled:
    """A metric of `prometheus_client`, called as those of Ray are."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric

    def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
        """Increases a counter."""
        (self._metric.labels(**tags) if tags else self._metric).inc(value)

    def observe(self, value: float, tags: dict[str, str] | None = None) -> None:
        """Adds a value to a histogram."""
        (self._metric.labels(**tags) if tags else self._metric).observe(value)


def tags_of(root: AnyPlace) -> dict[int, frozenset[str]]:
    """Returns the tags of each step of a run that has one.

    Raises:
        StorageError: The storage can't be listed.
    """
    shared = open_storage(place_below(root, SHARED_FOLDER))
    return tags_in(entry.key for entry in shared.list(TAGS))


def _step_and_item(checkpoint_id: str | None) -> tuple[int | None, str]:
    """Returns the step of a checkpoint, and the item of the step that it is; "" for a whole step.

    Examples:
        >>> _step_and_item("/run-7/step-5"), _step_and_item("s3://b/run/step-00000005/model.1")
        ((5, ''), (5, 'model'))
    """
    *above, name = (checkpoint_id or "").rstrip("/").split("/")
    step = StepNames().step_of(above[-1]) if above else None
    if step is None:
        return step_of(name), ""
    # The folder of an item that is saved again has a number behind a dot.
    item, _, again = name.rpartition(".")
    return step, item if item and again.isdecimal() else name
