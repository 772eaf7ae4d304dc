"""Scripts without Ray get one of their own: it outlives rank 0, and nothing of it is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
from ray.exceptions import RaySystemError

from ray_dcp.errors import InvalidRequestError, ParticipantError
from ray_dcp.runtime.attach import attach
from ray_dcp.runtime.coordinator import coordinator_of
from ray_dcp.runtime.discovery import current_session
from ray_dcp.runtime.private_ray import start_private_ray
from ray_dcp.runtime.stager import stager_of
from tests.forked_programs import REPOSITORY, Program, Programs
from tests.polling import eventually, lives, session_members

LEASE_S = 4.0
# Settings of this test run, or of a Ray around it, that a plain script would not have.
NOT_A_SCRIPT = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")


@dataclass
class Job:
    """Two ranks of one script."""

    ranks: list[Program]

    def heard(self, rank: int) -> dict[str, object]:
        """Returns the next facts that a rank tells."""
        line = self.ranks[rank].stdout.readline()
        assert line, f"rank {rank} ended with {self.ranks[rank].wait()}"
        return json.loads(line)

    def order(self, rank: int, line: str) -> None:
        self.ranks[rank].stdin.write(f"{line}\n")
        self.ranks[rank].stdin.flush()


def plain_environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in NOT_A_SCRIPT}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "lo", **more}


def start_job(programs: Programs, directory: Path) -> Job:
    words = ("-m", "tests.integration.own_ray_rank", str(directory / "group"), str(LEASE_S))
    return Job(
        [
            programs.start(*words, env=plain_environment(RANK=str(rank), WORLD_SIZE="2"))
            for rank in range(2)
        ]
    )


@pytest.fixture(scope="module")
def jobs(programs, tmp_path_factory):
    """Two jobs, started at the same time; their processes are ended, if a test did not."""
    started = [start_job(programs, tmp_path_factory.mktemp(name)) for name in ("one", "other")]
    told: list[list[dict[str, object]]] = []
    try:
        told += [[job.heard(rank) for rank in range(2)] for job in started]
        yield list(zip(started, told, strict=True))
    finally:
        for program in [program for job in started for program in job.ranks]:
            program.kill()
        for facts, _ in told:
            for pid in session_members(facts["supervisor_pid"]):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            eventually(lambda supervisor=facts["supervisor_pid"]: not session_members(supervisor))
            shutil.rmtree(facts["directory"], ignore_errors=True)


def test_two_jobs_at_once_do_not_meet(jobs):
    (_, one), (_, other) = jobs
    for ranks in (one, other):
        for name in ("session", "address", "directory", "supervisor_pid"):
            assert ranks[0][name] == ranks[1][name]
        assert ranks[0]["exchanged"] == ranks[1]["exchanged"] == "Exchanged "
        (line,) = ranks[0]["logged"]
        assert f"one of its own at {ranks[0]['address']}" in line
        assert f"ends {LEASE_S:g} s after its last use" in line
        assert ranks[1]["logged"] == []
    for name in ("session", "address", "directory", "supervisor_pid"):
        assert one[0][name] != other[0][name]


def test_only_this_machine_and_this_user_can_reach_it(jobs):
    (_, (facts, _)), _ = jobs
    assert facts["address"].startswith("127.0.0.1:")
    listening = {
        address
        for pid in session_members(facts["supervisor_pid"])
        for address in listened_by(pid)
    }  # fmt: skip
    assert listening
    assert {address for address in listening if not is_loopback(address)} == set()
    assert stat.S_IMODE(Path(facts["directory"]).stat().st_mode) == 0o700
    assert stat.S_IMODE((Path(facts["directory"]) / "token").stat().st_mode) == 0o600


def test_killing_rank_0_leaves_the_ray_alive_until_nobody_needs_it(jobs):
    (job, (facts, _)), _ = jobs
    tree = session_members(facts["supervisor_pid"])
    daemons = [pid for pid in tree if name_of(pid) in ("raylet", "gcs_server")]
    assert len(daemons) == 2
    # More than a lease passes; its drivers do nothing, but they are there.
    assert not eventually(lambda: not all(map(lives, daemons)), LEASE_S * 1.5)
    job.order(1, "exchange")
    job.ranks[0].kill()
    killed_s = time.monotonic()
    answer = job.heard(1)["exchanged"]
    assert time.monotonic() - killed_s < 50
    assert answer.startswith("Refused ")
    assert "rank 0" in answer
    assert all(map(lives, [facts["supervisor_pid"], *daemons]))
    job.ranks[1].stdin.close()
    assert job.ranks[1].wait() == 0
    assert eventually(lambda: not session_members(facts["supervisor_pid"]))
    assert not any(map(lives, tree))
    assert eventually(lambda: not Path(facts["directory"]).exists())


def test_a_killed_supervisor_takes_its_ray_with_it(jobs):
    _, (job, (facts, _)) = jobs
    for process in job.ranks:
        process.stdin.close()
        assert process.wait() == 0
    os.kill(facts["supervisor_pid"], signal.SIGKILL)
    assert eventually(lambda: not session_members(facts["supervisor_pid"]))


# Its supervisor outlives whoever starts it, on purpose.
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_it_outlasts_its_lease_while_a_process_attaches():
    own = start_private_ray(lease_s=1.5)
    with own.held():
        assert not eventually(lambda: own.is_lost, 5.0)
    assert eventually(lambda: own.is_lost)
    with pytest.raises(ParticipantError, match="was lost"), own.held():
        pass


def test_a_rank_on_another_machine_is_told_how_to_start_ray(tmp_path: Path):
    with pytest.raises(ParticipantError, match="ray start --address"):
        attach("127.0.0.1:1", str(tmp_path / "token"))


def test_a_process_that_is_alone_needs_no_ray():
    program = (
        "import sys; from ray_dcp.runtime.session import current_session; "
        "print(current_session(), 'ray' in sys.modules)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY,
        env=plain_environment(), timeout=400, check=True,
    )  # fmt: skip
    assert finished.stdout.split() == ["None", "False"]


@pytest.mark.parametrize("make", [coordinator_of, stager_of], ids=["coordinator", "stager"])
def test_an_actor_of_ours_is_not_made_in_a_ray_that_nobody_asked_for(make):
    # As in a thread that follows a save, when another one has just shut Ray down.
    with pytest.raises(RaySystemError):
        make("a" * 56, lease_s=60.0)
    assert not ray.is_initialized()


def test_a_process_group_without_torch_distributed_is_refused():
    with pytest.raises(InvalidRequestError, match="init_process_group"):
        current_session(object())


@pytest.mark.parametrize("wrong", [{"lease_s": 0}, {"start_timeout_s": 0}], ids=str)
def test_wrong_arguments_start_nothing(wrong):
    with pytest.raises(InvalidRequestError):
        start_private_ray(**wrong)


GROUP = """
import ray
from ray_dcp.runtime.worker_group import WorkerGroup
if __name__ == "__main__":
    with WorkerGroup(1) as ranks:
        print(ranks.run(lambda: 7), ray.get_runtime_context().gcs_address)
"""


def test_a_worker_group_leaves_alone_a_cluster_that_nobody_named(programs):
    # Why so short: Ray's sockets lie below it.
    with tempfile.TemporaryDirectory(prefix="rd", dir="/tmp") as folder:
        newest = Path(folder) / "ray" / "ray_current_cluster"
        newest.parent.mkdir()
        newest.write_text("127.0.0.1:9")
        environment = plain_environment(RAY_TMPDIR=folder, RAY_AUTH_MODE="disabled")
        (ended,) = programs.run("-c", GROUP, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("[7] ")
    assert not ended.stdout.endswith("127.0.0.1:9\n")


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def listened_by(pid: int) -> set[str]:
    """Returns the hex addresses on which a process listens for TCP."""
    try:
        inodes = {os.readlink(f) for f in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return set()
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].rpartition(":")[0])
    return found


def is_loopback(address: str) -> bool:
    v4, mapped = "0100007F", "0000000000000000FFFF00000100007F"
    return address in (v4, mapped, "00000000000000000000000001000000")
