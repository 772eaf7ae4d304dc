"""Metrics and events under a real Ray: what its own exporter shows after some saves."""

from __future__ import annotations

import re
import secrets
import urllib.request

import pytest
import ray
import torch

import ray_dcp
from ray_dcp import events
from ray_dcp.coordinator import metrics
from ray_dcp.errors import CheckpointExistsError
from ray_dcp.options import SaveOptions
from tests.support.processes import eventually

pytestmark = pytest.mark.usefixtures("own_ray_session")


@pytest.fixture(scope="module")
def session(own_ray_session):
    # A namespace of its own: the stager that has the memory ends with this module.
    session = ray_dcp.connect(name="metrics", namespace=f"m{secrets.token_hex(4)}")
    yield session
    ended = [session.ray.staging().link().handle, session.ray.coordinator()]
    session.close()
    for actor in ended:
        ray.kill(actor)


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(1_000_000)}


def series(name: str, **tags: str) -> float:
    """Returns the sum of what the node exports under a name with these tags; 0 for nothing."""
    (node,) = ray.nodes()
    url = f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"
    try:
        text = urllib.request.urlopen(url, timeout=5).read().decode()
    except OSError:
        return 0.0
    lines = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    wanted = {f'{key}="{value}"' for key, value in tags.items()}
    return sum(float(value) for found, value in lines if wanted <= set(found.split(",")))


def test_every_metric_can_be_made_and_takes_its_tags(own_ray_session):
    for name, (kind, _, tag_keys) in metrics.METRICS.items():
        made = metrics._metric(name)
        assert made.info["name"] == name
        tags = dict.fromkeys(tag_keys, "x")
        if kind == "Counter":
            with pytest.raises(ValueError, match="must be >0"):
                made.inc(0, tags)
        elif kind == "Gauge":
            made.set(0)
        else:
            made.observe(0.0, tags)


def test_rays_exporter_shows_what_saves_and_loads_did(session, tmp_path):
    # Ray keeps what other tests of the process counted.
    path = tmp_path / "c"
    for _ in range(2):
        ray_dcp.async_save(state(), checkpoint_id=path).committed(180)
    with pytest.raises(CheckpointExistsError):
        ray_dcp.save(state(), checkpoint_id=path, options=SaveOptions(overwrite=False))
    ray_dcp.load(state(), checkpoint_id=path)

    def shown() -> bool:
        return (
            series("ray_dcp_saves_total", outcome="committed", mode="async_save") >= 2
            and series("ray_dcp_saves_total", outcome="failed", mode="save") == 1
            and series("ray_dcp_loads_total", outcome="loaded") == 1
            and series("ray_dcp_staging_limit_bytes") > 0
        )

    assert eventually(shown)
    assert series("ray_dcp_staged_bytes_total") == 8_000_000
    assert 8_000_000 <= series("ray_dcp_written_bytes_total") < 8_100_000
    assert 4_000_000 <= series("ray_dcp_read_bytes_total") < 4_100_000
    assert series("ray_dcp_save_stall_seconds_count", mode="async_save") == 2
    assert series("ray_dcp_save_durable_seconds_count", mode="async_save") == 2
    assert series("ray_dcp_load_seconds_count") == 1 + 1  # One is of the test above.


@pytest.mark.parametrize("staging", ["call", "background"])
def test_whoever_tells_of_a_save_through_a_stager_tells_the_same(session, tmp_path, staging):
    heard: list[events.Event] = []
    unsubscribe = events.subscribe(heard.append)
    options = SaveOptions(staging=staging)
    handle = ray_dcp.async_save(
        {**state(), "step": [3]}, checkpoint_id=tmp_path / "c", options=options
    )
    handle.committed(180)
    unsubscribe()
    report = handle.report()
    assert report.staging == "object_store"
    assert list(report.seconds) == ["capture", "plan", "stage", "write"]
    assert 4_000_000 <= report.bytes_staged < 4_010_000
    *phases, end = heard
    assert report.seconds == pytest.approx({event.outcome: event.seconds for event in phases})
    assert sum(report.seconds.values()) == pytest.approx(end.seconds, abs=1e-6)
    assert report.stall_s == pytest.approx(end.stall_s)
    waited = report.seconds["stage"] if report.waited_s is None else report.waited_s
    assert report.stall_s == pytest.approx(
        report.seconds["capture"] + report.seconds["plan"] + waited
    )
    spans = {
        span.phase: span for span in ray_dcp.open(tmp_path / "c").trace.spans if span.rank == 0
    }
    assert spans["capture"].seconds == pytest.approx(report.seconds["capture"], abs=3e-5)
    assert spans["stage"].num_bytes == report.bytes_staged
    written = sum(file.stat().st_size for file in (tmp_path / "c").glob("*.distcp"))
    assert (report.bytes_written, spans["write"].num_bytes) == (written, written)
