"""The commands `export`, `import` and `cp`. What they need of torch is loaded when they write."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import cast

import click

from ray_dcp.cli.output import dry_run, progress, told
from ray_dcp.cli.places import checkpoint_at, checkpoints_of, place_of
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import InvalidRequestError, UnsafeCheckpointError
from ray_dcp.exporting import ExportFormat, check_source, import_checkpoint, plan_export
from ray_dcp.exporting import copy as copy_checkpoint
from ray_dcp.exporting import export as export_checkpoint
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import absolute_target, open_storage, place_below
from ray_dcp.view.checkpoint_view import CheckpointView
from ray_dcp.view.checkpoint_view import open as open_checkpoint
from ray_dcp.view.naming import few
from ray_dcp.view.run_view import open_run
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
@click.option("--strip-prefix", default="", metavar="TEXT", help="Leave it out before names.")
@click.option(
    "--model-only", is_flag=True, help="Short for --tensor 'model.*' --strip-prefix model."
)
@dry_run
def export(
    source: str,
    target: str,
    kind: str,
    include: tuple[str, ...],
    dtype: str | None,
    strip_prefix: str,
    model_only: bool,
    dry_run: bool,
) -> None:
    """Write the checkpoint SOURCE, a path or RUN@STEP, as TARGET in another format.

    Streaming: memory holds no more than a tensor. Free disk space is checked first.
    safetensors and hf hold tensors alone: what they leave out is listed.
    """
    place, view = place_of(source), checkpoint_at(source)
    if model_only:
        if include or strip_prefix:
            raise InvalidRequestError("give --model-only, or --tensor and --strip-prefix; not both")
        include, strip_prefix = ("model.*",), "model."
        if not any(name.startswith(strip_prefix) for name in view.names):
            tops = few(sorted({name.partition(".")[0] for name in view.names}))
            raise InvalidRequestError(
                f"expected names below 'model.' in {view.url}, found {tops}: choose with --tensor "
                f"and --strip-prefix"
            )
    form = cast(ExportFormat, kind)
    plan = plan_export(view, target, form, include=include, dtype=dtype, strip_prefix=strip_prefix)
    if not dry_run:
        with progress("exporting") as bar:
            export_checkpoint(
                place, target, form, include=include, dtype=dtype, strip_prefix=strip_prefix,
                told=bar,
            )  # fmt: skip
    verb = "would write" if dry_run else "wrote"
    objects = f" and {count_text(plan.num_objects, 'object')}" if plan.num_objects else ""
    lines = [
        f"{verb} {count_text(plan.num_tensors, 'tensor')}{objects}, about "
        f"{size_text(plan.num_bytes)}, as {kind} to {target}"
    ]
    if plan.left_out:
        count = count_text(len(plan.left_out), "object")
        lines.append(f"left out {count}, as {kind} holds tensors alone: {few(plan.left_out)}")
        lines.append("--format torch and --format dcp hold objects, too")
    told({**asdict(plan), "dry_run": dry_run}, *lines)


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
    value = {"source": source, "target": target, "dry_run": dry_run}
    if dry_run:
        told(value, f"would save {source} to {target}")
        return
    with progress("importing") as bar:
        try:
            import_checkpoint(
                source, target, include=include, dtype=dtype, weights_only=not unsafe, told=bar
            )
        except UnsafeCheckpointError as error:
            error.message = error.message.replace("pass weights_only=False", "give --unsafe")
            raise
    view = checkpoint_at(target)
    counts = {"num_tensors": len(view.tensors), "num_objects": len(view.objects)}
    told(
        {**value, **counts, "num_bytes": view.num_bytes},
        f"saved {count_text(len(view.tensors), 'tensor')} and "
        f"{count_text(len(view.objects), 'object')}, {size_text(view.num_bytes)}, to {target}",
    )


@click.command()
@click.argument("source")
@click.argument("target")
@click.option("--verify", is_flag=True, help="Read the copy and compare it with its checksums.")
@dry_run
def cp(source: str, target: str, verify: bool, dry_run: bool) -> None:
    """Copy the checkpoint SOURCE, a path or RUN@STEP, to TARGET, a path or URL.

    SOURCE may be a run: its steps are copied below TARGET, oldest first, with tags and notes. A
    copy appears when all of it is durable; an interrupted one leaves nothing.
    """
    from ray_dcp.runtime.copying import check_free

    found = checkpoints_of(source)
    is_run = len(found) > 1 or found[0][0] != source
    todo: list[tuple[CheckpointView, AnyPlace]] = []
    for name, place in found:
        view = open_checkpoint(place)
        to: AnyPlace = target
        if is_run:
            step = name.removeprefix(f"{source.rstrip('/')}/")
            to = place_below(absolute_target(target), step)
        check_free(open_storage(to))
        todo.append((view, to))
    num_files, num_bytes = map(sum, zip(*(_planned(view) for view, _ in todo), strict=True))
    value = {"source": source, "target": target, "num_files": num_files, "num_bytes": num_bytes}
    value |= {"num_checkpoints": len(todo), "dry_run": dry_run}
    what = f"{count_text(len(todo), 'step')} of " if is_run else ""
    if dry_run:
        size = f"{what}{count_text(num_files, 'file')}, {size_text(num_bytes)}"
        told(value, f"would copy {size}, to {target}")
        return
    lines, problems = list[str](), list[str]()
    for view, to in todo:
        with progress("copying") as bar:
            made = copy_checkpoint(view, to, told=bar)
        if verify:
            with progress("verifying") as bar:
                problems += [f"damaged: {problem}" for problem in made.verify().problems]
    if is_run:
        _copy_marks(source, target, [view.url.rpartition("/")[2] for view, _ in todo])
    lines.append(f"copied {what}{size_text(num_bytes)} to {target}")
    if verify:
        lines += problems or ["ok"]
    told({**value, "problems": problems}, *lines)
    if problems:
        sys.exit(1)


def _planned(view: CheckpointView) -> tuple[int, int]:
    """Returns files and bytes of a checkpoint with its items."""
    from ray_dcp.runtime.copying import plan_copy

    folders = items_of(view.storage, view.checkpoint)
    items = [open_checkpoint(place_below(view.place or view.url, one)) for one in folders]
    plans = [plan_copy(one.storage, one.checkpoint) for one in (view, *items)]
    return sum(plan.num_files for plan in plans), sum(plan.num_bytes for plan in plans)


def _copy_marks(source: str, target: str, names: Sequence[str]) -> None:
    """Gives the steps of a copied run the tags and notes of the others."""
    run = open_run(Target(target))
    for step in open_run(Target(source)):
        if step.name in names and step.tags:
            run = run.tag(step.name, *step.tags)
        if step.name in names and step.note:
            run = run.annotate(step.name, step.note)
