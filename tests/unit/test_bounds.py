"""Bounds of waiting: where they are, what is said of each, and which must outlive which."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from ray_dcp.commit_protocol import liveness
from ray_dcp.core import bounds
from ray_dcp.io import lease_holders
from ray_dcp.job import coordinator
from ray_dcp.session import heartbeat, socket_coordinator
from ray_dcp.stage import stager

PACKAGE = Path(bounds.__file__).parents[1]

NAMES = [name for name in vars(bounds) if name.endswith("_S")]

RAY_FREES_S = 1.0
"""How often Ray frees objects, by default (`free_objects_period_milliseconds`)."""


def documented() -> dict[str, str]:
    """Returns the text below each constant of the module."""
    body = ast.parse(Path(bounds.__file__).read_text()).body
    return {
        one.targets[0].id: ast.literal_eval(below.value)
        for one, below in pairwise(body)
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def test_each_bound_says_since_when_it_counts_until_when_and_what_happens_then():
    found = documented()
    assert list(found) == NAMES
    for name, text in found.items():
        # "The same" differs from the one above in what it says.
        assert re.match(r"The same |Since .+? until .+?;\s.*then\s", text, re.S), name


def imports() -> Iterator[tuple[str, str, str]]:
    """Yields module, home and name of each time that a module imports from another one."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                for one in node.names:
                    if re.fullmatch(r"_?[A-Z][A-Z0-9_]*_S", one.name):
                        yield str(path.relative_to(PACKAGE)), node.module or "", one.name


def test_a_time_on_which_several_modules_count_is_a_bound():
    homes = {
        (module, home, name)
        for module, home, name in imports()
        if home != bounds.__name__
        if module.split("/")[0] != home.split(".")[1]  # one room may share a pause
    }
    assert homes == set()


def test_each_bound_is_used():
    text = "".join(
        path.read_text() for path in PACKAGE.rglob("*.py") if path != Path(bounds.__file__)
    )
    assert [name for name in NAMES if not re.search(rf"\bbounds\.{name}\b", text)] == []


@pytest.mark.parametrize(
    ("shorter", "longer"),
    [
        # The error of a rank comes before its absence is noticed, and the coordinator's error
        # before the rank gives up by itself.
        (bounds.LOST_ERRORS_S, bounds.ERRORS_S),
        (bounds.ERRORS_S, bounds.STEP_GRACE_S),
        (bounds.STEP_GRACE_S, bounds.MARGIN_S),
        (bounds.UNWIND_S, bounds.OWN_DEADLINE_S),
        # A warning comes before the failure.
        (bounds.LONG_WAIT_S, bounds.OUT_OF_REACH_S),
        (bounds.LONG_WAIT_S, bounds.STAGER_START_S),
        (bounds.LONG_WAIT_S, bounds.FIRST_CALL_S),
        # Several calls are tried before an actor counts as out of reach, and several looks taken.
        (2 * bounds.REACHED_S, bounds.OUT_OF_REACH_S),
        (2 * bounds.SLICE_S, bounds.CALLS_END_S),
        (2 * bounds.ROOM_LOOK_S, bounds.ROOM_OTHERS_S),
        # What waits for another wait outlives it.
        (bounds.GATHER_S, bounds.GATHERER_ANSWER_S),
        (bounds.SHARE_TIMEOUT_S, bounds.TAKE_TIMEOUT_S),
        (bounds.DELETION_END_S, bounds.CLOSE_S),
        (bounds.STAGER_ANSWER_S, bounds.STAGER_START_S),
        (bounds.STAGER_START_S, bounds.WARM_S),
        (bounds.PEER_S, stager.LOOK_S),
        (bounds.NEW_S, bounds.PRESENT_S),
        (RAY_FREES_S, bounds.LINGER_S),
        # An actor outlives the pause between two ranks, and what it keeps outlives the actor's.
        (bounds.JOIN_S, bounds.ACTOR_LEASE_S),
        (bounds.AFTER_RANKS_S, bounds.KEPT_S),
        (bounds.ACTOR_LEASE_S, bounds.KEPT_S),
        # Rank 0 closes a connection before the other end gives it up, which then tries again; a
        # rank whose connection closed tries at least once before it counts as dead.
        (bounds.STRANGER_S, bounds.SERVED_S),
        (bounds.SERVED_S, bounds.HANDSHAKE_S),
        (bounds.HANDSHAKE_S, bounds.JOIN_S),
        (1.5 * socket_coordinator.PAUSE_S, bounds.RETURN_S),
        # Heartbeats and renewals come several times within what they are to prevent.
        (3 * liveness.beat_interval_s(bounds.LEFT_TIMEOUT_S), bounds.LEFT_TIMEOUT_S),
        (3 * heartbeat.TICK_S, bounds.LEFT_TIMEOUT_S),
        (2 * bounds.LEASE_S / lease_holders.BEATS, bounds.LEASE_S),
        (bounds.REFUSED_S, bounds.RETRY_S),
        # Two calls to all ranks fit while they are held; a driver's death is seen while another
        # one waits for the answer; replicas wait for less than what they replace.
        (2 * bounds.WORKER_ANSWER_S, bounds.HOLD_S),
        (2 * coordinator.WATCH_S, bounds.DRIVER_END_S),
        (bounds.DRIVER_END_S, bounds.JOB_ANSWER_S),
        (bounds.REPLICA_STAGED_S, bounds.GROUP_STAGED_S),
        (bounds.FIRST_ANSWER_S, bounds.RETRY_S),
    ],
)
def test_what_must_outlive_another_wait_does(shorter: float, longer: float):
    assert 0 < shorter < longer
