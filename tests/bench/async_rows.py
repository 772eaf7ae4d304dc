"""The rows of `python -m tests.bench async`: what each compares, its limits, and how it is told."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    key: str
    title: str
    ship: float
    """What is good enough."""
    goal: float
    """What is aimed at; not below `ship` where more is better."""

    def missed(self, value: float) -> bool:
        """Returns whether a value is not good enough."""
        return value < self.ship if self.goal >= self.ship else value > self.ship


ROWS = (
    Row("stall", "steady stall / memcpy into warm memory", 1.25, 1.10),
    Row("first", "first stall / steady stall", 2.0, 1.5),
    Row("lost", "training time lost per save / better peer's", 0.333, 0.2),
    Row("day", "lost in a day with a kill an hour / better peer's", 0.333, 0.25),
    Row("durable", "durable committed bytes/s / raw direct I/O", 0.75, 0.90),
    Row("cpu", "CPU s per GB, all processes", 0.35, 0.20),
    Row("memory", "extra memory / state", 1.2, 1.05),
    Row("restore", "restore from memory after SIGKILL / memcpy", 2.0, 1.25),
    Row("objects", "stall in the object store / memcpy", 1.5, 1.3),
)
KEYS = tuple(row.key for row in ROWS)
_ROW = {row.key: row for row in ROWS}


class Table:
    """Prints rows as they are measured, and keeps them.

    Args:
        json_path: Where to write all of it as JSON; nowhere if None.
    """

    def __init__(self, json_path: str | None = None) -> None:
        self._json_path = json_path
        self._told: list[dict[str, object]] = []

    def note(self, line: str) -> None:
        """Tells something that is not measured."""
        print(f"  {line}", flush=True)
        self._told.append({"note": line})

    def fact(self, name: str, values: Iterable[float], unit: str = "s") -> float:
        """Tells what the rows are made of; returns the median."""
        found = list(values)
        median = statistics.median(found)
        print(
            f"  {name:52}{median:9.3f} {unit}  ({min(found):.3f} to {max(found):.3f})", flush=True
        )
        self._told.append({"fact": name, "unit": unit, "median": median, "values": found})
        return median

    def row(self, key: str, values: float | Sequence[float]) -> None:
        """Tells a row: the median of its values, one of each round."""
        row = _ROW[key]
        found = list(values) if isinstance(values, Sequence) else [values]
        value = statistics.median(found)
        missed = row.missed(value)
        print(
            f"{row.title:52}{value:11.2f}   ship {row.ship:g}, goal {row.goal:g}"
            f"{'   MISSED' if missed else ''}",
            flush=True,
        )
        self._told.append({**asdict(row), "value": value, "missed": missed, "values": found})

    def end(self) -> None:
        """Writes the JSON file."""
        if self._json_path is not None:
            found = {"load_average": os.getloadavg()[0], "told": self._told}
            Path(self._json_path).write_text(json.dumps(found, indent=1))
