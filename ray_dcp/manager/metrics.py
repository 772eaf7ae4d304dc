"""The metrics of a step, as they are checked before they are recorded."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ray_dcp.errors import InvalidRequestError
from ray_dcp.manager.retention import RetentionPolicy, rankings


def beyond_floats(name: str) -> InvalidRequestError:
    """Returns the error of a metric that no float can hold."""
    return InvalidRequestError(
        f"the metric {name!r} must be a number that a float can hold, but is beyond "
        f"{sys.float_info.max:.3g}; give its logarithm",
        key=name,
    )


def check_metrics(
    metrics: Mapping[str, Any] | None, policy: RetentionPolicy | None
) -> dict[str, float]:
    """Returns the metrics of a step as numbers.

    Args:
        metrics: Numbers by name, or values that `float` accepts, such as a tensor of one element.
            None states that the step has no such metric; it is left out.
        policy: Policy whose `BestN` metrics are required.

    Raises:
        InvalidRequestError: `metrics` is no mapping; a metric is not a number; or one that the
            policy ranks by is missing. NaN ranks below every number: a training that diverged goes
            on saving.

    Examples:
        >>> from ray_dcp.manager import BestN
        >>> check_metrics({"loss": 1}, BestN(2, "loss"))
        {'loss': 1.0}
        >>> check_metrics({"loss": None}, BestN(2, "loss"))
        {}
        >>> check_metrics({}, BestN(2, "loss"))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ray_dcp.errors.InvalidRequestError: BestN(n=2, metric='loss', mode='min') ranks by ...
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise InvalidRequestError(
            f"metrics must be a dict of names to numbers, but is {metrics!r}", key="metrics"
        )
    found: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        if not isinstance(name, str) or not name:
            raise InvalidRequestError(
                f"metrics must have texts as names, but one is {name!r}", key="metrics"
            )
        if value is None:
            continue
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidRequestError(
                f"the metric {name!r} must be a number, but is {value!r}", key=name
            ) from error
        except OverflowError as error:
            raise beyond_floats(name) from error
    for ranking in (one for one in rankings(policy) if not one.later):
        if ranking.metric not in (metrics or {}):
            raise InvalidRequestError(
                f"{ranking!r} ranks by {ranking.metric!r}, which is missing (there are: "
                f"{', '.join(sorted(found)) or 'none'}). Give "
                f"save(..., metrics={{{ranking.metric!r}: value}}), or use a retention without it",
                key=ranking.metric,
            )
    return found
