"""Real ranks, gatherers and coordinator: few messages, and a gatherer that dies holds nobody up."""

from __future__ import annotations

import os
import secrets
import signal
from functools import partial

import pytest
import ray

import ray_dcp
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.coordinator import gatherer
from ray_dcp.options import SaveOptions
from ray_dcp.rank.rank_load import drive
from ray_dcp.session.call import Call
from ray_dcp.session.names import NAMESPACE, gatherer_name
from ray_dcp.session.ray_transport import RayTransport
from ray_dcp.session.session import Session
from ray_dcp.store.opening import open_storage
from tests.support.arrays import ArrayCapture, same_state, sample_state
from tests.support.processes import eventually
from tests.support.world import load_state, save_rank

pytestmark = pytest.mark.usefixtures("ray_session")

WORLD = 4


class Job:
    def __init__(self, path):
        self.url = str(path / "ckpt")
        self.name = f"test-{secrets.token_hex(4)}"
        self.sessions = [
            Session(RayTransport(self.name, rank, WORLD, lease_s=30.0)) for rank in range(WORLD)
        ]

    def save(self, state, threads):
        def one(session, key):
            with Call(session, 60.0) as call:
                steps = save_rank(
                    key, rank=session.rank, world_size=WORLD, target=Target(self.url),
                    options=SaveOptions(num_threads=1), memory=session.plans,
                    capture=partial(ArrayCapture, state, session.rank, WORLD),
                )  # fmt: skip
                return drive(steps, call.ask)

        keys = [session.next_key() for session in self.sessions]
        each = zip(self.sessions, keys, strict=True)
        outcomes = [future.result(180) for future in [threads.submit(one, *at) for at in each]]
        assert len({outcome.attempt for outcome in outcomes}) == 1
        assert same_state(state, load_state(open_storage(Target(self.url)), state, 1))

    def gatherer(self, start):
        name = gatherer_name(self.name, range(start, start + 2))
        try:
            return ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return None

    def close(self):
        for session in self.sessions:
            session.close()


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(gatherer, "MOST_GATHERERS", 2)
    found = Job(tmp_path)
    yield found
    found.close()


@pytest.fixture
def direct(job, monkeypatch):
    """Ranks that called the coordinator themselves."""
    found = []
    for session in job.sessions:

        def ask(*args, plain=session._transport.ask, rank=session.rank, **options):
            found.append(rank)
            return plain(*args, **options)

        monkeypatch.setattr(session._transport, "ask", ask)
    return found


def test_ranks_save_by_way_of_gatherers_that_leave_with_them(job, threads, direct):
    for step in range(2):
        job.save(sample_state(step), threads)
    assert direct == []
    trace = ray_dcp.open(job.url).trace
    assert trace.ranks == tuple(range(WORLD))
    assert {(span.rank, span.phase) for span in trace.spans if span.rank is not None} >= {
        (rank, phase) for rank in range(WORLD) for phase in ("capture", "plan", "write")
    }
    assert trace.num_bytes == sum(span.num_bytes for span in trace.spans if span.phase == "write")
    assert all(0 <= span.start_s <= span.stop_s <= trace.committed_s for span in trace.spans)
    first, other = job.gatherer(0), job.gatherer(2)
    assert None not in (first, other)
    # One dies: its ranks go on by themselves, and make another for what comes after.
    ray.kill(first)
    assert eventually(lambda: job.gatherer(0) is None)
    job.save(sample_state(2), threads)
    assert set(direct) <= {0, 1}
    job.save(sample_state(3), threads)
    assert job.gatherer(0) is not None
    job.close()
    assert eventually(lambda: job.gatherer(0) is None and job.gatherer(2) is None)


def test_a_gatherer_that_freezes_is_not_waited_for(job, threads, direct, monkeypatch):
    job.save(sample_state(0), threads)
    pid = ray.get(job.gatherer(2).__ray_call__.remote(lambda _: os.getpid()))
    for session in job.sessions:
        gathered = session._transport._gathered
        plain = gathered.call
        monkeypatch.setattr(
            gathered, "call", lambda said, who, _, plain=plain: plain(said, who, 1.0)
        )
    os.kill(pid, signal.SIGSTOP)
    try:
        job.save(sample_state(1), threads)
        assert {2, 3} <= set(direct)
    finally:
        os.kill(pid, signal.SIGCONT)
