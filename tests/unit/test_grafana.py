"""The Grafana dashboard asks for metrics that are recorded, with tags that they have."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ray_dcp.integrations.grafana import dashboard, dashboard_text
from ray_dcp.runtime.metrics import METRICS

# What Ray puts behind the name of a metric when Prometheus reads it.
SUFFIXES = {"Counter": ("_total",), "Histogram": ("_bucket", "_sum", "_count"), "Gauge": ("",)}
EXPORTED = {
    f"ray_{name}{suffix}": tags
    for name, (kind, _, tags) in METRICS.items()
    for suffix in SUFFIXES[kind]
}
RAYS_TAGS = {"SessionName", "NodeAddress", "le"}

PANELS: list[dict[str, Any]] = [p for p in dashboard()["panels"] if p["type"] != "row"]
QUERIES = [(p["title"], t["expr"]) for p in PANELS for t in p["targets"]]


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_a_query_names_only_metrics_and_tags_that_are_recorded(title: str, query: str):
    named = re.findall(r"\bray_\w+", query)
    assert named, title
    assert set(named) <= set(EXPORTED)
    tags = {tag for name in named for tag in EXPORTED[name]} | RAYS_TAGS
    used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", query))
    for group in re.findall(r"by \(([^)]*)\)", query):
        used |= {tag.strip() for tag in group.split(",")}
    assert used <= tags
    assert query.count("(") == query.count(")")


def test_every_metric_is_on_the_dashboard():
    drawn = " ".join(query for _, query in QUERIES)
    assert [name for name in METRICS if f"ray_{name}" not in drawn] == []


def test_the_module_writes_the_file(tmp_path: Path):
    command = [sys.executable, "-m", "ray_dcp.integrations.grafana"]
    subprocess.run([*command, str(tmp_path / "d.json")], check=True, timeout=400)
    assert (tmp_path / "d.json").read_text() == dashboard_text()
    failed = subprocess.run([*command, str(tmp_path / "no" / "d.json")], check=False, timeout=400,
                            capture_output=True, text=True)  # fmt: skip
    assert failed.returncode == 2
    assert "No such file" in failed.stderr
