"""The save machine under any sequence of events, against a model of the slots on storage."""

from hypothesis import event, given, settings
from hypothesis import strategies as st

from ray_dcp.errors import CheckpointError, CommitUnknownError, StorageError
from ray_dcp.protocol.commands import (
    BuildCommit,
    CreateAbort,
    CreateRecord,
    Failed,
    Finished,
    MakePlan,
    Published,
    PublishMetadata,
    ReadRecord,
    ReadRecords,
    RecordCreated,
    RecordsRead,
    SlotFree,
    SlotTaken,
)
from ray_dcp.protocol.coordination import Coordination
from ray_dcp.protocol.liveness import Doing, Heartbeat
from ray_dcp.protocol.messages import Refused, SaveOutcome
from tests.protocol_play import BUILT, KEY, Play, planned

WORLD = 3
TAKES_PART = Doing(KEY.seq, KEY.seq, "writing")

events = st.one_of(
    st.tuples(st.just("join"), st.integers(0, WORLD - 1), st.sampled_from([False, False, True])),
    st.tuples(st.just("receipt"), st.integers(0, WORLD - 1), st.sampled_from([False] * 4 + [True])),
    st.tuples(st.just("stray"), st.integers(0, WORLD - 1)),
    st.tuples(st.just("task"), st.integers(0, 3), st.sampled_from(["done", "lost", "failed"])),
    st.tuples(st.just("task"), st.integers(0, 3), st.just("done")),
    st.tuples(st.just("other"), st.booleans()),
)  # fmt: skip

endings = st.one_of(
    st.tuples(st.just("expire"),),
    st.tuples(st.just("lose"), st.integers(0, WORLD - 1)),
    st.tuples(st.just("cancel"),),
    st.tuples(st.just("withdraw"), st.integers(0, WORLD - 1)),
    st.tuples(st.just("works"), st.integers(0, WORLD - 1)),
    st.tuples(st.just("silence"), st.sets(st.integers(0, WORLD - 1))),
)  # fmt: skip


class Model:
    """Slots of a storage that loses answers, and the machine that is told of them."""

    def __init__(self):
        self.now_s = 0.0
        self.play = Play(world_size=WORLD)
        self.play.coordination = Coordination(
            epoch=1, new_attempt=lambda: "a1", clock=lambda: self.now_s
        )
        self.slots: dict[int, tuple[str, bool]] = {}
        self.answers: dict = {}
        self.said_failed = False

    def step(self, what, *how):
        play = self.play
        before = len(play.commands)
        try:
            match what:
                case "join":
                    play.join(how[0], error=StorageError("join") if how[1] else None)
                case "receipt":
                    play.receipt(how[0], error=StorageError("write") if how[1] else None)
                case "stray":
                    play.receipt(how[0], attempt="a0")
                case "task" if play.todo:
                    self.perform(how[0] % len(play.todo), how[1])
                case "other":
                    self.slots[len(self.slots) + 1] = (f"other{len(self.slots)}", how[0])
                case "expire" if play.timer is not None:
                    play.expire()
                case "lose":
                    play.lose(how[0])
                case "cancel":
                    play._take(play.coordination.cancel(KEY, "test"))
                case "withdraw":
                    play._take(play.coordination.withdraw(KEY, how[0], "test"))
                case "works":
                    play._take(play.coordination.works(KEY, how[0]))
                case "silence":
                    self.now_s += 60.0
                    for rank in how[0]:
                        play.coordination.heartbeat(
                            Heartbeat(KEY.session, rank, 60.0, (TAKES_PART,))
                        )
                    play._take(play.coordination.check_silence())
        except CheckpointError:
            assert len(play.commands) == before
        self.check(play.commands[before:])

    def perform(self, index, how):
        task = self.play.todo[index].task
        result = self.result(task, happens=how != "failed")
        self.play.done(result if how == "done" else Failed(StorageError(how)), index)

    def result(self, task, happens):
        match task:
            case ReadRecords():
                return RecordsRead(len(self.slots), None, None, ("old",))
            case MakePlan():
                return planned(WORLD)
            case BuildCommit():
                return BUILT
            case CreateRecord() | CreateAbort():
                if task.slot in self.slots:
                    return SlotTaken(task.slot, *self.slots[task.slot], BUILT.record)
                if happens:
                    assert task.slot == len(self.slots) + 1
                    self.slots[task.slot] = ("a1", isinstance(task, CreateAbort))
                return RecordCreated(task.slot)
            case ReadRecord():
                if task.slot in self.slots:
                    return SlotTaken(task.slot, *self.slots[task.slot], BUILT.record)
                return SlotFree(task.slot)
            case PublishMetadata():
                return Published()
        return Finished()

    @property
    def fate(self):
        """What the first record that names the attempt says: committed, aborted or nothing."""
        for _, (attempt, is_abort) in sorted(self.slots.items()):
            if attempt == "a1":
                return "aborted" if is_abort else "committed"
        return None

    def check(self, commands):
        for command in commands:
            task = getattr(command, "task", None)
            # A save that was reported as failed never tries to commit again.
            assert not (self.said_failed and isinstance(task, CreateRecord))
            # Nothing is published or collected but after the commit, nothing cleaned but after
            # the attempt can't commit.
            if isinstance(task, PublishMetadata):
                assert self.fate == "committed"
            reply = getattr(command, "reply", None)
            if reply is None:
                continue
            if isinstance(reply, SaveOutcome):
                assert self.fate == "committed"
            if isinstance(reply, Refused) and not isinstance(reply.error, CommitUnknownError):
                self.said_failed = True
            if command.step == "SaveReceipt" and getattr(reply, "error", None) is None:
                self.answers.setdefault(command.step, reply)
                assert self.answers[command.step] is reply
        assert not (self.said_failed and self.fate == "committed")

    def finish(self):
        """Lets everything happen that is still to happen; returns what the ranks were told."""
        for _ in range(100):
            if self.play.todo:
                self.step("task", 0, "done")
            elif self.play.timer is not None:
                self.step("expire")
            else:
                break
        assert self.play.coordination.active == ()
        assert self.play.timer is None
        return {
            type(reply.error) if isinstance(reply, Refused) else SaveOutcome
            for (_, step), reply in self.play.replies.items()
            if step == "SaveReceipt"
            and getattr(getattr(reply, "error", 0), "attempt", "a1") == "a1"
        }


@settings(max_examples=120, deadline=None)
@given(st.lists(events | endings, max_size=40), st.booleans())
def test_no_sequence_of_events_makes_a_save_contradict_its_storage(steps, joined):
    model = Model()
    if joined:
        model.play.to_writing()
    for step in steps:
        model.step(*step)
    told = model.finish()
    assert len(told) <= 1
    event(f"fate {model.fate}, told {', '.join(sorted(t.__name__ for t in told))}")
