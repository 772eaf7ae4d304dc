"""`python -m ray_dcp`: the `ray-dcp` command."""

from __future__ import annotations

from ray_dcp.cli.main import main

if __name__ == "__main__":
    main(prog_name="ray-dcp")
