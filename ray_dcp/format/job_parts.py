"""`PartRecord`: what a committed step of a job says of each of its parts.

The small checkpoint that commits a step has a value "job": this text, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ray_dcp.core.json_text import to_json
from ray_dcp.errors import CheckpointError, DamagedCheckpointError

KEY = "job"
"""Name of the value in the small checkpoint of a step."""

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class PartRecord:
    """One part of a committed step."""

    attempt: str
    """Attempt that committed the part."""
    version: int | None = None
    """The version that was given with it."""
    kept_from: int | None = None
    """The step whose part this is, if it was kept."""
    is_value: bool = False
    """Whether it is not a state dict itself, but has one under the name "value"."""


def encode_parts(parts: Mapping[str, PartRecord]) -> str:
    """Returns the text of the parts of a step.

    Examples:
        >>> parts = {"policy": PartRecord(attempt="0123456789abcdef", version=7)}
        >>> decode_parts(encode_parts(parts)) == parts
        True
    """
    told = {"version": _VERSION, "parts": {name: asdict(one) for name, one in parts.items()}}
    return to_json(told, sort_keys=True)


def decode_parts(text: object) -> dict[str, PartRecord]:
    """Returns the parts that `encode_parts` encoded.

    Raises:
        CheckpointError: A newer ray_dcp wrote the text.
        DamagedCheckpointError: It is no such text.
    """
    try:
        found = json.loads(text)  # type: ignore[arg-type]
        version, parts = found["version"], found["parts"]
        if version == _VERSION:
            return {name: PartRecord(**one) for name, one in parts.items()}
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"expected the parts of a job's step, found {text!r:.100}: {error}", key=KEY
        ) from error
    raise CheckpointError(
        f"expected parts of a job's step in version {_VERSION}, found version {version!r}; upgrade "
        f"ray_dcp",
        key=KEY,
    )
