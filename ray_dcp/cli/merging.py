"""The command `average`. It imports torch only when it writes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import click

from ray_dcp.cli.output import dry_run, progress, told
from ray_dcp.cli.places import PLACE, Address, address_of, check_answers, kept, run_at
from ray_dcp.errors import CheckpointNotFoundError, InvalidRequestError
from ray_dcp.store.opening import open_storage
from ray_dcp.view.wording import count_text, few, size_text


def _numbers(context: click.Context, option: click.Parameter, value: str | None) -> list[float]:
    try:
        return [float(part) for part in (value or "").split(",") if part]
    except ValueError:
        raise click.BadParameter(f"expected numbers such as 1,1,2, found {value!r}") from None


@click.command()
@click.argument("sources", type=PLACE, nargs=-1, required=True, metavar="SOURCE...")
@click.option("-o", "--out", required=True, metavar="PATH", help="Path or URL of the result.")
@click.option(
    "--weights",
    callback=_numbers,
    metavar="W,W,...",
    help="A number for each source; equal if not given.",
)
@click.option(
    "--ema",
    type=float,
    metavar="DECAY",
    help="Weights 1, DECAY, DECAY**2, ... from the last source back.",
)
@click.option(
    "--last",
    type=click.IntRange(1),
    metavar="N",
    help="SOURCE is a run: average its N newest steps.",
)
@click.option("--dtype", help="What the means are cast to, as bf16 or float32.")
@click.option(
    "--tensor",
    "keys",
    metavar="GLOB",
    multiple=True,
    help="Only names that match; may be given often.",
)
@dry_run
def average(
    sources: tuple[str, ...],
    out: str,
    weights: list[float],
    ema: float | None,
    last: int | None,
    dtype: str | None,
    keys: tuple[str, ...],
    dry_run: bool,
) -> None:
    """Write the weighted mean of the checkpoints SOURCE, paths or RUN@STEP, to PATH.

    Floating-point tensors are averaged in float64. Integers and objects are those of the last
    source. The state of optimizers is left out unless --tensor chooses it; then it is that of the
    last source. Sources may differ in sharding and format; differences in names, shapes and dtypes
    are an error that lists all of them.
    """
    from ray_dcp.averaging import average as average_checkpoints
    from ray_dcp.averaging import decayed, plan_average
    from ray_dcp.runtime.copying import check_free

    if weights and ema is not None:
        raise InvalidRequestError("give --weights or --ema, not both")
    addresses = _newest(sources, last) if last is not None else [address_of(one) for one in sources]
    check_answers(out)
    check_free(open_storage(out))
    numbers = decayed(ema, len(addresses)) if ema is not None else weights or None
    with ExitStack() as stack:
        for address in addresses:
            stack.enter_context(kept(address.place))
        named = zip(addresses, sources if last is None else [""] * len(addresses), strict=True)
        views = [address.open(text) for address, text in named]
        choice: dict[str, Any] = {"weights": numbers, "dtype": dtype, "keys": keys or None}
        if dry_run:
            report = plan_average(views, out, **choice).report
        else:
            with progress("averaging", out) as meter:
                report = average_checkpoints(views, out, **choice, progress=meter)
    lines = [
        f"{'would write' if dry_run else 'wrote'} the mean of {len(views)} checkpoints, "
        f"{count_text(len(report.averaged), 'tensor')}, about {size_text(report.num_bytes)}, to "
        f"{out}",
        *(f"{one['weight']:.4g} x {one['checkpoint']}" for one in report.sources),
    ]
    if report.taken:
        lines.append(f"from the last: {few(report.taken)}")
    if report.left_out:
        lines.append(f"left out: {few(report.left_out)}")
    value = {name: list(getattr(report, name)) for name in ("averaged", "taken", "left_out")}
    about = {"target": out, "num_bytes": report.num_bytes, "dry_run": dry_run}
    told({**about, "sources": [dict(one) for one in report.sources], **value}, *lines)


def _newest(sources: Sequence[str], number: int) -> list[Address]:
    """Returns the newest steps of a run, oldest first.

    Raises:
        CheckpointNotFoundError: There are fewer.
        InvalidRequestError: There is more than one source.
    """
    if len(sources) != 1:
        raise InvalidRequestError(f"--last takes one run, but there are {len(sources)} sources")
    run = run_at(sources[0])
    steps = [one for one in run if one.is_readable and one.step is not None]
    steps = [one for one in steps if "/" not in one.name and one.name != "."]
    if len(steps) < number:
        raise CheckpointNotFoundError(
            f"expected {number} steps in {run.url} that can be read, found {len(steps)}"
        )
    return [
        Address(f"{sources[0].rstrip('/')}/{one.name}", one.path, one) for one in steps[-number:]
    ]
