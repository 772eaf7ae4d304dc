"""`python -m ray_dcp.integrations.grafana FILE` writes the dashboard; without FILE it prints it."""

from __future__ import annotations

import sys
from pathlib import Path

from ray_dcp.integrations.grafana import dashboard_text


def main(arguments: list[str]) -> int:
    """Writes or prints the dashboard; returns the exit status."""
    if len(arguments) > 1:
        sys.stderr.write("usage: python -m ray_dcp.integrations.grafana [FILE]\n")
        return 2
    if not arguments:
        sys.stdout.write(dashboard_text())
        return 0
    try:
        Path(arguments[0]).write_text(dashboard_text(), encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"{arguments[0]} can't be written: {error.strerror}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
