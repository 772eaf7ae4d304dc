"""Loads between layouts on real Ray ranks: bytes read over bytes that are needed."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from ray_dcp.worker_group import WorkerGroup
from tests.support import layouts

WORLDS = (1, 2, 3, 4, 8)
SHAPES = ((2048, 1024), (1024, 3000), (257, 129), (16, 65536))
"""Of the layout pairs: 24 MB, so that chunks have the checksum blocks of real ones."""


def load(directory: str | None, most_ranks: int) -> int:
    """Prints the table; returns how many loads gave wrong values."""
    warnings.simplefilter("ignore")
    root = Path(tempfile.mkdtemp(prefix="load-", dir=directory))
    try:
        return _pairs(root, most_ranks)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _title(title: str, worlds: Sequence[int]) -> None:
    print(f"\n{title}; from -> to")
    print(f"  {'':24}" + "".join(f"{f'{w} ranks':>17}" for w in worlds))
    print(f"  {'':24}" + f"{'shared':>9}{'alone':>8}" * len(worlds))


def _pairs(root: Path, most_ranks: int) -> int:
    """Saves in each layout and loads in each other, on real Ray ranks."""
    worlds = [w for w in WORLDS if w <= most_ranks]
    unique = sum(4 * rows * columns for rows, columns in SHAPES)
    wrong = 0
    worst: dict[str, float] = {}
    _title("on Ray: bytes that the whole job read / bytes that it needs at least once", worlds)
    rows: dict[tuple[str, str], list[str]] = {}
    with WorkerGroup(worlds[-1]) as ranks:
        for world_size in reversed(worlds):
            ranks.resize(world_size)
            for source in layouts.LAYOUTS:
                place = str(root / f"{source}-{world_size}")
                ranks.run(layouts.save_layout, place, source, SHAPES)
                for target in layouts.LAYOUTS:
                    cell = ""
                    for share, width in ((True, 9), (False, 8)):
                        found = ranks.run(layouts.load_layout, place, target, share, SHAPES)
                        wrong += sum(len(each.wrong) for each in found)
                        ratio = found[0].read / unique
                        worst["shared" if share else "alone"] = max(
                            ratio, worst.get("shared" if share else "alone", 0.0)
                        )
                        cell += f"{ratio:{width}.3f}"
                    rows.setdefault((source, target), []).insert(0, cell)
                shutil.rmtree(place)
    for (source, target), cells in rows.items():
        print(f"  {f'{source} -> {target}':24}" + "".join(cells))
    print(
        f"  {len(rows) * len(worlds)} pairs, {wrong} wrong; worst, shared: {worst['shared']:.3f}, "
        f"each alone: {worst['alone']:.3f}"
    )
    return wrong
