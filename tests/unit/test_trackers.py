"""Trackers against the real packages, offline: what they wrote is read by the packages' readers."""

from __future__ import annotations

import json
import logging
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ray_dcp
from ray_dcp import events
from ray_dcp.coordinator.metrics import METRICS
from ray_dcp.errors import CheckpointExistsError, InvalidRequestError
from ray_dcp.events import Event
from ray_dcp.integrations import trackers
from ray_dcp.manager import CheckpointManager, Item
from ray_dcp.options import SaveOptions
from tests.support.processes import eventually

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

PHASES = ["capture", "plan", "write", "commit"]
STATE_BYTES = 4000


def state() -> dict[str, Any]:
    return {"w": torch.arange(1000.0)}


def play(run: Path) -> None:
    """Saves steps 1 and 2 of a run, fails to save step 1 again, and loads step 2."""
    for step in (1, 2):
        ray_dcp.save(state(), checkpoint_id=run / f"step-{step}")
    with pytest.raises(CheckpointExistsError):
        ray_dcp.save(state(), checkpoint_id=run / "step-1", options=SaveOptions(overwrite=False))
    ray_dcp.load(state(), checkpoint_id=run / "step-2")


# Weights & Biases


def export_twice() -> None:
    """Emits what an export that succeeds emits, and one that fails."""
    for name, step in (("export.exported", 3), ("export.failed", 4)):
        events.emit(Event(name=name, checkpoint_id=f"/run/step-{step}", seconds=2.0))


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR", "ARTIFACT_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / "wandb-files"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "wandb-files").mkdir()
    wandb = pytest.importorskip("wandb")
    yield wandb
    wandb.teardown()


def start(wandb: Any) -> Any:
    settings = wandb.Settings(x_disable_stats=True, disable_git=True, console="off")
    return wandb.init(project="p", settings=settings)


def records(folder: Path) -> Iterator[Any]:
    """Yields what an offline run wrote: records of protobuf in a log of LevelDB's format."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def history(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows that a run of W&B has logged."""
    return [
        {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in one.history.item}
        for one in records(folder)
        if one.HasField("history")
    ]


def test_wandb_has_a_reference_to_each_step_with_its_tags_and_the_times(wandb, tmp_path):
    run_path = tmp_path / "run"
    run = start(wandb)
    with trackers.WandbTracker(run), CheckpointManager(run_path, 1) as manager:
        manager.save(1, state())
        run.log({"loss": 0.5})
        manager.tag(1, "before-lr-drop")
        manager.save(2, state())
        run.log({"loss": 0.25})
        manager.tag(2, "last-good")
    run.finish()
    wandb.teardown()  # It waits until the file is written.
    found = list(records(tmp_path / "wandb-files"))
    artifacts = [one.artifact for one in found if one.HasField("artifact")]
    assert {(one.name, one.type) for one in artifacts} == {(f"checkpoint-{run.id}", "model")}
    # As W&B does: equal digests are one version, and an alias moves to what is logged.
    versions: dict[str, set[str]] = {}
    for one in artifacts:
        for aliases in versions.values():
            aliases.difference_update(one.aliases)
        versions.setdefault(one.digest, set()).update(one.aliases)
    assert list(versions.values()) == [
        {"step-1", "before-lr-drop"}, {"step-2", "last-good", "latest"}
    ]  # fmt: skip
    folder = run_path / "step-00000001"
    assert json.loads(artifacts[0].metadata)["url"] == str(folder)
    references = {one.ref: one.size for one in artifacts[0].manifest.contents}
    files = {path.as_uri(): path.stat().st_size for path in folder.iterdir()}
    assert references.items() >= {k: v for k, v in files.items() if ".distcp" in k}.items()
    rows = history(tmp_path / "wandb-files")
    # The times are in rows of the training, whose steps they do not change.
    assert [row["loss"] for row in rows if "loss" in row] == [0.5, 0.25]
    assert [row["_step"] for row in rows if "loss" in row] == [0, 1]
    saves = [row for row in rows if "ray_dcp/save_durable_seconds" in row]
    assert [row["ray_dcp/step"] for row in saves][-1] == 2
    assert all(row["ray_dcp/written_bytes"] >= STATE_BYTES for row in saves)


