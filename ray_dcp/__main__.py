"""`python -m ray_dcp` and the script `ray-dcp`: the `ray-dcp` command."""

from __future__ import annotations

import sys


def run() -> None:
    """Runs the command. Ctrl-C while its modules are imported ends it with 130, as later."""
    try:
        from ray_dcp.cli.main import main
    except KeyboardInterrupt:
        sys.exit(130)
    main(prog_name="ray-dcp")


if __name__ == "__main__":
    run()
