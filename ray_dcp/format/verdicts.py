"""Verdicts on steps: which name they are given by, and what a step's metrics and tags say.

The name by which the writer of a run trusts steps is that of an empty file in the shared folder of
the run, encoded as names of recorded metrics are: `trust/eval!5fok`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from ray_dcp.format.recorded_metrics import decoded_name, encoded_name

TRUST = "trust/"


def trust_key(name: str) -> str:
    """Returns the key, in the shared folder, of the name by which a run trusts steps.

    Raises:
        InvalidRequestError: The name is too long.

    Examples:
        >>> trust_key("eval_ok"), trusted_by([trust_key("eval_ok")])
        ('trust/eval!5fok', 'eval_ok')
    """
    return f"{TRUST}{encoded_name(name, 'trust')}"


def trusted_by(keys: Iterable[str]) -> str:
    """Returns the name by which a run trusts steps; "" if none is recorded.

    Args:
        keys: What lies in the shared folder.
    """
    for key in sorted(keys):
        if key.startswith(TRUST):
            with suppress(ValueError):  # renamed by another program
                return decoded_name(key.removeprefix(TRUST))
    return ""


def verdict_in(name: str, metrics: Mapping[str, float], tags: Collection[str]) -> bool | None:
    """Returns the verdict on a step by a name; None if it has none.

    Args:
        name: Name of a tag or a metric. A step with the tag is trusted. Else the metric decides: 0
            and NaN are verdicts against the step, other numbers are for it.
        metrics: Metrics of the step.
        tags: Tags of the step.

    Examples:
        >>> verdict_in("ok", {}, ["ok"]), verdict_in("ok", {"ok": 0.0}, [])
        (True, False)
        >>> verdict_in("ok", {"loss": 0.5}, ["release"]) is None
        True
    """
    if name in tags:
        return True
    value = metrics.get(name)
    return None if value is None else not math.isnan(value) and value != 0
