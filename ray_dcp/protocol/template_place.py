"""Where the plans of a run are kept, and which are worth it: pure.

A checkpoint's own folder is no place: the next step has another. All steps of a run lie in one
folder, which is where a manager keeps what they share, and `ray-dcp tag` too.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ray_dcp.format.run_files import SHARED_FOLDER
from ray_dcp.options import SaveOptions
from ray_dcp.protocol.messages import Target
from ray_dcp.store.location import split_url, url_below

__all__ = [
    "PLANS_FOLDER",
    "expects_template",
    "is_worth_keeping",
    "of_an_item",
    "place_of_templates",
]

PLANS_FOLDER = f"{SHARED_FOLDER}/plans"

WORTH_CHUNKS = 100_000
"""From so many chunks on, `plan_templates="auto"` keeps plans. *Why*: they take 0.4 s to make from
rows. Below that nobody would thank for a folder beside his checkpoint."""

_OF_A_STEP = re.compile(r".*[0-9]", re.DOTALL)


def place_of_templates(target: Target, options: SaveOptions) -> Target | None:
    """Returns where the templates of a run lie; None where there are to be none.

    Args:
        target: Where a checkpoint is saved.
        options: How.

    Example:
        >>> place_of_templates(Target("s3://bucket/run/step-10"), SaveOptions()).url
        's3://bucket/run/.manager/plans'
        >>> print(place_of_templates(Target("/checkpoints/final"), SaveOptions()))
        None
    """
    if options.plan_templates is False:
        return None
    given = options.plan_templates_in
    if given is not None:
        # Why: credentials of one store are none of another's business.
        same = split_url(given)[0] == split_url(target.url)[0]
        return replace(target, url=given) if same else Target(given)
    scheme, rest = split_url(target.url.rstrip("/"))
    above, _, name = rest.rpartition("/")
    if not above or not name or "::" in scheme:
        return None
    if options.plan_templates == "auto" and _OF_A_STEP.fullmatch(name) is None:
        return None
    start = target.url[: target.url.index(rest)] if scheme else ""
    return replace(target, url=url_below(start + above, PLANS_FOLDER))


def expects_template(target: Target, options: SaveOptions, num_rows: int) -> bool:
    """Tells whether a rank leaves its rows out of its first join, as there may be a template.

    Args:
        target: Where it saves.
        options: How.
        num_rows: Of all ranks, if all hold as many as this one.
    """
    wanted = options.plan_templates is True or num_rows >= WORTH_CHUNKS
    return wanted and place_of_templates(target, options) is not None


def is_worth_keeping(options: SaveOptions, num_chunks: int) -> bool:
    """Tells whether a plan of so many chunks is kept."""
    return options.plan_templates is True or num_chunks >= WORTH_CHUNKS


def of_an_item(step: Target, options: SaveOptions) -> SaveOptions:
    """Returns the options of an item of a step: its templates lie where those of the step would.

    Args:
        step: Folder of the step, in which the item has a folder.
        options: Of the item.

    Example:
        >>> of_an_item(Target("/run/step-7"), SaveOptions()).plan_templates_in
        '/run/.manager/plans'
    """
    place = place_of_templates(step, options)
    whole = place is not None and ("://" in place.url or place.url.startswith("/"))
    if place is None or not whole:
        return replace(options, plan_templates=False)
    return replace(options, plan_templates_in=place.url)
