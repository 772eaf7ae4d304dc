"""Any history of saves, crashes, zombies and deletes: what loads is what a dict says."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import ray_dcp
from ray_dcp.commit_protocol.messages import OpKey
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    DeadlineError,
    InternalError,
    StorageError,
)
from ray_dcp.format.manifest import Manifest, deciding, decode_record, slot_of
from ray_dcp.io.checkpoint import METADATA_KEY, newest_record
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.place.outcome import outcome
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.view.verify import verify
from tests.crash.invariants import all_keys
from tests.property.stateful_world import (
    SHAPES,
    Change,
    Incident,
    Order,
    Place,
    Process,
    Session,
    World,
    contents,
    drive_rank,
    loaded,
    state_of,
    stock_sees,
    tally,
    what_stands,
)
from tests.support.world import load_ranks, save_ranks

REACHED: Counter[str] = Counter()
"""How often each kind of thing happened in this process."""

INCIDENTS = (
    "before", "after", "torn", "broken", "all broken", "kill", "freeze", "power", "replaced",
    "replaced and frozen", "replaced and lives", "replaced and hears", "twice", "late",
    "impatient", "cancel",
)  # fmt: skip
MUST_BE_REACHED = (
    *INCIDENTS, "save committed", "save failed", "save open", "told unknown", "told exists",
    "race", "lost race", "thaw", "zombie moved", "open outcome: was committed",
    "open outcome: was not", "overwrite", "overwrite refused",
    "loaded at another size", "stock DCP loaded", "outcome committed", "outcome aborted",
    "load beside a save", "two places", "nothing stands", "delete committed", "delete open",
    "delete beside a save", "collect", "collect fenced", "dry run", "nothing is left",
)  # fmt: skip

NOT_OURS = ("notes.txt", "sub/model.bin")


orders = st.builds(Order, st.integers(0, 2**16), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
one_incident = st.builds(
    Incident, st.integers(0, 45), st.sampled_from([*INCIDENTS, "freeze", "freeze"]),
    st.integers(0, 5),
)  # fmt: skip
incidents = st.just([]) | st.lists(one_incident, min_size=1, max_size=3)
crashes = st.builds(Incident, st.integers(8, 28), st.just("power"))
saves = st.fixed_dictionaries(
    {
        "world_size": st.integers(1, 3),
        "overwrite": st.sampled_from([True, True, True, False]),
        "part_bytes": st.sampled_from([1 << 30, 2048]),
        "again": st.booleans(),
    }
)


class Checkpoints(RuleBasedStateMachine):
    """Two checkpoint ids under one storage, and everybody who uses them."""

    @initialize(local=st.booleans())
    def make_places(self, local):
        self.directory = Path(tempfile.mkdtemp(prefix="stateful-"))
        root = str(self.directory) if local else "memory://stateful"
        self.storages = {}
        for name in ("one", "two"):
            url = f"{root}/{name}"
            inner = LocalStorage(url, durable=False) if local else MemoryStorage(url[9:])
            inner.delete([entry.key for entry in inner.list()])
            for key in NOT_OURS:
                inner.write(key, b"mine")
            self.storages[url] = inner
        self.places = [Place(url) for url in self.storages]
        self.world = World(self.storages.__getitem__)
        self.changes: dict[OpKey, tuple[Place, Change]] = {}
        self.owners: dict[Process, tuple[Place, Change]] = {}
        self.loads: list[dict] = []
        self.fencing: list[Place] = []
        self.last_value = 0
        self.sessions: dict[int, Session] = {}

    def teardown(self):
        if hasattr(self, "world"):
            self.world.end()
            shutil.rmtree(self.directory)

    # Rules

    @rule(place=st.integers(0, 1), save=saves, order=orders, incidents=incidents)
    def save(self, place, save, order, incidents):
        self.play([self.begin_save(self.places[place], save)], order, incidents)

    @rule(
        places=st.sampled_from([(0, 0), (0, 0), (0, 1), (0, 0, 0)]),
        saves=st.lists(saves, min_size=3, max_size=3), load=st.booleans(), order=orders,
        incidents=incidents,
    )  # fmt: skip
    def race(self, places, saves, load, order, incidents):
        started = [
            self.begin_save(self.places[place], save)
            for place, save in zip(places, saves, strict=False)
        ]
        if load:
            self.begin_load(self.places[0], saves[-1]["world_size"])
        self.play(started, order, incidents)
        REACHED["two places"] += len(set(places)) > 1
        told = [change for _, change in started if change.status == "committed"]
        REACHED["race"] += len(told) > 0
        REACHED["lost race"] += any(
            isinstance(report, CheckpointExistsError) and change.overwrite
            for _, change in started
            for report in change.reports.values()
        )

    @rule(place=st.integers(0, 1), save=saves, order=orders, crash=crashes, clean=st.booleans())
    def crash(self, place, save, order, crash, clean):
        """Ends everybody in the middle of a save, and perhaps collects what it left."""
        self.play([self.begin_save(self.places[place], save)], order, [crash])
        if clean:
            self.collect_all(self.places[place], order)

    @rule(
        place=st.integers(0, 1), save=st.none() | saves, load=st.booleans(), order=orders,
        incidents=incidents,
    )  # fmt: skip
    def delete(self, place, save, load, order, incidents):
        """Deletes, perhaps while a save or a load runs."""
        place = self.places[place]
        started = [self.begin_delete(place)]
        if save is not None:
            started.append(self.begin_save(place, save))
        if load:
            self.begin_load(place, 2)
        self.play(started, order, incidents)
        REACHED["delete beside a save"] += len(started) > 1 and started[0][1].status == "committed"

    @rule(
        place=st.integers(0, 1), save=st.none() | saves, abort=st.booleans(), order=orders,
        incidents=incidents,
    )  # fmt: skip
    def collect(self, place, save, abort, order, incidents):
        """Collects, perhaps while a save runs."""
        place = self.places[place]
        told = self.begin_collect(place, abort)
        started = [] if save is None else [self.begin_save(place, save)]
        self.play(started, order, incidents)
        REACHED["collect"] += "report" in told

    def collect_all(self, place, order):
        """Collects in peace, also what belongs to attempts that might still be committed."""
        told = self.begin_collect(place, abort=True)
        self.play([], order, [])
        if "report" in told:
            REACHED["collect fenced"] += bool(told["report"].fenced)
            self.check_files(place, after_save=False)
            for change in place.changes:
                if change.planned is not None and not change.stood:
                    place.over.add(change.value)

    @rule(place=st.integers(0, 1), which=st.sampled_from(["collect", "delete"]))
    def collect_dry(self, place, which):
        """Only tells what would be deleted."""
        url = self.places[place].url
        before = contents(self.storages[url])
        with contextlib.suppress(CheckpointNotFoundError):
            getattr(ray_dcp, which)(url, dry_run=True)
            REACHED["dry run"] += 1
        assert contents(self.storages[url]) == before

    @precondition(lambda self: self.world.frozen())
    @rule(
        which=st.sets(st.integers(0, 5), min_size=1), save=st.none() | saves,
        place=st.integers(0, 1), order=orders, incidents=incidents,
    )  # fmt: skip
    def thaw(self, which, save, place, order, incidents):
        """Lets frozen processes go on, perhaps while another save runs."""
        frozen = self.world.frozen()
        for process in {id(p): p for p in (frozen[n % len(frozen)] for n in which)}.values():
            process.state = "running"
            REACHED["zombie moved"] += bool(process.turns)
        REACHED["thaw"] += 1
        started = [] if save is None else [self.begin_save(self.places[place], save)]
        self.play(started, order, incidents)

    @precondition(lambda self: self.world.attempts)
    @rule(which=st.integers(0, 20))
    def ask_outcome(self, which):
        attempts = list(self.world.attempts)
        attempt = attempts[-1 - which % len(attempts)]
        place, change = self.changes[self.world.attempts[attempt]]
        told = outcome(place.url, attempt)
        REACHED[f"outcome {told}"] += 1
        place.check_outcome(attempt, told, change)

    @rule(place=st.integers(0, 1), world_size=st.integers(1, 4), order=orders)
    def load(self, place, world_size, order):
        self.begin_load(self.places[place], world_size)
        self.play([], order, [])
        REACHED["loaded at another size"] += 1

    # Who moves

    def begin_save(self, place: Place, how: dict) -> tuple[Place, Change]:
        """Starts the ranks of a save, on the session of before or on a new one."""
        self.last_value += 1
        world_size = how["world_size"]
        session = self.sessions.get(world_size) if how["again"] else None
        if session is None or session.waiting or session.coordinator.process.state != "running":
            session = self.sessions[world_size] = self.world.session(world_size)
        key = OpKey(session.name, session.next_seq)
        session.next_seq += 1
        change = place.begin(
            Change(self.last_value, self.world.tick, key, overwrite=how["overwrite"])
        )
        self.changes[key] = place, change
        options = SaveOptions(
            num_threads=1, overwrite=how["overwrite"],
            part_bytes=how["part_bytes"],
        )  # fmt: skip
        state = state_of(self.last_value)
        for rank in range(world_size):

            def work(process, rank=rank):
                generator = save_ranks(
                    state, world_size, place.url, session=key.session, seq=key.seq,
                    options=options, opener=process.opener,
                )[rank]  # fmt: skip
                try:
                    change.reports[rank] = drive_rank(session, generator)
                except CheckpointError as error:
                    change.reports[rank] = error

            process = self.world.start(f"rank {rank} of save {self.last_value}", work, session)
            self.owners[process] = place, change
        return place, change

    def begin_delete(self, place: Place) -> tuple[Place, Change]:
        change = place.begin(Change(None, self.world.tick))

        def work(process):
            try:
                change.reports[0] = ray_dcp.delete(place.url, opener=process.opener)
            except (CheckpointNotFoundError, InternalError) as error:
                change.reports[0] = error
            except StorageError as error:
                change.reports[0] = CommitUnknownError(str(error), attempt="")

        self.owners[self.world.start("a delete", work)] = place, change
        return place, change

    def begin_collect(self, place: Place, abort: bool) -> dict:
        told: dict = {}
        if abort:
            self.fencing.append(place)

        def work(process):
            opener = process.opener
            try:
                told["report"] = ray_dcp.collect(place.url, abort_unfinished=abort, opener=opener)
            except (CheckpointNotFoundError, StorageError) as error:
                told["error"] = error

        self.owners[self.world.start("a collect", work)] = place, None
        return told

    def begin_load(self, place: Place, world_size: int) -> None:
        session = self.world.session(world_size)
        load = {"place": place, "works": [None] * world_size, "reports": {}}
        self.loads.append(load)
        for rank in range(world_size):

            def work(process, rank=rank):
                generators, works = load_ranks(
                    SHAPES, world_size, place.url, session=session.name,
                    options=LoadOptions(num_threads=1), opener=process.opener,
                )  # fmt: skip
                try:
                    load["reports"][rank] = drive_rank(session, generators[rank])
                except CheckpointError as error:
                    load["reports"][rank] = error
                load["works"][rank] = works[rank]

            self.world.start(f"rank {rank} of a load", work, session)

    def play(self, started, order, incidents):
        """Lets everybody who is not frozen move to the end, and checks what there is then."""
        world = self.world
        moving = [self.owners[p] for p in world.running() if p in self.owners]
        moving = [(place, change) for place, change in moving if change is not None]
        for life in world.lives():
            if life.process.state == "running" and life.process.turns:
                moving += [
                    self.changes[key] for key in life.coordination.active if key in self.changes
                ]
        moved = list(
            {id(change): (place, change) for place, change in [*started, *moving]}.values()
        )
        before = {id(place): place.stands for place in self.places}
        resumed = [change for _, change in moved if change not in [c for _, c in started]]
        tools = [
            self.owners[process][0]
            for process in world.running()
            if process in self.owners and self.owners[process][1] is None
        ]
        keys = {url: set(all_keys(storage)) for url, storage in self.storages.items()}
        world.run(order, incidents)
        REACHED.update(world.happened)
        world.heal()
        changes = [change for _, change in moved]
        tally(changes, REACHED)
        self.settle()
        for place in self.places:
            own = [change for at, change in moved if at is place]
            if not own and place not in tools:
                assert set(all_keys(self.storages[place.url])) == keys[place.url]
                continue
            for change in own:
                if change.key is not None:
                    change.planned = world.planned.get(change.key)
                place.check_told(change)
            quiet = len(own) == 1 and not world.happened and own[0].status == "committed"
            # A delete where nothing stands need not decide anything, so that a save which began
            # before it may still be committed.
            idle = [c for c in own if c.value is None and before[id(place)] is None]
            quiet = quiet and own[0] not in (*resumed, *idle) and not tools
            place.unquiet = (place.unquiet or bool(world.happened or resumed)) and not quiet
            open_before = [c for c in own if c.status == "open"]
            fresh = [change for change in own if change not in resumed]
            if not any(change.value is None for change in own):
                self.check_overwrites(before[id(place)], fresh, own)
            if len(own) == 1 and not (world.happened or resumed or place in self.fencing):
                self.check_success(own[0])
            found = self.look(place, own, quiet)
            place.see(found, own, resumed)
            for change in own:
                if change.status == "committed" and change not in idle:
                    place.overtaken(change)
            for change in open_before:
                name = "was committed" if change.stood else "was not"
                REACHED[f"open outcome: {name}"] += 1
        self.check_loads(moved, before)
        self.fencing.clear()
        self.clear()

    def settle(self):
        """Marks the changes of which nobody is left who could go on."""
        alive = {id(self.owners[p][1]) for p in self.world.everybody() if p in self.owners}
        for life in self.world.lives():
            if life.process.state != "dead" and (life.process.turns or life.shell.tasks):
                alive |= {
                    id(self.changes[k][1]) for k in life.coordination.active if k in self.changes
                }
        for place in self.places:
            for change in place.changes:
                change.settled = id(change) not in alive

    def clear(self):
        if self.world.happened:
            self.sessions.clear()  # who lost a rank makes a new group
        self.world.forget(kept=self.sessions.values())

    # What must hold

    def check_overwrites(self, before, started, moved):
        """Checks that a save that must not replace anything did not, and was not refused idly."""
        for change in started:
            if change.overwrite:
                REACHED["overwrite"] += change.status == "committed" and before is not None
                continue
            exists = any(isinstance(r, CheckpointExistsError) for r in change.reports.values())
            REACHED["overwrite refused"] += exists
            if change.status == "committed":
                assert before is None, f"{change} replaced {before}"
                slots = [other.slot for other in moved if other.status == "committed"]
                assert min(slots) == change.slot, f"{change} replaced another save"
            assert not (exists and before is None and len(moved) == 1), change.reports

    def check_success(self, change):
        """Checks that what is alone, and meets no trouble, does not fail."""
        for report in change.reports.values():
            refused = isinstance(report, CheckpointExistsError) and not change.overwrite
            nothing = isinstance(report, CheckpointNotFoundError) and change.value is None
            assert refused or nothing or not isinstance(report, CheckpointError), report

    def look(self, place, moved, quiet):
        """Returns what stands at a place, after checking it by every reader there is."""
        found = what_stands(place.url, 1 + self.last_value % 4)
        storage = self.storages[place.url]
        assert all(storage.read(key) == b"mine" for key in NOT_OURS)
        REACHED["nothing stands"] += found is None
        if found is not None:
            report = verify(place.url)
            assert report.ok, report.problems
        self.check_stock(place, found, moved, quiet)
        if quiet:
            self.check_files(place, after_save=moved[0].value is not None)
        return found

    def check_stock(self, place, found, moved, quiet):
        """Checks what stock DCP sees: it may lag after a crash, but sees nothing uncommitted."""
        seen = stock_sees(self.storages[place.url])
        REACHED["stock DCP loaded"] += isinstance(seen, int)
        committed = newest_record(self.storages[place.url])
        projected = committed is not None and committed.manifest.metadata is not None
        if isinstance(seen, BaseException):
            assert place.unquiet, f"stock DCP can't load: {seen!r}"
        elif seen is not None:
            known = place.stood | {c.value for c in moved if c.status != "failed"}
            assert seen in known, f"stock DCP sees {seen}, which was never committed"
        if quiet or (str(seen) != place.stock_saw and not self.world.happened):
            # Nobody crashed, so that whatever changed must be what stands now.
            assert seen == (found if projected else None)
        place.stock_saw = str(seen)

    def check_files(self, place, after_save):
        """After a quiet change nothing is left but what decides, and what that names."""
        storage = self.storages[place.url]
        keys = {*all_keys(storage)} - set(NOT_OURS)
        records = {slot_of(key): key for key in keys if slot_of(key) is not None}
        decides = deciding({n: decode_record(storage.read(key)) for n, key in records.items()})
        slot, record = decides or (0, None)
        # Those above what was planned with are read to see what decides: they stay until a later
        # commit. After a save in peace there is only its own.
        lowest = 0 if record is None else slot if after_save else record.previous_slot + 1
        expected = {key for number, key in records.items() if number >= lowest}
        if isinstance(record, Manifest):
            expected |= {entry.key for entry in record.files} | {record.table.key}
            if record.metadata is not None:
                expected.add(METADATA_KEY)
            assert slot == max(records) or not after_save
        assert keys == expected, f"left: {keys - expected}, missing: {expected - keys}"
        REACHED["nothing is left"] += 1

    def check_loads(self, moved, before):
        loads, self.loads = self.loads, []
        for load in loads:
            place = load["place"]
            own = [change for at, change in moved if at is place]
            possible = {before[id(place)], place.stands}
            possible |= {c.value for c in own if c.status != "failed"}
            errors = [r for r in load["reports"].values() if isinstance(r, CheckpointError)]
            for error in errors:
                assert not isinstance(error, InternalError), error
                assert (
                    own
                    or self.world.happened
                    or (isinstance(error, CheckpointNotFoundError) and None in possible)
                ), error
            values = {loaded(work) for work in load["works"] if work and work.finished}
            assert len(values) <= 1, values
            assert values <= possible, (values, possible)
            REACHED["load beside a save"] += bool(own and values)


NUM_HISTORIES = 30 if os.environ.get("RAY_DCP_THOROUGH") else 10
QUICK = settings(
    max_examples=NUM_HISTORIES, stateful_step_count=14,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip

TestCheckpoints = Checkpoints.TestCase
TestCheckpoints.settings = QUICK


@pytest.fixture
def machine():
    machine = Checkpoints()
    yield machine
    machine.teardown()


HOW = {"world_size": 2, "overwrite": True, "part_bytes": 2048}


@pytest.mark.parametrize("what", INCIDENTS)
def test_each_incident_at_many_moments_of_a_save(machine, what):
    order = Order(seed=1, switch=0.3)
    machine.make_places(local=True)
    for number, at in enumerate((8, 26)):
        is_even = number % 2 == 0
        how = {**HOW, "again": is_even}
        machine.save(0, how, order, [Incident(at, what, at)])
        if machine.world.frozen():
            machine.thaw(set(range(6)), {**how, "overwrite": False}, 0, order, [])
        machine.race((0, is_even), [{**how, "again": False}] * 3, True, order, [])
        for which in range(3):
            machine.ask_outcome(which)
        machine.delete(0, how if is_even else None, True, order, [])
        machine.crash(0, how, order, Incident(12 + at // 4, "power"), clean=True)
        machine.load(0, 3, order)


@pytest.mark.parametrize("what", ["freeze", "all broken", "after", "power"])
def test_at_each_moment_of_a_small_save_followed_by_another_one(machine, what):
    how = {**HOW, "world_size": 1, "part_bytes": 1 << 30, "again": False}
    machine.make_places(local=False)
    for at in range(5, 29, 4):
        machine.save(0, how, Order(), [Incident(at, what, 1)])  # the coordinator, if it acts
        machine.save(0, how, Order(), [])
        machine.ask_outcome(1)
        if machine.world.frozen():
            machine.thaw({0, 1}, None, 0, Order(), [])
            machine.ask_outcome(1)
        machine.delete(0, None, False, Order(), [Incident(at - 5, what)])
        if what == "power":
            machine.crash(0, how, Order(), Incident(at, what), clean=True)


@pytest.mark.parametrize("beside", ["collect", "load", "delete", "save"])
def test_what_comes_at_each_moment_of_a_save_that_lies_still_and_goes_on(machine, beside):
    how = {**HOW, "world_size": 1, "part_bytes": 1 << 30, "again": False}
    committed = 0
    machine.make_places(local=False)
    do = {
        "collect": lambda: machine.collect(0, None, False, Order(), []),
        "load": lambda: machine.load(0, 2, Order()),
        "delete": lambda: machine.delete(0, None, False, Order(), []),
        "save": lambda: machine.save(0, how, Order(), []),
    }
    for at in range(1, 27, 4):
        machine.save(0, how, Order(), [Incident(at, "pause")])
        change = [change for _, change in machine.changes.values()][-1]
        do[beside]()
        if machine.world.frozen():
            machine.thaw(set(range(9)), None, 0, Order(), [])
        assert not machine.world.frozen()
        if beside in ("collect", "load") and change.status != "committed":
            # It lay still for longer than its deadlines allow.
            assert {type(e) for e in change.reports.values()} == {DeadlineError}
        committed += change.status == "committed"
    assert committed > 0


@pytest.mark.parametrize("which", ["collect", "delete"])
def test_a_dry_run_changes_nothing(machine, which):
    machine.make_places(local=True)
    machine.save(0, {**HOW, "again": False}, Order(), [])
    machine.collect_dry(0, which)


def test_everything_that_must_be_tried_was_reached():
    """Runs last in this module: what the histories above reached."""
    print("\n" + report())
    if not REACHED:
        pytest.skip("the histories were not run")
    assert [what for what in MUST_BE_REACHED if not REACHED[what]] == []


def report() -> str:
    return "\n".join(f"{count:8d}  {what}" for what, count in sorted(REACHED.items()))
