"""The commands that write: `metadata`. They load neither torch nor ray."""

from __future__ import annotations

import click

__all__ = ["metadata"]


@click.command()
@click.argument("path")
def metadata(path: str) -> None:
    """Write the .metadata of the checkpoint at PATH, so that stock DCP can read it.

    For a checkpoint that was saved with SaveOptions(stock_metadata=False).
    """
    from ray_dcp.runtime.metadata_later import write_metadata

    if write_metadata(path):
        click.echo(f"stock DCP can read {path}")
    else:
        click.echo(f"{path} was replaced meanwhile, or is of another version of ray_dcp")
        raise SystemExit(2)
