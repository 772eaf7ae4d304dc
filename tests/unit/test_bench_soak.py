"""The detectors of the soak: each is shown something bad, and something that only looks so."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest

from ray_dcp.options import SaveOptions
from tests.bench import soak_leaks as leaks
from tests.bench.soak_ledger import DAMAGED, NOTHING, TORN, Ledger
from tests.numpy_ranks import save, state_of
from tests.polling import eventually, lives, session_members


def ledger_of(*saves: tuple[int, list[str]]) -> Ledger:
    ledger = Ledger()
    for step, reports in saves:
        ledger.begin("p", step)
        ledger.end("p", step, reports)
    return ledger


# The ledger


COMMITTED = (1, ["committed"] * 3), (2, ["committed"] * 3)
FAILED = (1, ["committed"]), (2, ["failed", "unknown"])


@pytest.mark.parametrize(
    ("saves", "seen", "kind"),
    [
        (COMMITTED, 2, None), (COMMITTED, 1, "lost"), (COMMITTED, NOTHING, "lost"),
        (COMMITTED, DAMAGED, "lost"), (((1, []),), TORN, "torn"),
        (FAILED, 1, None), (FAILED, 2, "appeared"),
        (((1, ["unknown"]), (2, ["committed"])), 1, "lost"),
    ],
)  # fmt: skip
def test_what_may_load_is_what_was_told(saves, seen, kind):
    found = ledger_of(*saves).judge("p", seen)
    assert (found and found.kind) == kind


@pytest.mark.parametrize("reports", [[], ["unknown"], ["unknown", "unknown"]])
def test_a_step_of_which_nothing_is_known_may_stand_but_not_come_and_go(reports):
    ledger = ledger_of((1, ["committed"]), (2, reports))
    assert ledger.possible("p") == {1, 2}
    assert ledger.judge("p", 1) is None
    assert ledger.judge("p", 2) is None
    assert ledger.judge("p", 1).kind == "lost"


# Files


@pytest.mark.parametrize("container", ["torch_save", "safetensors"])
def test_only_files_that_nothing_names_are_leaked(tmp_path, container):
    save(state_of(1), 2, str(tmp_path), options=SaveOptions(container=container))
    assert leaks.leaked_files(tmp_path) == []
    (tmp_path / "__0_9.0123456789abcdef.distcp").write_bytes(b"left")
    (tmp_path / "manifest-00000099.txt").write_bytes(b"left")
    assert leaks.leaked_files(tmp_path) == [
        "__0_9.0123456789abcdef.distcp", "manifest-00000099.txt"
    ]  # fmt: skip


# Processes and memory


@contextmanager
def started(**environment: str):
    """Starts two processes, one the child of the other, in a session of their own."""
    code = "import subprocess as s, sys; s.run([sys.executable, '-c', 'input()'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **environment}, start_new_session=True,
        stdin=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert eventually(lambda: len(session_members(process.pid)) == 2)
        yield sorted(session_members(process.pid))
    finally:
        # Careful: by its own handle, and not by what the code under test finds.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_only_processes_that_bear_the_mark_and_began_later_are_ended():
    value = secrets.token_hex(8)
    with started(SOAK_TEST=value) as ours, started() as others:
        # Only pids of this test are handed over: what a mistake would kill are these alone.
        ended = leaks.end_all([*ours, *others], f"SOAK_TEST={value}")
        assert sorted(ended) == ours
        assert [pid for pid in (*ours, *others) if lives(pid)] == others
    with started(SOAK_TEST=value) as ours, pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaks, "born", lambda pid: 5)
        assert leaks.end_all(ours, f"SOAK_TEST={value}") == []


@pytest.mark.parametrize("mark", ["", "SOAK_TEST", "SOAK_TEST=", "SOAK_TEST=1"])
def test_a_mark_that_others_may_bear_ends_nobody(mark):
    with pytest.raises(ValueError, match="at least 8 characters"):
        leaks.end_all([], mark)
