"""The command `python -m ray_dcp.dcp.format_utils`: DCP's converter, with its arguments."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["main"]


@click.command()
@click.argument("mode", type=click.Choice(["torch_to_dcp", "dcp_to_torch"]))
@click.argument("src")
@click.argument("dst")
@click.option(
    "--include", multiple=True, help="Shell pattern of names to convert; may be given often."
)
@click.option("--dtype", help="What floating tensors are cast to, such as bfloat16.")
@click.option("--unsafe", is_flag=True, help="Run code that the file asks for.")
def main(
    mode: str, src: str, dst: str, include: tuple[str, ...], dtype: str | None, unsafe: bool
) -> None:
    """Convert the checkpoint SRC to DST: a file of torch.save, or a directory."""
    from ray_dcp.conversion import dcp_to_torch_save, torch_save_to_dcp
    from ray_dcp.errors import CheckpointError
    from ray_dcp.options import LoadOptions
    from ray_dcp.seam.tensors import dtype_of

    click.echo(f"Converting checkpoint from {src} to {dst} using method: '{mode}'")
    try:
        cast = None if dtype is None else dtype_of(dtype)
        if mode == "torch_to_dcp":
            if not Path(src).is_file():
                raise click.ClickException(f"No checkpoint found at {src}. Skipping conversion.")
            torch_save_to_dcp(src, dst, include=include, dtype=cast, weights_only=not unsafe)
        else:
            options = LoadOptions(weights_only=not unsafe)
            dcp_to_torch_save(src, dst, include=include, dtype=cast, options=options)
    except CheckpointError as error:
        raise click.ClickException(str(error)) from error