@pytest.mark.parametrize("explicit", [False, True])
def test_each_commit_between_two_rows_of_the_training_is_kept(wandb, tmp_path, explicit: bool):
    run = start(wandb)

    def train(number: int) -> None:
        run.log({"loss": float(number)}, **({"step": number} if explicit else {}))

    train(0)
    with trackers.WandbTracker(run) as tracker, CheckpointManager(tmp_path / "run", 1) as manager:
        for step in range(1, 6):
            manager.save(step, state())
        assert eventually(lambda: len(tracker._logged) == 5)
        train(1)
        train(2)
        manager.save(6, state())
        assert eventually(lambda: len(tracker._logged) == 6)
        train(3)
    run.finish()
    wandb.teardown()
    found = history(tmp_path / "wandb-files")
    rows = [row for row in found if "loss" in row]
    assert [(row["_step"], row["loss"]) for row in rows] == [(n, float(n)) for n in range(4)]
    saves = [row for row in found if "ray_dcp/save_durable_seconds" in row]
    assert [row["ray_dcp/step"] for row in saves] == [1, 2, 3, 4, 5, 6]
    assert all("ray_dcp/save_plan_seconds" in row for row in saves)


def test_wandb_finds_tags_where_the_root_has_options(wandb):
    import fsspec

    root = ray_dcp.Location("tracked-run", filesystem=fsspec.filesystem("memory"))
    logged = []

    class Run:
        id = "r1"

        def define_metric(self, *args: object, **kwargs: object) -> None: ...

        def log(self, *args: object, **kwargs: object) -> None: ...

        def log_artifact(self, artifact: Any, aliases: list[str]) -> None:
            logged.append((artifact.metadata["url"], aliases))

    with trackers.WandbTracker(Run(), root=root):
        for step in (4, 5):
            ray_dcp.save(state(), checkpoint_id=root / f"step-{step}")
        assert eventually(lambda: len(logged) == 2)
        ray_dcp.open(root).tag(4, "good")
        with CheckpointManager(root, 1, items={"model": Item(), "ema2": Item()}) as manager:
            manager.save(6, {"model": state(), "ema2": state()})
    assert [aliases for _, aliases in logged] == [
        ["latest", "step-4"],
        ["latest", "step-5"],
        ["latest", "step-4", "good"],
        ["latest", "step-6"],  # once, though it has two items
    ]
    assert logged[-1][0].endswith("/step-00000006")


# MLflow


