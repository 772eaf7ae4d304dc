"""What ends processes that tests left ends those alone."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest

from tests import leftovers as leaks
from tests.polling import eventually, lives, session_members


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
