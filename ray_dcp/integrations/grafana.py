"""A Grafana dashboard for the metrics `dcp_*`, as Ray exports them to Prometheus.

The file is `grafana.json` in this folder: import it in Grafana, or put it where Ray's own
dashboards are provisioned. `python -m ray_dcp.integrations.grafana FILE` writes a copy; without
FILE it prints it.
"""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any


def dashboard() -> dict[str, Any]:
    """Returns the dashboard as Grafana's HTTP API takes it.

    Examples:
        >>> dashboard()["title"]
        'ray_dcp checkpoints'
    """
    found: dict[str, Any] = json.loads(dashboard_text())
    return found


def dashboard_text() -> str:
    """Returns the text of `grafana.json`."""
    return files("ray_dcp.integrations").joinpath("grafana.json").read_text(encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Writes or prints the dashboard; returns the exit status."""
    if len(arguments) > 1:
        sys.stderr.write("usage: python -m ray_dcp.integrations.grafana [FILE]\n")
        return 2
    try:
        path = Path(arguments[0]) if arguments else None
        path.write_text(dashboard_text()) if path else sys.stdout.write(dashboard_text())
    except OSError as error:
        sys.stderr.write(f"{arguments[0]} can't be written: {error.strerror}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
