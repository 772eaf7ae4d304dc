"""A Grafana dashboard for the metrics `dcp_*`, as Ray exports them to Prometheus.

The file is `dashboard.json` in this folder: import it in Grafana, or put it where Ray's own
dashboards are provisioned. `python -m ray_dcp.integrations.grafana FILE` writes a copy.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

__all__ = ["dashboard", "dashboard_text"]


def dashboard() -> dict[str, Any]:
    """Returns the dashboard as Grafana's HTTP API takes it.

    Example:
        >>> dashboard()["title"]
        'ray_dcp checkpoints'
    """
    found: dict[str, Any] = json.loads(dashboard_text())
    return found


def dashboard_text() -> str:
    """Returns the text of `dashboard.json`."""
    return files(__name__).joinpath("dashboard.json").read_text(encoding="utf-8")
