"""Performs the tasks of the machines: thin code over `planning`, `format`, `store` and `io`.

It decides nothing, and raises nothing: an error becomes a `Failed` result. `plan_of` makes a plan
from the rows that ranks sent, and from the rows that follow from those. `build_commit` builds all
bytes of a commit except the data (chunk table, manifest, `.metadata`) from the receipts.

`outcome` reads from the storage what became of an attempt; `settle` decides it for good. *Why* a
rank may settle: the coordinator may be gone. The vote on storage has one winner, so it does not
matter who votes, and every rank gets the same answer.
"""

from __future__ import annotations

import secrets
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np

from ray_dcp.commit_protocol.commands import (
    BuildCommit,
    CollectReplaced,
    CommitBuilt,
    CreateAbort,
    CreateRecord,
    Failed,
    Finished,
    MakePlan,
    OutcomeRead,
    Planned,
    PublishMetadata,
    ReadCheckpoint,
    ReadOutcome,
    ReadRecord,
    ReadRecords,
    RecordCreated,
    Result,
    RowsMissing,
    ShareReads,
    SlotFree,
    SlotTaken,
    Task,
    WriteTable,
)
from ray_dcp.commit_protocol.messages import (
    LoadGo,
    Target,
    join_receipts,
)
from ray_dcp.commit_protocol.vote import Decision, Fenced, Lost, Open, Vote, VoteTask, Won
from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.columns import decode, for_rank, without_rank
from ray_dcp.core.processes import at_once, collector_paused, run_tasks
from ray_dcp.core.values import Columns, GlobalPlan, Int64Array
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    InternalError,
    InvalidRequestError,
    RankDisagreementError,
    StorageError,
)
from ray_dcp.format.manifest import (
    AbortRecord,
    DeleteRecord,
    FileEntry,
    FilesColumns,
    Manifest,
    decode_record,
    encode_record,
    record_key,
)
from ray_dcp.format.metadata import encode_metadata
from ray_dcp.format.table import end_of, place_runs, placed
from ray_dcp.io.checkpoint import METADATA_KEY, find_checkpoint
from ray_dcp.io.records import read_slots, used_slots
from ray_dcp.place.standing import (
    confirm_record,
    decision_of,
    overtaken,
    publish,
    read_standing,
    republish,
    standing_records,
    without_stock_files,
)
from ray_dcp.planning.fingerprint import Fingerprints, Regular, alike, fingerprint, infer
from ray_dcp.planning.global_plan import (
    MIN_WRITER_BYTES,
    checked_receipts,
    encoded_table,
    make_plan,
    rank_plan,
)
from ray_dcp.planning.merge import with_contents
from ray_dcp.planning.reads import Ranges, ReadShares, share_reads
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import KeyExistsError, KeyMissingError, Storage, threads_for

SAMPLES = 16


def plan_of(task: MakePlan) -> Planned | RowsMissing:
    """Returns the result of `MakePlan`.

    Raises:
        CheckpointError: The ranks' items do not form a checkpoint, or do not have the fingerprints
            that were sent.
    """
    held = _decode_known_items(task)
    held.update(_following(task, held))
    missing = tuple(rank for rank in range(len(task.columns)) if rank not in held)
    if missing:
        return RowsMissing(missing)
    columns = [
        with_contents(held[rank], contents, rank)
        for rank, contents in zip(range(len(task.columns)), task.contents, strict=True)
    ]
    plan = make_plan(
        columns,
        part_bytes=task.part_bytes,
        min_writer_bytes=MIN_WRITER_BYTES,
        to_lowest_rank=task.to_lowest_rank,
        nodes=task.nodes,
    )
    parts = tuple(rank_plan(plan, rank) for rank in range(plan.world_size))
    return Planned(plan, parts, disagreements=plan.disagreements)


def _decode_known_items(task: MakePlan) -> dict[int, Columns]:
    """Returns the items of the ranks whose rows are known; equal ones are shared."""
    known: dict[bytes, Columns] = {}
    found = {}
    for rank, (name, encoded) in enumerate(zip(task.fingerprints, task.columns, strict=True)):
        if not encoded:
            continue
        columns = known.get(name)
        if columns is None:
            columns = known[name] = decode(encoded)
            if fingerprint(columns, **_options(task)) != name:
                raise RankDisagreementError(
                    f"expected the items of rank {rank} to have the fingerprint that it sent, but "
                    f"they have another one: run the same version of ray_dcp on all ranks",
                    rank=rank,
                )
        found[rank] = columns
    return found


