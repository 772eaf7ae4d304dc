"""Processes without Ray save over sockets; those that die are named soon, and leave nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import ray_dcp
from tests.support.processes import lives
from tests.support.programs.forks import Programs, plain_environment
from tests.support.programs.socket_rank import HEARTBEAT_S

SCRIPT = ("-m", "tests.support.programs.socket_rank")

SOON_S = 120.0
"""Far less than any timeout of a save; on a quiet machine it takes 0.1 to 0.7 s."""


def told(printed: str) -> dict[str, Any]:
    """Returns what a rank told."""
    (line,) = [line for line in printed.splitlines() if line.startswith("{")]
    return json.loads(line)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_ranks_save_and_load_resharded(num_ranks: int, tmp_path: Path, programs: Programs):
    (own := tmp_path / "tmp").mkdir()
    environment = plain_environment(TMPDIR=str(own))
    ended = programs.run(*SCRIPT, "reshard", str(tmp_path), ranks=num_ranks, env=environment)
    failed = [one for one in ended if one.returncode]
    assert not failed, "\n".join(one.stderr for one in failed)
    for facts in map(told, (one.stdout for one in ended)):
        assert facts["same"]
        assert facts["staging"] == "process"
        assert not facts["key_is_stored"]
        assert not facts["has_ray"]
        assert facts["children"] == []
    assert left_in(own) == []
    for place in ("sync", "async"):
        assert ray_dcp.verify(tmp_path / place).ok
        assert ray_dcp.open(tmp_path / place).world_size == num_ranks


def facts_of(what: str, folder: Path, programs: Programs, ranks: int) -> list[dict[str, Any]]:
    """Returns what the ranks of a program tell that all end well."""
    environment = plain_environment(LOCAL_WORLD_SIZE=str(ranks))
    ended = programs.run(*SCRIPT, what, str(folder), ranks=ranks, env=environment)
    assert [one.returncode for one in ended] == [0] * ranks, "\n".join(o.stderr for o in ended)
    assert "recvValue" not in "".join(one.stderr for one in ended)
    return sorted((told(one.stdout) for one in ended), key=lambda facts: facts["rank"])


def test_ranks_that_do_not_call_are_named_within_the_deadline(tmp_path: Path, programs: Programs):
    first, *others = facts_of("first_call_of_rank_0", tmp_path, programs, 3)
    kind, rank, message = first["alone"]
    assert (kind, rank) == ("DeadlineError", 1)
    assert first["after_s"] < SOON_S
    assert "ranks 1, 2 on " in message
    assert "no_dist=True" in message
    assert [one["all"] for one in (first, *others)] == [["", None, ""]] * 3
    for place, size in (("alone", 1), ("all", 3)):
        assert ray_dcp.open(tmp_path / place).world_size == size


def test_groups_may_make_their_first_saves_in_threads(tmp_path: Path, programs: Programs):
    for facts in facts_of("first_calls_of_threads", tmp_path, programs, 2):
        assert facts["saves"] == [["", None, ""]] * 3
    for number in range(3):
        assert ray_dcp.open(tmp_path / str(number)).world_size == 2


def test_processes_of_torchrun_without_a_group_overwrite_nothing(
    tmp_path: Path, programs: Programs
):
    first, *others = facts_of("without_a_group", tmp_path, programs, 3)
    assert first["save"] == ["", None, ""]
    for rank, facts in enumerate(others, 1):
        kind, named, message = facts["save"]
        assert (kind, named) == ("InvalidRequestError", rank)
        assert "init_process_group" in message
    for facts in (first, *others):
        assert facts["own"] == facts["load"] == ["", None, ""]
        assert any("has no process group" in text for text in facts["warned"])
    assert ray_dcp.open(tmp_path / "step")["w"][...].tolist() == [0.0] * 3
    assert ray_dcp.open(tmp_path / "own-2")["w"][...].tolist() == [2.0] * 3


def left_in(folder: Path) -> list[Path]:
    """Returns what ranks left among the temporary files, but for what torch's compiler has."""
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor")]


