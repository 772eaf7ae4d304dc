"""JSON that every parser reads (RFC 8259), which Python's own `json` does not guarantee.

JSON has no NaN and no infinities. As in the JSON of protocol buffers they are the texts `"NaN"`,
`"Infinity"` and `"-Infinity"`, of which `float` makes the numbers again. All that leaves the
program as JSON (what commands print, files) is made by `to_json`.
"""

from __future__ import annotations

import json
import math
from typing import Any

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Text of each number that JSON does not have."""


def to_json(value: Any, **settings: Any) -> str:
    """Returns a value as JSON.

    Args:
        value: What `json.dumps` takes.
        **settings: As for `json.dumps`.

    Raises:
        RecursionError: The value contains itself.
        TypeError: JSON can't hold the value.

    Examples:
        >>> to_json({"loss": float("nan"), "best": [0.5, -float("inf")]})
        '{"loss": "NaN", "best": [0.5, "-Infinity"]}'
    """
    try:
        return json.dumps(value, allow_nan=False, **settings)
    except ValueError:  # of a number, or of a value that contains itself
        return json.dumps(_finite(value), allow_nan=False, **settings)


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
        case dict():
            return {_finite(key): _finite(one) for key, one in value.items()}
        case list() | tuple():
            return [_finite(one) for one in value]
    return value