def _following(task: MakePlan, held: Mapping[int, Columns]) -> dict[int, Columns]:
    """Returns the items of ranks that sent no rows, where they follow from the rows of others.

    Pipelines are searched stage by stage: ranks that hold boxes of the same items together.
    """
    world_size, found = len(task.columns), dict[int, Columns]()
    for ranks in alike(task.fingerprints):
        own = {
            at: without_rank(held[rank], world_size)
            for at, rank in enumerate(ranks.tolist())
            if rank in held
        }
        if len(own) == len(ranks):
            continue
        regular = infer(own, len(ranks))
        if regular is not None:
            found.update(_on_mesh(task, held, ranks, np.arange(len(ranks)), regular))
        rest = np.array([rank for rank in ranks.tolist() if rank not in held and rank not in found])
        if not len(rest):
            continue
        # Where a few ranks hold something else, those that are left make no mesh of their own.
        known = {int(ranks[at]): columns for at, columns in own.items()}
        regular = infer(known, world_size)
        if regular is not None:
            found.update(_on_mesh(task, held, rest, rest, regular))
    return found


def _on_mesh(
    task: MakePlan,
    held: Mapping[int, Columns],
    ranks: Int64Array,
    places: Int64Array,
    regular: Regular,
) -> Iterator[tuple[int, Columns]]:
    """Yields the ranks without rows that hold, by their fingerprints, the boxes at their places."""
    names = Fingerprints(regular.first, **_options(task))
    # Why of the second half: a mesh was made of ranks of the first. Why at all: irregular slabs
    # look like a mesh at first, and to follow that for all ranks takes long.
    some = np.unique(np.linspace(len(ranks) // 2, len(ranks) - 1, SAMPLES).astype(np.int64))
    if not any(
        names.of_boxes(columns, rank) == task.fingerprints[rank]
        for rank, columns in zip(ranks[some].tolist(), regular.columns(places[some]), strict=True)
    ):
        return
    for rank, columns in zip(ranks.tolist(), regular.columns(places), strict=True):
        if rank not in held and names.of_boxes(columns, rank) == task.fingerprints[rank]:
            yield rank, for_rank(columns, rank, len(task.columns)) if names.has_own else columns


def _options(task: MakePlan) -> dict[str, Any]:
    """Returns the options on which fingerprints depend."""
    return {
        "world_size": len(task.columns),
        "part_bytes": task.part_bytes,
        "to_lowest_rank": task.to_lowest_rank,
    }


def build_commit(task: BuildCommit) -> CommitBuilt:
    """Returns the result of `BuildCommit`.

    Raises:
        InternalError: Receipts and plan do not match.
    """
    plan, key = task.plan, f"chunks.{task.attempt}.table"
    receipts = join_receipts(task.receipts)
    places = checked_receipts(plan, task.attempt, receipts)
    table, entry, end = _table_of(plan)
    metadata = None
    if task.stock_metadata:
        finished = placed(plan.table, task.attempt, places)
        url = task.target.url
        metadata = encode_metadata(finished, checkpoint_id=url, attempt=task.attempt)
    record = encode_record(
        Manifest(
            attempt=task.attempt,
            epoch=task.epoch,
            world_size=plan.world_size,
            created_s=time.time(),
            files=FilesColumns(
                tuple(receipts.keys.split("\n")) if len(receipts) else (),
                tuple(receipts.num_bytes.tolist()),
                receipts.digests.hex(),
            ),
            table=replace(entry, key=key),
            metadata=None if metadata is None else _entry(METADATA_KEY, metadata),
            replaced_metadata=task.replaced_metadata,
            plan_digest=plan.digest.hex(),
            num_tensors=plan.table.num_tensors,
            num_chunks=plan.table.num_chunks,
            payload_bytes=plan.fixed_bytes + int(places[:, 1].sum()),
            previous_slot=task.previous_slot,
            decided=task.decided,
            deferred=place_runs(places),
            table_end=None if end is None else replace(end, key=key),
            about=task.about,
        )
    )
    return CommitBuilt(key, table, record, metadata)


_tables: WeakKeyDictionary[GlobalPlan, tuple[bytes, FileEntry, FileEntry | None]] = (
    WeakKeyDictionary()
)


def _table_of(plan: GlobalPlan) -> tuple[bytes, FileEntry, FileEntry | None]:
    """Returns the chunk table of a plan, encoded once for all its saves.

    Returns:
        The table, its entry, and that of its last bytes if its rows are grouped; without keys.
    """
    found = _tables.get(plan)
    if found is None:
        data = encoded_table(plan)
        start = end_of(data)
        end = None if start is None else _entry("", data[start:])
        found = _tables[plan] = (data, _entry("", data), end)
    return found


def _entry(key: str, data: bytes) -> FileEntry:
    return FileEntry(key, len(data), digest_bytes(data).hex())


MOST_NAMED = 20


def new_attempt() -> str:
    """Returns an attempt id that no other save ever had: 16 random hex digits."""
    return secrets.token_hex(8)


def perform(task: Task, opener: Callable[[Target], Storage] = open_storage) -> Result:
    """Performs a task. Blocks as long as the storage does; never raises.

    Args:
        task: The task of a `Perform` command.
        opener: Opens the storage.

    Returns:
        The result that the task's docstring names, or `Failed`.
    """
    try:
        return _perform(task, opener)
    except CheckpointError as error:
        return Failed(error)
    except Exception as error:  # noqa: BLE001 - a raw error would end the coordinator
        internal = InternalError(
            f"{type(task).__name__} failed with {type(error).__name__}: {error}. Please report this"
        )
        internal.__notes__ = [traceback.format_exc()]
        return Failed(internal)


def _perform(task: Task, opener: Callable[[Target], Storage]) -> Result:
    match task:
        case ShareReads():
            return _share_reads(task)
        case ReadRecords():
            return read_standing(opener(task.target))
        case MakePlan():
            with collector_paused():
                return plan_of(task)
        case BuildCommit():
            with collector_paused():
                return build_commit(task)
        case WriteTable():
            return _write_table(task, opener(task.target))
        case CreateRecord():
            storage = opener(task.target)
            return _create(storage, task.slot, task.record, task.create_if_absent)
        case ReadRecord():
            return _confirmed_record(opener(task.target), task.slot)
        case ReadOutcome():
            return _outcome(opener(task.target), task)
        case CreateAbort():
            record = AbortRecord(attempt=task.attempt, reason=task.reason, rank=task.rank)
            storage = opener(task.target)
            return _create(storage, task.slot, encode_record(record), task.create_if_absent)
        case PublishMetadata():
            return publish(opener(task.target), task.slot, task.metadata, task.target.url)
        case CollectReplaced():
            storage = opener(task.target)
            storage.delete(without_stock_files(storage, task.keys))
            return Finished()
        case ReadCheckpoint():
            storage = opener(task.target)
            found = find_checkpoint(storage, checkpoint_id=task.target.url)
            if found.metadata_is_stale:
                # Why here: whoever committed it is gone, and no save may follow. Suppressed: a
                # load needs no `.metadata`, and may have no right to write.
                with suppress(CheckpointError):
                    republish(storage, task.target.url)
            return LoadGo(found.kind, found.slot, found.record, found.table)


def _write_table(task: WriteTable, storage: Storage) -> Finished:
    files = [(one.key, one.num_bytes) for one in task.receipts]
    url = task.target.url
    at_once(
        lambda: check_complete(storage, files, task.attempt, task.previous_slot, url),
        partial(storage.write, task.key, task.table),
    )
    return Finished()


def check_complete(
    storage: Storage, files: list[tuple[str, int]], attempt: str, previous_slot: int, url: str
) -> None:
    """Checks that all files are visible, and if not, whether another commit removed them.

    Args:
        storage: The storage of the target.
        files: Keys and lengths of the files.
        attempt: The attempt to commit.
        previous_slot: Highest slot in use when it was planned.
        url: URL of the target.

    Raises:
        CheckpointExistsError: Another save or a delete was committed since it was planned.
        StorageError: Some files are missing or have another length.
    """
    with explaining_removal(storage, attempt, previous_slot, url):
        check_visible(storage, files)


@contextmanager
def explaining_removal(
    storage: Storage, attempt: str, previous_slot: int, url: str
) -> Iterator[None]:
    """Raises `CheckpointExistsError` if a storage fails because another commit removed files.

    Args:
        storage: The storage of the target.
        attempt: The attempt that owns the files.
        previous_slot: Highest slot in use when it was planned.
        url: URL of the target.
    """
    try:
        yield
    except StorageError as error:
        standing = standing_records(storage)
        if standing.record is None or standing.slot <= previous_slot:
            raise
        what = "committed" if standing.manifest is not None else "deleted"
        raise CheckpointExistsError(
            f"Expected attempt {attempt} to be the only one of this checkpoint id, but "
            f"attempt {standing.record.attempt} {what} it in slot {standing.slot} meanwhile, which "
            f"removes the files of all others ({error.message}). Only one save at a time can have "
            f"an id",
            checkpoint_id=url,
        ) from error


def _share_reads(task: ShareReads) -> ReadShares:
    ranks, needs = range(task.world_size), task.needs
    return share_reads(
        {rank: Ranges.decode(each.ranges) for rank, each in needs.items()},
        world_size=task.world_size,
        nodes=[needs[rank].node if rank in needs else "" for rank in ranks],
        # Why one: all ranks read the same storage, with the same options.
        cost=needs[min(needs)].cost,
    )


def check_visible(storage: Storage, files: list[tuple[str, int]]) -> None:
    """Checks that files of ranks are visible, where the commit is made or on the rank itself.

    *Why*: with a path that the nodes do not share, every rank writes without an error, and the
    checkpoint would be committed without its files.

    Raises:
        StorageError: Some files are missing or have another length.
    """
    wrong: list[str] = []

    def check(file: tuple[str, int]) -> None:
        # Why not a list: network filesystems show an old one for a while.
        key, num_bytes = file
        try:
            start = max(num_bytes - 1, 0)
            tail = storage.read(key, start, 2)
        except KeyMissingError:
            wrong.append(f"{key} is missing")
            return
        if len(tail) != num_bytes - start:
            wrong.append(f"{key} has another length than {num_bytes} bytes")

    run_tasks(files, check, threads_for(storage, len(files)))
    if wrong:
        more = f" and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise StorageError(
            f"Expected every file that the ranks wrote in {storage.url}, as the coordinator sees "
            f"it, but {', '.join(sorted(wrong)[:MOST_NAMED])}{more}. Save to a place that all "
            f"nodes share; in Ray Train's workers, ray_dcp.train.checkpointer does"
        )


def _create(
    storage: Storage, slot: int, record: bytes, can_create: bool
) -> RecordCreated | SlotTaken:
    if can_create and not storage.traits.create_if_absent:
        raise StorageError(
            f"Expected that {storage.url} creates a file only if there is none, as it did when "
            f"this save was planned, but on this machine it does not. Mount it in the same way on "
            f"all machines"
        )
    if not can_create:
        # Why: such a storage leaves the decision to the coordinator alone, which asks first.
        found = _read_record(storage, slot)
        if isinstance(found, SlotTaken):
            return found
    before: tuple[int, ...] | None = None
    try:
        # Why looked meanwhile: see `overtaken`.
        _, before = at_once(
            lambda: storage.write(record_key(slot), record, create=can_create),
            lambda: used_slots(storage),
        )
    except KeyExistsError:
        found = _read_record(storage, slot)
        if isinstance(found, SlotTaken):
            return found
        above = overtaken(storage, slot, record)
        if above is None:
            raise InternalError(
                f"Slot {slot} was taken and is free again, but records are only removed below one "
                f"that decides. Somebody else deleted {record_key(slot)}",
                key=record_key(slot),
            ) from None
        # Why not once more: below what decides it is all the same whether this record is there.
        return RecordCreated(slot, above)
    if not can_create:
        # Why: somebody else may have looked at the same time, and written since.
        found = _read_record(storage, slot)
        if isinstance(found, SlotFree):
            raise StorageError(
                f"{storage.url} answered that {record_key(slot)} was written, but it is not "
                f"there. Save to another storage, or repair this one",
                key=record_key(slot),
            )
        if found.record != record:
            return found
    return RecordCreated(slot, overtaken(storage, slot, record, before))


def _outcome(storage: Storage, task: ReadOutcome) -> OutcomeRead:
    decision = decision_of(read_slots(storage, whole=True), task.attempt)
    if not isinstance(decision, Won):
        return OutcomeRead(0 if decision is None else decision.slot)
    confirm_record(storage, decision.slot, decision.record)
    # Suppressed: it is committed, and the next save or load publishes it.
    with suppress(CheckpointError):
        republish(storage, task.target.url)
    return OutcomeRead(decision.slot, decision.record)


def _confirmed_record(storage: Storage, slot: int) -> SlotTaken | SlotFree:
    found = _read_record(storage, slot)
    if isinstance(found, SlotTaken):
        confirm_record(storage, slot, found.record)
    return found


def _read_record(storage: Storage, slot: int) -> SlotTaken | SlotFree:
    key = record_key(slot)
    try:
        data = storage.read(key)
    except KeyMissingError:
        return SlotFree(slot)
    record = decode_record(data, key=key)
    return SlotTaken(
        slot,
        record.attempt,
        isinstance(record, AbortRecord),
        data,
        isinstance(record, DeleteRecord),
        overtaken(storage, slot, data),
    )


Opener = Callable[[Target], Storage]
Outcome = Literal["committed", "aborted", "open"]


def outcome(path: AnyPlace, attempt: str) -> Outcome:
    """Returns what became of a save whose outcome was unknown.

    Args:
        path: The `checkpoint_id` of the save.
        attempt: Id of the attempt, as in `CommitUnknownError.attempt` or `Metadata.attempt`.

    Returns:
        `"committed"` (also if it was replaced or deleted since) or `"aborted"` once a record names
        the attempt; `"open"` before that. An attempt whose ranks and coordinator are all gone stays
        open: nothing commits it once a later save of the same id is committed. An attempt that very
        many others followed is forgotten, and counts as open as well. On a storage without
        conditional create, every attempt stays open whose coordinator died before it decided.

    Raises:
        InvalidRequestError: `path` is invalid, or `attempt` is empty.
        StorageError: The storage does not answer.
        DamagedCheckpointError: A record can't be read.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     outcome(root, "no-such-attempt")
        'open'
    """
    if not isinstance(attempt, str) or not attempt:
        raise InvalidRequestError(
            f"Expected the id of an attempt, found {attempt!r}. CommitUnknownError.attempt has it",
            key="attempt",
        )
    match decision_of(read_slots(open_storage(path), whole=True), attempt):
        case Won() | Lost():
            return "committed"
        case Fenced():
            return "aborted"
        case None:
            return "open"


def settle(
    target: Target,
    attempt: str,
    *,
    reason: str,
    rank: int | None,
    opener: Opener = open_storage,
    create_if_absent: bool = True,
) -> Decision:
    """Returns how an attempt ended, and ends it if it has not.

    Never raises.

    Args:
        target: Location of the checkpoint.
        attempt: Id of the attempt.
        reason: Reason, for the abort record.
        rank: The rank that settles, or None.
        opener: Opens the storage.
        create_if_absent: Whether the storage creates a record only if it is absent, as the
            attempt's coordinator found.

    Returns:
        `Won` or `Fenced`; `Lost` if it was committed, and replaced or deleted since; `Open` if the
        storage does not answer. On a storage without conditional create, it only reads, and returns
        `Open` if no record names the attempt.
    """
    try:
        storage = opener(target)
        seen = read_slots(storage, whole=True)
        decided = decision_of(seen, attempt)
        if decided is not None:
            with suppress(KeyMissingError):  # replaced and removed meanwhile
                confirm_record(storage, decided.slot, storage.read(record_key(decided.slot)))
        if decided is None and not (create_if_absent and storage.traits.create_if_absent):
            return _left_to_coordinator(storage)
    except CheckpointError as error:
        return Open(error)
    if decided is not None:
        return decided
    vote = Vote(target, attempt, seen.last_slot + 1)
    return decide(vote, vote.abort(reason, rank), opener)


def decide(vote: Vote, task: VoteTask, opener: Opener) -> Decision:
    """Performs the tasks of a vote from the first one on, and returns the decision."""
    step: VoteTask | Decision = task
    while not isinstance(step, Won | Fenced | Lost | Open):
        step = vote.advance(perform(step, opener))
    return step


def _left_to_coordinator(storage: Storage) -> Open:
    """Returns the decision on a storage on which an abort record could replace the commit."""
    return Open(
        StorageError(
            f"{storage.url} can't create a file only if there is none: only the coordinator of "
            f"the save may decide there, and no record of it names this attempt yet"
        )
    )
