"""The machine of a job's step: every state that events can reach, and what each refusal says."""

from __future__ import annotations

import copy
from collections import Counter, deque
from dataclasses import dataclass

import pytest

from ray_dcp.commit_protocol.job_step import (
    ENDED,
    Abandoned,
    Begun,
    Commit,
    CommitEnded,
    Discard,
    Durable,
    Failed,
    Follow,
    Gone,
    JobStepMachine,
    Left,
    Overdue,
    Staged,
    processes_of,
)
from ray_dcp.errors import (
    CheckpointError,
    CommitUnknownError,
    DeadlineError,
    InvalidRequestError,
    ParticipantError,
    RankDisagreementError,
    StorageError,
)

BROKEN = StorageError("the disk is on fire")
UNKNOWN = CommitUnknownError("nobody knows", attempt="s")
# Two ranks save "policy", the second of which does not outlive its process; a value is "buffer".
EVENTS = (
    Begun("policy", 0, "t0", 1),
    Begun("policy", 1, "t1", 1),
    Begun("policy", 0, "t0", 1, call="again"),
    Begun("buffer", 0, "put", 1),
    Begun("buffer", 0, "put", 2),
    Begun("other", 0, "t0"),
    Staged("policy", 0, 2, "p", outlives=True),
    Staged("policy", 1, 2, "p", outlives=False),
    Staged("buffer", 0, 1, "b", outlives=True),
    Staged("policy", 0, 2, "late", outlives=True),
    Durable("policy", "p"),
    Durable("buffer", "b"),
    Durable("policy", "late"),
    Failed("policy", BROKEN),
    Gone(frozenset({"t0"})),
    Gone(frozenset({"t1"})),
    Gone(frozenset({"driver"})),
    Left(),
    Abandoned(CheckpointError("the block raised")),
    Overdue("opened", 1.0, only_unbegun=True),
    Overdue("opened", 1.0),
    Overdue("staged", 1.0),
    CommitEnded(None),
    CommitEnded(BROKEN),
    CommitEnded(UNKNOWN),
)


def new() -> JobStepMachine[str]:
    return JobStepMachine(7, ["policy", "buffer"], driver="driver")


@dataclass
class Story:
    """A machine, and what it commanded so far."""

    machine: JobStepMachine[str]
    commanded: Counter[type]

    @property
    def state(self) -> str:
        machine = self.machine
        parts = repr(machine.parts)
        return f"{machine.phase} {parts} {machine._is_left} {sorted(map(str, self.commanded))}"


def after(story: Story, event) -> Story:
    """Returns the story after an event, having checked what must hold then."""
    machine, commanded = copy.deepcopy(story.machine), Counter(story.commanded)
    before, was = story.machine, story.machine.phase
    try:
        commands = machine.receive(event)
    except CheckpointError:
        assert Story(machine, commanded).state == story.state, f"{event} was refused"
        return story
    commanded.update(map(type, commands))
    assert commanded[Commit] <= 1
    assert commanded[Discard] <= 1
    for command in commands:
        match command:
            case Commit():
                assert all(one.is_durable for one in machine.parts.values())
                assert len({one.version for one in machine.parts.values()}) == 1
                left = isinstance(event, Left) or before._is_left or event == EVENTS[16]
                assert left, "a step is committed only when its driver left it"
                assert not commanded[Discard]
            case Discard(error):
                assert machine.phase == "given up"
                assert machine.error is error
                assert not commanded[Commit] or isinstance(event, CommitEnded)
            case Follow(part, attempt):
                assert machine.parts[part].attempt == attempt
    if was in ENDED:
        assert (machine.phase, commands) == (was, ())
    if was == "committing":
        assert machine.phase == was or isinstance(event, CommitEnded)
    if was == "staged" and isinstance(event, Gone):
        # Only the rank whose process holds its own bytes is needed, until they are durable.
        needed = "t1" in event.processes and not before.parts["policy"].is_durable
        differ = isinstance(machine.error, RankDisagreementError)
        assert (machine.phase == "given up") == (needed or differ)
    if machine.phase in ("opened", "staged"):
        assert not commanded[Discard] + commanded[Commit]
    return Story(machine, commanded)


def test_whatever_happens_a_step_is_committed_whole_or_given_up():
    seen, waiting = {}, deque([Story(new(), Counter())])
    phases = Counter()
    while waiting:
        story = waiting.popleft()
        if story.state in seen:
            continue
        seen[story.state] = story
        phases[story.machine.phase] += 1
        waiting.extend(after(story, event) for event in EVENTS)
        if story.machine.phase in ("opened", "staged"):
            # Nothing waits for ever: who has not come when the time is over is named.
            ended = after(after(story, Overdue("opened", 1.0)), Overdue("staged", 1.0))
            whole = all(one.is_durable for one in story.machine.parts.values())
            assert whole or isinstance(ended.machine.error, DeadlineError)
    assert set(phases) == {"opened", "staged", "committing", "committed", "given up", "unknown"}
    assert phases["opened"] > 50


def play(*events) -> JobStepMachine[str]:
    machine = new()
    for event in events:
        machine.receive(event)
    return machine


BEGUN = EVENTS[0], EVENTS[1], EVENTS[3]
STAGED = (*BEGUN, *EVENTS[6:9])


@pytest.mark.parametrize(
    ("events", "kind", "told"),
    [
        ([Gone(frozenset({"driver"}))], ParticipantError, "policy, buffer"),
        ([*BEGUN, Gone(frozenset({"t1"}))], ParticipantError, "rank 1 (t1)"),
        ([*STAGED, Gone(frozenset({"t1"}))], ParticipantError, "'policy'"),
        ([BEGUN[0], Left(), Overdue("opened", 9.0, only_unbegun=True)], DeadlineError, "buffer"),
        ([*STAGED, Left(), Overdue("staged", 9.0)], DeadlineError, "policy, buffer"),
        ([Failed("buffer", BROKEN)], StorageError, "the part 'buffer' of step 7 failed"),
        (
            [
                *BEGUN[:2], Begun("buffer", 0, "put", 2), *EVENTS[6:9],
                Durable("policy", "p"), Durable("buffer", "b"), Left(),
            ],
            RankDisagreementError,
            "policy has 1, buffer has 2",
        ),
    ],
)  # fmt: skip
def test_a_step_that_is_given_up_names_why(events, kind, told):
    machine = play(*events)
    assert machine.phase == "given up"
    assert type(machine.error) is kind
    assert told in str(machine.error)
    assert machine.error.step == 7
    # Who goes on with it is told the same.
    with pytest.raises(InvalidRequestError, match="given up"):
        machine.receive(Begun("policy", 5, "t5"))
    with pytest.raises(InvalidRequestError, match="given up"):
        machine.receive(Staged("policy", 0, 2, "p", outlives=True))


def test_a_part_of_a_committed_step_is_refused():
    machine = play(*STAGED, Durable("policy", "p"), Durable("buffer", "b"), Left())
    assert machine.phase == "committing"
    machine.receive(CommitEnded(None))
    with pytest.raises(InvalidRequestError, match="the step is committed"):
        machine.receive(Begun("policy", 5, "t5"))


def test_only_who_may_still_lose_bytes_is_watched():
    assert processes_of(play(*BEGUN).parts.values()) == {"t0", "t1", "put"}
    assert processes_of(play(*STAGED).parts.values()) == {"t1"}
    assert processes_of(play(*STAGED, Durable("policy", "p")).parts.values()) == set()
