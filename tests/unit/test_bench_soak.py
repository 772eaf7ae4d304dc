"""The detectors of the soak: each is shown something bad, and something that only looks so."""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import ray_dcp
from ray_dcp.options import SaveOptions
from tests.bench import soak_leaks as leaks
from tests.bench.soak_ledger import DAMAGED, NOTHING, TORN, Ledger
from tests.bench.soak_strikes import KINDS, Strike, Striker, choose
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


@pytest.mark.parametrize(
    ("saves", "seen", "kind"),
    [
        (COMMITTED, 1, None), (COMMITTED, 7, "lost"), (COMMITTED, DAMAGED, "lost"),
        (((1, []),), TORN, "torn"), (FAILED, 2, "appeared"),
    ],
)  # fmt: skip
def test_stock_dcp_may_see_an_earlier_step_but_none_that_was_never_saved(saves, seen, kind):
    found = ledger_of(*saves).judge_older("p", seen)
    assert (found and found.kind) == kind


@pytest.mark.parametrize("reports", [[], ["unknown"], ["unknown", "unknown"]])
def test_a_step_of_which_nothing_is_known_may_stand_but_not_come_and_go(reports):
    ledger = ledger_of((1, ["committed"]), (2, reports))
    assert ledger.possible("p") == {1, 2}
    assert ledger.judge("p", 1) is None
    assert ledger.judge("p", 2) is None
    assert ledger.judge("p", 1).kind == "lost"


def test_one_rank_that_was_told_committed_counts_and_two_stories_are_noticed():
    ledger = ledger_of((1, ["unknown", "committed"]))
    assert ledger.possible("p") == {1}
    assert not ledger.disagree(["unknown", "committed"])
    assert ledger.disagree(["failed", "committed"])
    assert ledger_of((1, ["failed", "committed"])).possible("p") == {1}


def test_after_a_delete_nothing_stands_and_after_one_that_failed_either():
    ledger = ledger_of((1, ["committed"]))
    ledger.begin_delete("p")
    ledger.end_delete("p", done=False)
    assert ledger.possible("p") == {0, 1}
    ledger.end_delete("p", done=True)
    assert ledger.judge("p", NOTHING) is None
    assert ledger.judge("p", 1).kind == "lost"


def test_a_reader_beside_saves_may_see_all_that_stood_meanwhile_and_no_more():
    ledger = ledger_of((1, ["committed"]), (2, ["failed"]))
    watched = ledger.watch("p")
    for step in (3, 4):
        ledger.begin("p", step)
        ledger.end("p", step, ["committed"])
    ledger.begin("other", 5)
    ledger.unwatch(watched)
    ledger.begin("p", 6)
    assert watched == {1, 3, 4}
    assert ledger.judge("p", 3, watched) is None
    assert ledger.possible("p") == {4, 6}
    assert ledger.judge("p", 2, watched).kind == "appeared"
    assert ledger.judge("p", 6, watched).kind == "lost"


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


def test_after_a_delete_only_its_record_may_stay(tmp_path):
    save(state_of(1), 2, str(tmp_path))
    ray_dcp.delete(tmp_path)
    assert leaks.leaked_files(tmp_path) == []
    (tmp_path / "chunks.0123456789abcdef.table").write_bytes(b"left")
    assert leaks.leaked_files(tmp_path) == ["chunks.0123456789abcdef.table"]


def test_temporary_files_are_found_at_any_depth(tmp_path):
    (tmp_path / "c" / "sub").mkdir(parents=True)
    (tmp_path / "c" / "sub" / ".tmp-012345-x").write_bytes(b"")
    (tmp_path / "c" / "tmp-x").write_bytes(b"")
    assert leaks.leaked_temp_files(tmp_path) == ["c/sub/.tmp-012345-x"]


