"""W ranks save, W' ranks load, as real Ray ranks, for all 64 pairs in 1..8; bytes read / needed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from ray_dcp.runtime.worker_group import WorkerGroup
from tests.support.programs import models as programs


def reshard(largest: int, directory: str | None) -> int:
    """Prints a table of bytes read over bytes needed; returns the number of wrong pairs."""
    root = Path(tempfile.mkdtemp(prefix="reshard-", dir=directory))
    failed = 0
    try:
        ratios: dict[tuple[int, int], float] = {}
        with WorkerGroup(1) as ranks:
            for world_size in range(1, largest + 1):
                ranks.resize(world_size)
                ranks.run(programs.save_uneven, str(root / f"w{world_size}"))
            for target in range(largest, 0, -1):
                ranks.resize(target)
                for source in range(1, largest + 1):
                    results = ranks.run(programs.check_uneven, str(root / f"w{source}"))
                    wrong = [name for names, _, _ in results for name in names]
                    failed += bool(wrong)
                    needed, read = results[0][1], results[0][2]
                    ratios[source, target] = read / needed
                    if wrong:
                        print(f"WRONG {source} -> {target}: {wrong}")
        columns = range(1, largest + 1)
        print("bytes read / bytes needed by the whole job; rows: saved on, columns: loaded on")
        print("     " + "".join(f"{target:>7}" for target in columns))
        for source in columns:
            print(f"{source:>5}" + "".join(f"{ratios[source, t]:7.3f}" for t in columns))
        print(f"{len(ratios)} pairs, {failed} wrong, worst ratio {max(ratios.values()):.3f}")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return failed
