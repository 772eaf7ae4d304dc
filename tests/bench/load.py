"""Loads beside their limit; over all pairs of layouts, bytes read over bytes that are needed."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as stock

import ray_dcp
from ray_dcp.runtime.worker_group import WorkerGroup
from tests.bench import single, table_parts
from tests.bench.measure import drop_cache, state_of
from tests.support import layouts
from tests.support.servers.s3 import fresh_place, server_on_memory_disk

WORLDS = (1, 2, 3, 4, 8)
SHAPES = ((2048, 1024), (1024, 3000), (257, 129), (16, 65536))
"""Of the layout pairs: 24 MB, so that chunks have the checksum blocks of real ones."""


def load(directory: str | None, most_ranks: int) -> int:
    """Prints all tables; returns how many loads gave wrong values."""
    warnings.simplefilter("ignore")
    root = Path(tempfile.mkdtemp(prefix="load-", dir=directory))
    try:
        _beside_the_limit(root)
        table_parts.print_table(
            ((1024, 1000, "irregular"), (10240, 300, "regular"), (10240, 300, "stages"))
        )
        return _pairs(root, most_ranks) if most_ranks else 0
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _beside_the_limit(root: Path) -> None:
    """One process: ours, stock DCP, and `preadv` of as many bytes, which is the limit."""
    state = state_of()
    ray_dcp.save(state, checkpoint_id=str(root / "ours"), no_dist=True)
    stock.save(state, checkpoint_id=str(root / "stock"), no_dist=True)
    single.raw_write(root / "raw", sum(t.nbytes for t in state.values()))
    single.compare_loads("1.4 GB in 243 tensors", state, root, rounds=5)
    for name in ("ours", "stock"):
        shutil.rmtree(root / name)
    (root / "raw").unlink()


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
            if world_size == min(4, worlds[-1]):
                wrong += _sharing(ranks, root, unique)
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


def _sharing(ranks: WorkerGroup, root: Path, unique: int) -> int:
    """Loads replicas on all ranks of this machine, from a disk and an S3 server, shared or not."""
    print(
        f"\non Ray: {ranks.world_size} ranks load the same {unique / 1e6:.0f} MB, medians of 3"
        f"   (load average {os.getloadavg()[0]:.1f})\n"
        f"  {'':42}{'slowest s':>10}{'read / unique':>15}{'from the disk':>15}"
    )
    wrong = 0
    servers = server_on_memory_disk()
    places: dict[str, Any] = {
        "local disk, cold": str(root / "replicas"), "S3 on this machine": fresh_place(next(servers))
    }  # fmt: skip
    try:
        for name, place in places.items():
            ranks.run(layouts.save_layout, place, "row", SHAPES)
            for share in (False, True, "auto"):
                found = []
                for _ in range(3):
                    drop_cache(root)
                    before = sum(ranks.run(_bytes_from_disk))
                    loaded = ranks.run(layouts.load_layout, place, "replicated", share, SHAPES)
                    from_disk = sum(ranks.run(_bytes_from_disk)) - before
                    wrong += sum(len(each.wrong) for each in loaded)
                    found.append((max(each.seconds for each in loaded), loaded[0].read, from_disk))
                seconds, read, from_disk = sorted(found)[1]
                print(
                    f"  {f'{name}, share_reads={share!r}':42}{seconds:10.3f}{read / unique:15.3f}"
                    f"{from_disk / unique:15.3f}"
                )
        shutil.rmtree(root / "replicas")
    finally:
        servers.close()
    return wrong


def _bytes_from_disk() -> int:
    """Returns the bytes that devices have read for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
