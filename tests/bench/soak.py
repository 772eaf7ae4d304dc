"""Saves for many minutes while ranks and coordinators are killed, and counts what goes wrong.

Ranks of a real Ray save every second onto rotating checkpoint ids. What was promised must be
true at the end: nothing torn, nothing lost, nothing that failed appears, nothing is left behind.
What it does is in `soak_run`, what a state looks like in `soak_programs`, what may load in
`soak_ledger`, what counts as left behind in `soak_leaks`.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import ray

from ray_dcp.runtime.actor_names import LEASE_S
from tests.bench import soak_leaks as leaks
from tests.bench import soak_programs as programs
from tests.bench.soak_run import LITTER, SoakOptions, SoakRun

T = TypeVar("T", bound=Collection[object])

MARKER = "RAY_DCP_SOAK"
"""Environment variable that all processes of a soak have."""

RAY_SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""As for the tests: no token in the home directory, and only we kill."""

RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Processes of Ray that are no actors."""

GONE_WITHIN_S = LEASE_S + 30.0
"""How long actors and processes may take to leave at the end: stagers stay for their lease."""

SABOTAGED_GONE_WITHIN_S = 20.0
"""The same where one stays on purpose."""


def soak(options: SoakOptions) -> int:
    """Returns 0 when nothing went wrong, or, under sabotage, when all of it was found."""
    marker = secrets.token_hex(8)
    os.environ.update({**RAY_SETTINGS, MARKER: marker})
    before = leaks.shared_memory()
    # Why /tmp and short: the paths of Ray's sockets below it must stay under 107 bytes.
    ray_directory = tempfile.mkdtemp(prefix="sk", dir="/tmp")
    root = Path(tempfile.mkdtemp(prefix="soak-", dir=options.path))
    run = SoakRun(options, root, f"{MARKER}={marker}")
    within_s = SABOTAGED_GONE_WITHIN_S if options.sabotage else GONE_WITHIN_S
    print(f"soak: seed {options.seed}, {options.minutes:g} min, saves in {root}", flush=True)
    try:
        ray.init(
            num_cpus=8, object_store_memory=256 << 20, include_dashboard=False,
            log_to_driver=False, configure_logging=False, namespace="soak",
            _temp_dir=ray_directory,
        )  # fmt: skip
        try:
            run.run()
            run.note("leaked actors", _left(lambda: _actors(run.mark), within_s))
        finally:
            run.end()
            ray.shutdown()
        left = _left(lambda: leaks.marked(run.mark), within_s)
        run.note("leaked processes", [f"{pid} {command[:100]}" for pid, command in left.items()])
        shared = leaks.leaked_shared_memory(before)
        # What another soak leaves on purpose is none of ours.
        others = [name for name in shared if name.startswith(LITTER) and name != run.litter_name]
        run.note("leaked shared memory", sorted({*shared} - {*others}))
    finally:
        leaks.end_all(leaks.marked(run.mark), run.mark)
        for path in (ray_directory, root, *run.litter):
            shutil.rmtree(path, ignore_errors=True) if Path(path).is_dir() else Path(path).unlink()
    return run.verdict()


def _actors(mark: str) -> list[str]:
    """Returns the named actors, and processes of other actors, that there are."""
    named = ray.util.list_named_actors(all_namespaces=True)
    found = [f"{actor['namespace']}/{actor['name']}" for actor in named]
    for pid, command in leaks.marked(mark).items():
        if command.startswith("ray::") and not command.startswith(RAYS_OWN):
            found.append(f"{command} (pid {pid})")
    return found


def _left(look: Callable[[], T], within_s: float) -> T:
    """Returns what is still there when all had time to leave."""
    end_s = time.monotonic() + within_s
    while (found := look()) and time.monotonic() < end_s:
        time.sleep(0.5)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Says what the command line may ask for."""
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--saver", choices=sorted(programs.SAVERS), default="sync")
    parser.add_argument(
        "--sabotage", action="store_true", help="do what must not happen; exit 0 if all is found"
    )


def command(given: argparse.Namespace) -> int:
    """Soaks as a command line says, and returns the exit status."""
    return soak(
        SoakOptions(
            minutes=given.minutes,
            seed=given.seed,
            path=given.dir,
            ranks=given.ranks,
            saver=given.saver,
            strikes=0.0 if given.sabotage else SoakOptions.strikes,
            sabotage=given.sabotage,
        )
    )
