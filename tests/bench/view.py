"""`python -m tests.bench view`: how long people wait for the command line, against its limits.

Every command is a process of its own, from its start to its end; the fastest of the rounds counts,
as what else the machine does only adds to it.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import big_views
from tests.counting_storage import counted_view

STEPS, TENSORS, PARTS = 1000, 2000, 250


def view(rounds: int, where: str | None) -> int:
    """Prints a table; returns 1 when a limit is missed."""
    with tempfile.TemporaryDirectory(dir=where) as folder:
        root = Path(folder)
        small = big_views.table(20, 4, "0" * 16, files=4)
        for step in range(STEPS):
            attempt = f"{step:016x}"
            big_views.checkpoint(
                root / "run" / f"step-{step:08d}", big_views.table(20, 4, attempt, files=4), attempt
            )
        for name, attempt, changed in (("a", "a" * 16, 0), ("b", "b" * 16, 500)):
            table = big_views.table(TENSORS, PARTS, attempt, changed=changed, files=256)
            big_views.checkpoint(root / "big" / name, table, attempt)
        print(f"{STEPS} steps of {small.num_chunks} chunks; {TENSORS * PARTS} chunks")
        a, b = str(root / "big" / "a"), str(root / "big" / "b")
        command = [sys.executable, "-m", "ray_dcp"]
        cases = [
            ("import ray_dcp", [sys.executable, "-c", "import ray_dcp"], 0.15),
            ("python alone", [sys.executable, "-c", ""], None),
            ("ray-dcp --help", [*command, "--help"], 0.4),
            (f"ls of {STEPS} steps", [*command, "ls", str(root / "run")], 1.0),
            (f"ls of {STEPS} steps, --json", [*command, "ls", "--json", str(root / "run")], 1.0),
            (f"show of {TENSORS * PARTS} chunks", [*command, "show", a], 1.0),
            ("diff of two of them", [*command, "diff", a, b], 2.0),
            ("reshard of it to 8", [*command, "reshard", a, "--to", "8"], None),
        ]  # fmt: skip
        missed = 0
        for name, arguments, limit in cases:
            found = [_run(arguments) for _ in range(max(rounds, 1))]
            seconds, cpu_s = min(wall for wall, _ in found), min(cpu for _, cpu in found)
            told = "" if limit is None else f"limit {limit} s"
            late = limit is not None and seconds > limit
            missed += late
            print(
                f"{name:32} {seconds:6.2f} s, CPU {cpu_s:5.2f} s  {told}"
                f"{'  MISSED' if late else ''}",
                flush=True,
            )
        (first, reads), (second, more) = counted_view(a), counted_view(b)
        told = first.diff(second).counts
        read = reads.payload_bytes + more.payload_bytes
        print(f"that diff: {told}, {read} bytes of data files read")
        missed += read > 0
    return int(missed > 0)


def _run(arguments: list[str]) -> tuple[float, float]:
    """Returns seconds from start to end, and of CPU."""
    # Why: where Python is installed it keeps what it has compiled.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = os.path.join(tempfile.gettempdir(), "rdcp-bench-pycache")
    began_s, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(arguments, stdout=subprocess.DEVNULL, check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began_s, cpu_s
