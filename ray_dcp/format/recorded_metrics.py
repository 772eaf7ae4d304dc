"""Metrics of a step that are recorded after its save, such as those of an evaluation.

They are empty files in the shared folder of the run, whose names have all their data, so that a
listing of the run reads them too:

    metrics/500.0123456789abcdef.1.eval!5floss=0.25
            step     attempt     |  name       value
                                 number: the highest one of a name is valid

The attempt binds a metric to what was evaluated: a step that is saved again has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ray_dcp.errors import InvalidRequestError

_METRICS = "metrics/"
_METRIC_KEY = re.compile(
    r"metrics/(\d{1,18})\.([0-9a-f]{16}|stock)\.(\d{1,9})\.([A-Za-z0-9!-]+)=(.+)"
)
_PLAIN = re.compile(r"[A-Za-z0-9-]")
_MOST_CHARS = 150
"""Longest encoded name. Why: a file name has at most 255 bytes."""


class RecordedMetric(NamedTuple):
    """One metric of a step, as recorded after its save."""

    step: int
    attempt: str
    """Attempt that committed the step; "" for a checkpoint of stock DCP."""
    number: int
    """How many values the metric had before, plus 1."""
    name: str
    value: float

    @property
    def key(self) -> str:
        """Key in the shared folder of the run.

        Raises:
            InvalidRequestError: The name is too long.

        Examples:
            >>> RecordedMetric(500, "0123456789abcdef", 1, "eval_loss", 0.25).key
            'metrics/500.0123456789abcdef.1.eval!5floss=0.25'
        """
        name = encoded_name(self.name, "metrics")
        # Why without a plus: some object stores take it for a space.
        value = repr(float(self.value)).replace("+", "")
        return f"{metrics_of(self.step, self.attempt)}{self.number}.{name}={value}"


def encoded_name(name: str, key: str) -> str:
    """Returns the name of a metric as a part of a file name.

    Args:
        name: The name.
        key: Name of the argument, for the error.

    Raises:
        InvalidRequestError: The name is too long.
    """
    found = "".join(
        letter if _PLAIN.fullmatch(letter) else "".join(f"!{b:02x}" for b in letter.encode())
        for letter in name
    )
    if len(found) > _MOST_CHARS:
        raise InvalidRequestError(
            f"the name of a metric that is recorded after a save must have at most {_MOST_CHARS} "
            f"letters (others count three times), but {name!r} has {len(found)}",
            key=key,
        )
    return found


def decoded_name(text: str) -> str:
    """Returns what `encoded_name` encoded.

    Raises:
        ValueError: It is no result of `encoded_name`.
    """
    head, *rest = text.split("!")
    data = head.encode() + b"".join(bytes.fromhex(part[:2]) + part[2:].encode() for part in rest)
    return data.decode()


def metrics_of(step: int, attempt: str | None = None) -> str:
    """Returns the prefix of the keys of a step's metrics.

    Args:
        step: Number of the step.
        attempt: Attempt that committed it; None for all attempts.
    """
    return f"{_METRICS}{step}." + ("" if attempt is None else f"{attempt or 'stock'}.")


def recorded_in(keys: Iterable[str]) -> list[RecordedMetric]:
    """Returns the metrics among the keys of a shared folder, in the order of their numbers.

    Examples:
        >>> recorded_in(["metrics/7.stock.2.loss=0.5", "metrics/7.stock.1.loss=1.0", "other"])[1]
        RecordedMetric(step=7, attempt='', number=2, name='loss', value=0.5)
    """
    found = []
    for key in keys:
        match = _METRIC_KEY.fullmatch(key) if key.startswith(_METRICS) else None
        if match is None:
            continue
        step, attempt, number, name, value = match.groups()
        try:
            metric = RecordedMetric(
                int(step),
                "" if attempt == "stock" else attempt,
                int(number),
                decoded_name(name),
                float(value),
            )
        except ValueError:
            continue  # renamed by another program
        found.append(metric)
    return sorted(found, key=lambda one: (one.number, one.value))


def latest_values(metrics: Iterable[RecordedMetric]) -> dict[tuple[int, str], Mapping[str, float]]:
    """Returns the valid values by step and attempt, then by name.

    Args:
        metrics: Result of `recorded_in`.
    """
    values: dict[tuple[int, str], dict[str, float]] = {}
    for one in metrics:
        values.setdefault((one.step, one.attempt), {})[one.name] = one.value
    return dict(values)
