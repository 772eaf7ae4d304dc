"""The commands that write beside a checkpoint: `tag` and `metadata`. No torch, no ray."""

from __future__ import annotations

import click

from ray_dcp.cli.output import dry_run
from ray_dcp.cli.places import place_of, step_in_run
from ray_dcp.errors import InvalidRequestError
from ray_dcp.format.run_files import check_note, check_tag
from ray_dcp.store.opening import absolute_target

__all__ = ["metadata", "tag"]


@click.command()
@click.argument("step")
@click.argument("tags", nargs=-1)
@click.option("--remove", is_flag=True, help="Take these tags away.")
@click.option("--note", metavar="TEXT", help="Put a note on the step; '' removes it.")
@dry_run
def tag(step: str, tags: tuple[str, ...], remove: bool, note: str | None, dry_run: bool) -> None:
    """Give STEP, as RUN@500, tags or a note; without any, print what it has.

    A CheckpointManager keeps the steps that have a tag.
    """
    run, found = step_in_run(step)
    for one in tags:
        check_tag(one)
    if note is not None:
        check_note(note)
    if remove and not tags:
        raise InvalidRequestError("which tags are to be removed? Name them behind the step")
    if not tags and note is None:
        for one in found.tags:
            click.echo(one)
        if found.note:
            click.echo(f"note: {found.note}")
        return
    run.check_step(found.name)
    if not dry_run:
        run = run.tag(found.name, *tags, remove=remove) if tags else run
        run = run if note is None else run.annotate(found.name, note)
    verb = "would have" if dry_run else "has"
    if tags:
        click.echo(f"{found.name} {verb} {'no longer ' if remove else ''}{' '.join(tags)}")
    if note is not None:
        click.echo(f"{found.name} {verb} the note {note!r}")


@click.command()
@click.argument("path")
@dry_run
def metadata(path: str, dry_run: bool) -> None:
    """Write the .metadata of the checkpoint at PATH, so that stock DCP can read it.

    For a checkpoint that was saved with SaveOptions(stock_metadata=False), or was copied without
    its dot file.
    """
    from ray_dcp.runtime.metadata_later import write_metadata
    from ray_dcp.view.checkpoint_view import open as open_checkpoint

    place = place_of(path)
    if dry_run:
        view = open_checkpoint(place)
        click.echo(f"would write {view.url}/.metadata of {len(view)} tensors and objects")
    elif write_metadata(absolute_target(place)):
        click.echo(f"stock DCP can read {path}")
    else:
        click.echo(f"{path} was replaced meanwhile by a save that leaves .metadata out")
        raise SystemExit(2)