def test_mlflow_has_times_of_each_step_and_where_the_checkpoints_lie(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    run_id = client.create_run(client.create_experiment("e")).info.run_id
    with trackers.MlflowTracker(run_id, client=client):
        play(tmp_path / "run")
    path = str(tmp_path / "run" / "step-2")
    assert client.get_run(run_id).data.tags["ray_dcp.latest"] == path
    assert [one.path for one in client.list_artifacts(run_id, "checkpoints")] == [
        "checkpoints/step-1.json", "checkpoints/step-2.json"
    ]  # fmt: skip
    written = json.loads(
        Path(client.download_artifacts(run_id, "checkpoints/step-2.json")).read_text()
    )
    assert (written["checkpoint_id"], written["step"]) == (path, 2)
    assert written["attempt"] == ray_dcp.open(path).attempt
    history = client.get_metric_history(run_id, "ray_dcp/save_durable_seconds")
    assert [one.step for one in history] == [1, 2]
    assert all(one.value > 0 for one in history)
    assert [one.value for one in client.get_metric_history(run_id, "ray_dcp/saves_failed")] == [1]
    assert [one.step for one in client.get_metric_history(run_id, "ray_dcp/read_bytes")] == [2]


# TensorBoard


def test_tensorboard_has_times_bytes_and_failures_by_step(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "logs") as writer, trackers.TensorBoardTracker(writer):
        play(tmp_path / "run")
        export_twice()
        with CheckpointManager(tmp_path / "items", 1, items={"model": Item()}) as manager:
            manager.save(7, {"model": state()})
    found = accumulators.EventAccumulator(str(tmp_path / "logs")).Reload()
    scalars = {
        tag: [(one.step, one.value) for one in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }
    assert [step for step, _ in scalars["ray_dcp/save_durable_seconds"]] == [1, 2, 7]
    assert [step for step, _ in scalars["ray_dcp/model/save_durable_seconds"]] == [7]
    for phase in PHASES:
        assert [step for step, _ in scalars[f"ray_dcp/save_{phase}_seconds"]][:2] == [1, 2]
    assert all(value >= STATE_BYTES for _, value in scalars["ray_dcp/written_bytes"][:2])
    assert scalars["ray_dcp/model/written_bytes"][0][1] >= STATE_BYTES
    assert scalars["ray_dcp/saves_failed"] == [(1, 1)]
    assert scalars["ray_dcp/export_seconds"] == [(3, 2.0)]
    assert scalars["ray_dcp/exports_failed"] == [(4, 1)]
    assert not [tag for tag in scalars if tag.endswith("exported")]
    assert scalars["ray_dcp/read_bytes"][0][0] == 2


# OpenTelemetry


def test_spans_of_a_save_lie_below_the_span_that_called_it(tmp_path):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("training")
    with trackers.OpenTelemetryTracker(provider):
        with tracer.start_as_current_span("train-step") as outer:
            handle = ray_dcp.async_save(state(), checkpoint_id=tmp_path / "a")
        handle.result()
        play(tmp_path / "run")
    spans = exporter.get_finished_spans()
    whole = [span for span in spans if span.name in ("ray_dcp.save", "ray_dcp.load")]
    first = next(span for span in whole if span.attributes["ray_dcp.mode"] == "async_save")
    assert first.parent.span_id == outer.get_span_context().span_id
    assert first.attributes["ray_dcp.checkpoint_id"] == str(tmp_path / "a")
    assert [span.name for span in whole].count("ray_dcp.save") == 4
    for one in whole:
        below = [s for s in spans if s.parent and s.parent.span_id == one.context.span_id]
        assert below
        assert {span.name.rpartition(".")[0] for span in below} == {one.name}
        # The phases fill the whole, one after the other; the clocks differ by some microseconds.
        total = sum(span.end_time - span.start_time for span in below)
        assert total == pytest.approx(one.end_time - one.start_time, abs=2e6)
        assert one.start_time <= min(span.start_time for span in below) + 10e9
    failed = [span for span in whole if not span.status.is_ok]
    assert [span.attributes["ray_dcp.checkpoint_id"] for span in failed] == [
        str(tmp_path / "run" / "step-1")
    ]
    assert "CheckpointExistsError" in failed[0].status.description


# Prometheus


def test_prometheus_has_rays_metrics_without_ray(tmp_path):
    client = pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    registry = client.CollectorRegistry()

    def value(name: str, **labels: str) -> float:
        return registry.get_sample_value(f"ray_dcp_{name}", labels) or 0.0

    with trackers.PrometheusTracker(registry):
        with pytest.raises(ValueError, match="Duplicated"):
            trackers.PrometheusTracker(registry)
        export_twice()
        play(tmp_path / "run")
        assert eventually(lambda: value("loads_total", outcome="loaded") == 1)
        text = client.generate_latest(registry).decode()
        assert 'outcome="exported"' not in text
        assert 'mode=""' not in text, "an export was counted as a save"
        assert value("saves_total", outcome="committed", mode="save") == 2
        assert value("saves_total", outcome="failed", mode="save") == 1
        assert 2 * STATE_BYTES <= value("written_bytes_total") < 3 * STATE_BYTES
        assert STATE_BYTES <= value("read_bytes_total", source="storage") < 2 * STATE_BYTES
        assert value("save_durable_seconds_count", mode="save") == 2
    exported = {family.name for family in text_string_to_metric_families(text)}
    of_ray = {f"ray_{name}" for name, (kind, *_) in METRICS.items() if kind != "Gauge"}
    assert exported >= of_ray
    assert client.generate_latest(registry) == b""


# what a tracker can not do


class Kept(trackers.Tracker):
    """Keeps names of events."""

    def __init__(self) -> None:
        self.names: list[str] = []
        super().__init__()

    def record(self, event: events.Event, at_s: float) -> None:
        self.names.append(event.name)


class Broken(Kept):
    def record(self, event: events.Event, at_s: float) -> None:
        super().record(event, at_s)
        raise ConnectionError("the service is down")


class Stuck(Kept):
    def __init__(self) -> None:
        self.go = threading.Event()
        super().__init__()

    def record(self, event: events.Event, at_s: float) -> None:
        self.go.wait()
        super().record(event, at_s)


def test_a_service_that_is_down_fails_no_save_and_is_told_once(tmp_path, caplog):
    with Broken() as tracker:
        play(tmp_path / "run")
    assert tracker.names.count("save.committed") == 2
    told = [one.getMessage() for one in caplog.records if one.name == trackers.__name__]
    assert told == ["Broken could not record an event: ConnectionError: the service is down"]


def test_a_service_that_hangs_delays_no_save_and_bounded_memory_is_kept(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(trackers, "_MOST_WAITING", 8)
    tracker = Stuck()
    play(tmp_path / "run")
    assert ray_dcp.open(tmp_path / "run").step("latest").step == 2
    assert tracker._waiting.qsize() == 8
    tracker.close(timeout_s=0.01)
    tracker.close()
    told = [one for one in caplog.records if one.name == trackers.__name__]
    assert [one.levelno for one in told] == [logging.WARNING] * 2
    assert told[0].getMessage() == "Stuck drops events: its service is too slow"
    assert "service was too slow" in told[1].getMessage()
    tracker.go.set()
    tracker._waiting.put(None)
    tracker._thread.join()
    assert len(tracker.names) <= 9


def test_after_it_is_closed_a_tracker_records_nothing(tmp_path):
    with Kept() as tracker:
        ray_dcp.save(state(), checkpoint_id=tmp_path / "a")
    ray_dcp.save(state(), checkpoint_id=tmp_path / "b")
    assert tracker.names == [f"save.{phase}" for phase in (*PHASES, "committed")]


PROGRAM = """
import atexit, os, sys, threading, torch, ray_dcp
from ray_dcp.integrations import trackers

class Printed(trackers.Tracker):
    def record(self, event, at_s):
        exiting.wait()
        print(os.getpid() == parent, event.name, flush=True)

parent, exiting = os.getpid(), threading.Event()
# What was registered last runs first.
atexit.register(os._exit, 0)
tracker = Printed()
atexit.register(exiting.set)
child = os.fork()
ray_dcp.save({"w": torch.ones(2)}, checkpoint_id=f"{sys.argv[1]}/{child == 0}", no_dist=True)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def test_the_exit_of_a_process_waits_for_its_own_tracker_and_not_in_a_child(tmp_path, programs):
    (ended,) = programs.run("-c", PROGRAM, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [f"True save.{name}" for name in (*PHASES, "committed")]
    assert (tmp_path / "True").is_dir()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: trackers.WandbTracker(), r"call wandb\.init"),
        (lambda: trackers.MlflowTracker(), r"call mlflow\.start_run"),
        (lambda: trackers.TensorBoardTracker(7), "expected a SummaryWriter, found 7"),
    ],
)
def test_what_a_tracker_lacks_is_told_when_it_is_made(make, message):
    before = threading.active_count()
    with pytest.raises(InvalidRequestError, match=message):
        make()
    assert threading.active_count() == before