def struck(what: str, folder: Path, programs: Programs, num_ranks: int = 3) -> list[dict[str, Any]]:
    """Returns what the ranks tell that were not struck; the victim is ended."""
    victim = int(what.split()[0])
    folder.joinpath("tmp").mkdir()
    with ExitStack() as stack:
        environment = plain_environment(TMPDIR=str(folder / "tmp"), MASTER_ADDR="127.0.0.1")
        port = free_port()
        ranks = [
            programs.start(
                *SCRIPT, what, str(folder),
                env={**environment, "RANK": str(rank), "WORLD_SIZE": str(num_ranks),
                     "MASTER_PORT": str(port)},
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        for one in ranks:
            stack.callback(one.kill)
        stack.callback(end_worker, folder / f"worker-{victim}")
        others = [one for rank, one in enumerate(ranks) if rank != victim]
        facts = [told(one.stdout.read()) for one in others]
        assert [one.wait() for one in others] == [0] * len(others)
        if "freezes" not in what:
            assert ranks[victim].wait() == -signal.SIGKILL
        assert left_in(folder / "tmp") == []
        return facts


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def end_worker(path: Path) -> None:
    # Suppressed: it was not started.
    with suppress(FileNotFoundError, ProcessLookupError):
        pid = int(path.read_text())
        assert lives(pid), "it was to outlive the rank, with all that it inherited"
        os.kill(pid, signal.SIGKILL)


def check_aborted(folder: Path) -> None:
    """Checks that what failed is not there, and what stood before is."""
    assert ray_dcp.verify(folder / "first").ok
    for place in ("second", "third"):
        with pytest.raises(ray_dcp.CheckpointNotFoundError):
            ray_dcp.verify(folder / place)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("when", ["before", "writes"])
def test_a_rank_that_is_killed_is_named_soon(
    when: str, mode: str, tmp_path: Path, programs: Programs
):
    for facts in struck(f"1 {when} {mode}", tmp_path, programs):
        assert facts["after_s"] < SOON_S
        for place in ("second", "third"):
            kind, rank, message = facts[place]
            assert (kind, rank) == ("ParticipantError", 1)
            assert "its connection to rank 0 closed" in message
    check_aborted(tmp_path)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_rank_0_that_is_killed_while_it_writes_fails_the_save_and_the_next_by_name(
    mode: str, tmp_path: Path, programs: Programs
):
    for facts in struck(f"0 writes {mode}", tmp_path, programs):
        assert facts["after_s"] < SOON_S
        for place in ("second", "third"):
            kind, rank, message = facts[place]
            assert (kind, rank) == ("ParticipantError", 0)
            assert "Expected rank 0 to live" in message
    check_aborted(tmp_path)


@pytest.mark.parametrize("when", ["comes", "invites", "joins"])
def test_rank_0_that_is_killed_while_the_session_is_made_fails_the_save_by_name(
    when: str, tmp_path: Path, programs: Programs
):
    """It serves the store by which the others meet."""
    for facts in struck(f"0 {when} sync", tmp_path, programs):
        assert facts["after_s"] < SOON_S
        for place in {"second", "third"} & facts.keys():
            kind, _, message = facts[place]
            # A worker process of rank 0 keeps its connections open: some waits end at the deadline.
            assert kind in ("ParticipantError", "DeadlineError")
            assert "rank 0" in message or "these did not" in message


def test_rank_0_that_is_killed_when_it_has_committed_fails_nothing_that_stands(
    tmp_path: Path, programs: Programs
):
    for facts in struck("0 committed sync", tmp_path, programs):
        assert facts["after_s"] < SOON_S
        assert facts["second"][2] == "saved"
        assert facts["third"][:2] == ["ParticipantError", 0]
    assert ray_dcp.verify(tmp_path / "second").ok


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_freezes_is_named_after_the_heartbeat_timeout(
    victim: int, tmp_path: Path, programs: Programs
):
    for facts in struck(f"{victim} freezes sync", tmp_path, programs):
        assert HEARTBEAT_S / 2 < facts["after_s"] < SOON_S + HEARTBEAT_S
        kind, _, message = facts["second"]
        assert kind == "DeadlineError"
        assert f"rank {victim}" in message
        assert "frozen" in message


def test_ranks_use_the_ray_that_is_named(tmp_path: Path, programs: Programs, ray_daemons):
    environment = plain_environment(RAY_ADDRESS=ray_daemons.address(), RAY_AUTH_MODE="disabled")
    ended = programs.run(*SCRIPT, "reshard", str(tmp_path), ranks=2, env=environment)
    assert [one.returncode for one in ended] == [0, 0], ended
    for facts in map(told, (one.stdout for one in ended)):
        assert facts["same"]
        assert facts["staging"] == "object_store"
        assert facts["has_ray"]


def test_a_users_stager_that_fails_on_one_rank_fails_the_save_by_name_on_the_others(
    tmp_path: Path, programs: Programs
):
    ended = programs.run(
        *SCRIPT, "broken_stager", str(tmp_path), ranks=2, env=plain_environment()
    )  # fmt: skip
    assert [one.returncode for one in ended] == [0, 0], [one.stderr for one in ended]
    waiting, broken = (told(one.stdout) for one in ended)
    kinds = {"OSError": "ParticipantError", "KeyboardInterrupt": "SaveCancelledError"}
    for error, kind in kinds.items():
        assert broken[error][0] == error
        assert waiting[error][0] == kind
        assert f"{error} on rank 1" in waiting[error][2]
        with pytest.raises(ray_dcp.CheckpointNotFoundError):
            ray_dcp.verify(tmp_path / error)
    assert waiting["after_s"] < SOON_S
    assert ray_dcp.verify(tmp_path / "next").ok