def test_shared_memory_that_nobody_holds_is_leaked(tmp_path):
    (tmp_path / "old").write_bytes(b"")
    before = leaks.shared_memory(tmp_path)
    (tmp_path / "left").write_bytes(b"")
    with (tmp_path / "in use").open("wb"):
        assert leaks.leaked_shared_memory(before, tmp_path) == ["left"]
    assert leaks.leaked_shared_memory(before, tmp_path) == ["in use", "left"]


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


def test_processes_are_found_by_their_mark():
    value = secrets.token_hex(8)
    with started(SOAK_TEST=value) as ours, started(SOAK_TEST=f"{value}0"):
        assert sorted(leaks.marked(f"SOAK_TEST={value}")) == ours
        assert all("input()" in command for command in leaks.marked(f"SOAK_TEST={value}").values())
    assert eventually(lambda: leaks.marked(f"SOAK_TEST={value}") == {})


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


def test_the_memory_of_a_process_is_measured():
    before = leaks.resident_bytes(os.getpid())
    block = np.ones(8 << 20)
    grown = leaks.resident_bytes(os.getpid()) - before
    assert 0.8 * block.nbytes < grown < 1.5 * block.nbytes
    assert leaks.resident_bytes(2**22 + 1) is None


def log_of(grown_per_s: float, seconds: int = 200) -> leaks.MemoryLog:
    """Returns samples of one process: a jump while it warms up, noise, and a steady growth."""
    log = leaks.MemoryLog(warm_up_s=30, least_s=60)
    noise = random.Random(1)
    for now_s in range(0, seconds, 2):
        warm = min(now_s, 25) * 10e6
        size = round(300e6 + warm + grown_per_s * now_s + noise.uniform(-5e6, 5e6))
        log.take(now_s, {"rank": 7}, lambda pid, size=size: size)
    return log


def test_memory_that_only_grows_while_warming_up_or_for_a_moment_is_no_leak():
    assert log_of(5e6, seconds=60).growths() == []
    assert log_of(0).leaks(per_min=4 << 20, at_least=24 << 20) == []
    assert abs(log_of(0).growths()[0].bytes_per_min) < 2e6


def test_memory_that_grows_steadily_is_a_leak():
    (growth,) = log_of(0.5e6).leaks(per_min=4 << 20, at_least=24 << 20)
    assert growth.name == "rank 7"
    assert growth.bytes_per_min == pytest.approx(30e6, rel=0.1)
    assert growth.seconds == pytest.approx(168, abs=4)


def test_a_strike_hits_the_processes_of_its_soak_and_no_other():
    value = secrets.token_hex(8)
    with started(SOAK_TEST=value) as ours, started() as others:
        striker = Striker(f"SOAK_TEST={value}")
        for pids in (ours, others):
            striker.strike(Strike("all ranks killed", 0.0, 0.0, 0), pids, lambda: None)
        striker.strike(Strike("coordinator frozen", 0.0, 0.0, 0), [], lambda: None)
        striker.stop()
        assert eventually(lambda: not any(map(lives, ours)))
        assert all(map(lives, others))
        assert striker.done == {"all ranks killed": 1, "coordinator frozen": 0}


def test_a_frozen_process_goes_on_when_the_strike_is_over():
    value = secrets.token_hex(8)
    with started(SOAK_TEST=value) as ours:
        striker = Striker(f"SOAK_TEST={value}")
        striker.strike(Strike("rank frozen", 0.0, 600.0, 1), ours, lambda: None)
        assert eventually(lambda: status_of(ours[1]) == "T")
        assert status_of(ours[0]) != "T"
        striker.stop()
        assert eventually(lambda: status_of(ours[1]) != "T")


def status_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_strikes_of_every_kind_are_chosen_and_hit_ranks_that_there_are():
    numbers = random.Random(3)
    strikes = [choose(numbers, 3) for _ in range(300)]
    assert {strike.kind for strike in strikes} == set(KINDS)
    assert {strike.rank for strike in strikes} == {0, 1, 2}
