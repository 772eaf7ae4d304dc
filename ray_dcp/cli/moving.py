"""The commands `export`, `import` and `cp`. What they need of torch is loaded when they write."""

from __future__ import annotations

from dataclasses import asdict
from typing import cast

import click

from ray_dcp.cli.output import dry_run, print_json, progress
from ray_dcp.cli.places import checkpoint_at, place_of
from ray_dcp.errors import UnsafeCheckpointError
from ray_dcp.exporting import ExportFormat, check_source, import_checkpoint, plan_export
from ray_dcp.exporting import copy as copy_checkpoint
from ray_dcp.exporting import export as export_checkpoint
from ray_dcp.store.opening import open_storage, place_below
from ray_dcp.view.checkpoint_view import open as open_checkpoint
from ray_dcp.view.verify import items_of
from ray_dcp.view.wording import count_text, size_text

_include = click.option(
    "--tensor",
    "include",
    metavar="GLOB",
    multiple=True,
    help="Only names that match; may be given often.",
)
_dtype = click.option("--dtype", help="What floating tensors are cast to, as bf16 or float32.")


@click.command()
@click.argument("source")
@click.argument("target", type=click.Path())
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "hf", "torch", "dcp"]),
    default="safetensors",
    show_default=True,
    help="safetensors, torch: one file; hf: a folder with an index; dcp: for stock DCP.",
)
@_include
@_dtype
@dry_run
@click.option("--json", "as_json", is_flag=True, help="Print what is written as JSON.")
def export(
    source: str,
    target: str,
    kind: str,
    include: tuple[str, ...],
    dtype: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write the checkpoint SOURCE, a path or RUN@STEP, as TARGET in another format.

    Streaming: memory holds no more than a tensor. That it fits the disk is looked at first.
    """
    place, form = place_of(source), cast(ExportFormat, kind)
    plan = plan_export(checkpoint_at(source), target, form, include=include, dtype=dtype)
    if not dry_run:
        with progress("exporting") as told:
            export_checkpoint(place, target, form, include=include, dtype=dtype, told=told)
    if as_json:
        print_json({**asdict(plan), "dry_run": dry_run})
        return
    verb = "would write" if dry_run else "wrote"
    objects = f" and {count_text(plan.num_objects, 'object')}" if plan.num_objects else ""
    click.echo(
        f"{verb} {count_text(plan.num_tensors, 'tensor')}{objects}, about "
        f"{size_text(plan.num_bytes)}, as {kind} to {target}"
    )


@click.command("import")
@click.argument("source", type=click.Path())
@click.argument("target")
@_include
@_dtype
@click.option("--unsafe", is_flag=True, help="Run code that a torch.save file asks for.")
@dry_run
def import_(
    source: str,
    target: str,
    include: tuple[str, ...],
    dtype: str | None,
    unsafe: bool,
    dry_run: bool,
) -> None:
    """Make the checkpoint TARGET of SOURCE: a torch.save or safetensors file, or a folder.

    A folder holds safetensors files or a checkpoint of stock DCP.
    """
    from ray_dcp.runtime.copying import check_free

    check_source(source)
    check_free(open_storage(target))
    if dry_run:
        click.echo(f"would save {source} to {target}")
        return
    with progress("importing") as told:
        try:
            import_checkpoint(
                source, target, include=include, dtype=dtype, weights_only=not unsafe, told=told
            )
        except UnsafeCheckpointError as error:
            error.message = error.message.replace("pass weights_only=False", "say --unsafe")
            raise
    view = checkpoint_at(target)
    click.echo(
        f"saved {count_text(len(view.tensors), 'tensor')} and "
        f"{count_text(len(view.objects), 'object')}, "
        f"{size_text(view.num_bytes)}, to {target}"
    )


@click.command()
@click.argument("source")
@click.argument("target")
@click.option("--verify", is_flag=True, help="Read the copy and compare it with its checksums.")
@dry_run
def cp(source: str, target: str, verify: bool, dry_run: bool) -> None:
    """Copy the checkpoint SOURCE, a path or RUN@STEP, to TARGET, a path or URL.

    The copy appears when all of it is durable; an interrupted one leaves nothing.
    """
    from ray_dcp.runtime.copying import check_free, plan_copy

    view = checkpoint_at(source)
    if dry_run:
        check_free(open_storage(target))
        folders = items_of(view.storage, view.checkpoint)
        items = [open_checkpoint(place_below(view.place or view.url, one)) for one in folders]
        plans = [plan_copy(one.storage, one.checkpoint) for one in (view, *items)]
        count = count_text(sum(plan.num_files for plan in plans), "file")
        size = size_text(sum(plan.num_bytes for plan in plans))
        click.echo(f"would copy {count}, {size}, to {target}")
        return
    with progress("copying") as told:
        made = copy_checkpoint(view, target, told=told)
    click.echo(f"copied {size_text(made.num_bytes)} to {target}")
    if verify:
        with progress("verifying") as told:
            report = made.verify()
        for problem in report.problems:
            click.echo(f"damaged: {problem}")
        click.echo("ok" if report.ok else count_text(len(report.problems), "problem"))
        if not report.ok:
            raise SystemExit(1)
