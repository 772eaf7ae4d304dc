"""Copies a checkpoint to another place: an attempt there like a save, with an id of its own.

The bytes of data files and chunk table are copied as they are, so that checksums and digests hold
there as well, and are compared with them on the way: what is damaged is not copied. The names of
the files, the record and `.metadata` have the new id. So a copy never touches a file of somebody
else, and of a copy and what is saved, copied or deleted meanwhile one wins the slot. What ray_dcp
did not write keeps its names, and is only ever created. No torch, no ray.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace

from ray_dcp import events
from ray_dcp.commit_protocol.commands import RecordsRead
from ray_dcp.commit_protocol.error_aggregation import fenced_off, lost_race, undecided
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.commit_protocol.vote import Fenced, Lost, Open, Vote, Won
from ray_dcp.core import bounds
from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.processes import Stop, collector_paused, run_tasks
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    DamagedCheckpointError,
    StorageError,
)
from ray_dcp.format.manifest import FileEntry, FilesColumns, Manifest, encode_record, record_key
from ray_dcp.format.metadata import encode_metadata
from ray_dcp.format.save_trace import decode_trace, encode_trace, trace_key
from ray_dcp.format.step_info import info_key, info_slot
from ray_dcp.io.checkpoint import METADATA_KEY, Checkpoint, read_checkpoint
from ray_dcp.place.attempt_id import new_attempt
from ray_dcp.place.files import everything
from ray_dcp.place.outcome import settle
from ray_dcp.place.records import standing_records
from ray_dcp.place.standing import read_standing
from ray_dcp.place.stock_files import without_stock_files
from ray_dcp.place.stock_metadata import publish
from ray_dcp.place.target_lease import TargetLease
from ray_dcp.place.visibility import check_complete, explaining_removal
from ray_dcp.place.voting import decide
from ray_dcp.store.local import volatile
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import (
    KeyExistsError,
    KeyMissingError,
    PartWriter,
    PublishedFile,
    Storage,
    is_temporary,
    read_if_there,
    reuse_file,
)
from ray_dcp.transform.checked_files import CheckedFiles
from ray_dcp.transform.new_checkpoint import check_free, new_checkpoint
from ray_dcp.view.checkpoint_view import CheckpointView
from ray_dcp.view.progress import Meter, ShowProgress, uncounted
from ray_dcp.view.run_listing import needed_lengths

_PIECE_BYTES = 8 << 20
_NUM_THREADS = 4
_END_BYTES = 64
STOPPED = "the copy was interrupted, or failed"

Beside = Callable[[Meter, Callable[[], bool]], AbstractContextManager[object]]
"""What is done around a copy. It gets what counts bytes, and what returns whether the copy may be
committed, to decide what a failure takes back."""


@dataclass(frozen=True)
class CopyPlan:
    """The files of a checkpoint, in the order in which they are copied."""

    checkpoint: Checkpoint
    files: tuple[tuple[str, int], ...]
    """Keys and lengths of data files and chunk table."""
    beside: tuple[tuple[str, int], ...]
    """The same of what is told beside them, and that readers do not need."""
    last: tuple[tuple[str, int], ...]
    """The same of what makes it a checkpoint: the record, `.metadata`."""

    @property
    def num_files(self) -> int:
        """Number of all files."""
        return len(self.files) + len(self.beside) + len(self.last)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(n for _, n in (*self.files, *self.beside, *self.last))


def plan_copy(storage: Storage, checkpoint: Checkpoint) -> CopyPlan:
    """Returns what belongs to a checkpoint.

    Args:
        storage: Where it lies.
        checkpoint: As opened.

    Raises:
        DamagedCheckpointError: A file is missing, has another length, or, where ray_dcp did not
            write it, is too short.
        StorageError: The storage can't be read.
    """
    found = {entry.key: entry.num_bytes for entry in storage.list()}
    manifest, attempt = checkpoint.manifest, checkpoint.attempt
    if manifest is None or attempt is None:
        files = _checked(needed_lengths(checkpoint.table), found, is_least=True)
        index = [key for key in found if key.endswith(".index.json") and "/" not in key]
        end = [METADATA_KEY] if checkpoint.kind == "stock" else index
        return CopyPlan(checkpoint, files, (), tuple((key, found[key]) for key in end))
    entries = {entry.key: entry.num_bytes for entry in (*manifest.files, manifest.table)}
    files = _checked(entries, found)
    infos = sorted(n for key in found if (n := info_slot(key)) is not None and n < checkpoint.slot)
    told = [key for key in found if infos and info_slot(key) == infos[-1]]
    told += [trace_key(attempt)] if trace_key(attempt) in found else []
    last = [(record_key(checkpoint.slot), len(checkpoint.record))]
    if manifest.metadata is not None:
        last.append((METADATA_KEY, manifest.metadata.num_bytes))
    return CopyPlan(checkpoint, files, tuple((key, found[key]) for key in told), tuple(last))


def copy_checkpoint(
    source: Storage,
    plan: CopyPlan,
    target: Target,
    *,
    progress: ShowProgress = False,
    sources: Collection[CheckpointView] = (),
    opener: Callable[[Target], Storage] = open_storage,
    beside: Beside = lambda meter, may_stand: nullcontext(),
    then: Callable[[], object] = lambda: None,
) -> None:
    """Writes a checkpoint to another place; it appears there when all of it is durable.

    When it fails or is interrupted, what was written there is deleted again. If its process is
    killed, the next copy to the place ends the attempt, and takes the files that are whole.

    Args:
        source: Where it lies.
        plan: Of `plan_copy`.
        target: Where it goes; no checkpoint may be there, nor files that a save left of one.
        progress: As for `copy`.
        sources: See `new_checkpoint`.
        opener: What opens the storage of the target.
        beside: What is done around the copy, under the lease of the target.
        then: What is done after it, also if an earlier process had committed it.

    Raises:
        CheckpointExistsError: Something of a checkpoint is there, or was written meanwhile; or
            another process that lives writes there.
        CommitUnknownError: The storage did not say whether the copy appeared.
        DamagedCheckpointError: Bytes of a file are not those that were written, or it is shorter
            than it was when planned.
        SaveCancelledError: A collector ended the copy.
        StorageError: There is not enough space, or a storage failed.
    """
    work = f"copy {digest_bytes(plan.checkpoint.record).hex()}"
    with new_checkpoint(
        "copying", target, work, sources=sources, num_bytes=plan.num_bytes, progress=progress,
        opener=opener, attempts=plan.checkpoint.manifest is not None,
    ) as new:  # fmt: skip
        new.meter.expect(sum(num_bytes for _, num_bytes in plan.files))
        lease = new.lease
        is_done = lease.is_done or (
            lease.is_again and not lease.again and is_copied(source, plan.checkpoint, new.storage)
        )
        if is_done:
            with beside(new.meter, lambda: True):  # ends the leases that are left there
                pass
        else:
            _copy(source, plan, target, new.meter, opener, lease, beside)
        then()


def link_checkpoint(source: Storage, plan: CopyPlan, target: Target) -> str:
    """Gives a place that only the caller may write a checkpoint; returns its attempt there.

    Files are linked, or copied by the object store, where it can; they are read and written else.
    Nobody else may know the place: it has no lease, and who ends in the middle leaves its files to
    the caller's next writer.

    Args:
        source: Where the checkpoint lies, which ray_dcp wrote.
        plan: Of `plan_copy`.
        target: Where it goes; nothing may be there.

    Raises:
        CheckpointError: As `copy_checkpoint`.
    """
    lease = TargetLease(attempt=new_attempt())
    _copy(source, plan, target, uncounted(), open_storage, lease, links=True)
    return lease.attempt


def _copy(
    source: Storage,
    plan: CopyPlan,
    target: Target,
    meter: Meter,
    opener: Callable[[Target], Storage],
    lease: TargetLease,
    beside: Beside = lambda meter, may_stand: nullcontext(),
    links: bool = False,
) -> None:
    storage = opener(target)
    # Why before looking: what is committed after this meets the record of the copy, or its create.
    standing = read_standing(storage)
    manifest = plan.checkpoint.manifest
    taken = () if manifest is not None or not lease.is_again else (*plan.files, *plan.last)
    check_free(storage, lease.dead, [key for key, _ in taken])
    if lease.dead:
        # No checkpoint is there, so none has them: a copy that was killed left them.
        infos = [entry.key for entry in storage.list("step-info-")]
        storage.delete([key for key in infos if info_slot(key) is not None])
    if taken:
        names = tuple(f"-{key}" for key, _ in taken)
        hidden = [e.key for e in everything(storage) if is_temporary(e.key)]
        storage.delete([key for key in hidden if key.endswith(names)])
    copying = _Copying(source, storage, plan, meter, lease, links)
    with beside(meter, lambda: copying.may_stand):
        try:
            if manifest is None:
                _copy_others(copying, plan, standing)
            else:
                _copy_ours(copying, plan, manifest, standing, target, opener)
        except BaseException as error:
            copying.undo(error)
            raise


def _checked(
    expected: dict[str, int], found: dict[str, int], *, is_least: bool = False
) -> tuple[tuple[str, int], ...]:
    """Returns the files with their lengths, which are those expected, or at least those."""
    for key, num_bytes in expected.items():
        there = found.get(key, -1)
        if there < num_bytes or (there > num_bytes and not is_least):
            what = "it is missing" if key not in found else f"it has {there} bytes"
            raise DamagedCheckpointError(
                f"expected {key} with {'at least ' * is_least}{num_bytes} bytes, but {what}; copy "
                f"another step",
                key=key,
            )
    return tuple((key, found[key]) for key in expected)


def _copy_others(copying: _Copying, plan: CopyPlan, standing: RecordsRead) -> None:
    """Copies what stock DCP or Hugging Face wrote: no record commits it, and names are not unique.

    So every file is created where there is none, `.metadata` or the index last.
    """
    copying.files()
    storage = copying.target
    seen = standing_records(storage)
    if seen.manifest is not None or seen.last_slot > standing.last_slot:
        raise _key_taken_error(storage, record_key(seen.last_slot))
    for key, _ in plan.last:
        # Why: an earlier process with the same work has read it from the same source.
        if read_if_there(storage, key, 0) is not None and copying.is_there(key):
            continue
        is_read = key == METADATA_KEY
        copying.create(key, plan.checkpoint.record if is_read else copying.source.read(key))


def _copy_ours(
    copying: _Copying,
    plan: CopyPlan,
    manifest: Manifest,
    standing: RecordsRead,
    target: Target,
    opener: Callable[[Target], Storage],
) -> None:
    """Copies what ray_dcp wrote, and takes part in the vote on what the target holds."""
    storage, own = copying.target, copying.lease.attempt
    copying.renamed = manifest.attempt, own
    with explaining_removal(storage, own, standing.last_slot, target.url):
        copying.files()
    written = [(copying.name_of(key), num_bytes) for key, num_bytes in plan.files]
    check_complete(storage, written, own, standing.last_slot, target.url)
    record, metadata = _records(copying, plan.checkpoint, manifest, standing, target.url)
    for key, _ in plan.beside:
        _copy_beside(copying, key, own, standing.last_slot)
    slot = _commit(copying, target, Vote(
        target, own, standing.last_slot + 1, create_if_absent=standing.create_if_absent
    ), encode_record(record), opener)  # fmt: skip
    try:
        if not publish(storage, slot, metadata, target.url).superseded:
            storage.delete(without_stock_files(storage, standing.replaced))
    except CheckpointError as error:
        told = f"The copy in {target.url} stands, but what follows its commit failed: {error}"
        events.warn(told, stacklevel=4)


def _records(
    copying: _Copying,
    checkpoint: Checkpoint,
    manifest: Manifest,
    standing: RecordsRead,
    url: str,
) -> tuple[Manifest, bytes | None]:
    """Returns the manifest of the copy, and its `.metadata`."""
    record = replace(
        _of_attempt(manifest, copying.renamed[1]),
        previous_slot=standing.last_slot,
        decided=standing.decided,
    )
    if manifest.metadata is None:
        return record, None
    with collector_paused():
        table = checkpoint.table
        table = replace(table, files=tuple(map(copying.name_of, table.files)))
        metadata = encode_metadata(table, checkpoint_id=url, attempt=record.attempt)
    entry = FileEntry(METADATA_KEY, len(metadata), digest_bytes(metadata).hex())
    return replace(record, metadata=entry), metadata


def _of_attempt(manifest: Manifest, attempt: str) -> Manifest:
    """Returns the manifest of the same files under the names of another attempt."""

    def named(key: str) -> str:
        return key.replace(manifest.attempt, attempt)

    end = manifest.table_end
    return replace(
        manifest,
        attempt=attempt,
        files=FilesColumns.of(replace(e, key=named(e.key)) for e in manifest.files),
        table=replace(manifest.table, key=named(manifest.table.key)),
        table_end=None if end is None else replace(end, key=named(end.key)),
        metadata=None,
        replaced_metadata=None,
        previous_slot=0,
        decided=(),
    )


def is_copied(source: Storage, checkpoint: Checkpoint, target: Storage) -> bool:
    """Returns whether a copy of a checkpoint is at a place, whole by the lengths of its files.

    Args:
        source: Where the checkpoint lies.
        checkpoint: As opened.
        target: The place.

    Raises:
        StorageError: A storage failed.

    Complexity:
        By the digests in the manifests; what ray_dcp did not write is read and compared.
    """
    # Why first: a place without files is asked once, and not for each kind of checkpoint.
    if not target.list():
        return False
    try:
        there = read_checkpoint(target, checks_later=True)
        plan = plan_copy(target, there)
    except StorageError:
        raise
    except CheckpointError:
        return False
    ours, other = checkpoint.manifest, there.manifest
    if ours is not None and other is not None:
        same = _of_attempt(ours, new_attempt())
        return encode_record(same) == encode_record(_of_attempt(other, same.attempt))
    own = plan_copy(source, checkpoint)
    if (own.files, own.last, checkpoint.record) != (plan.files, plan.last, there.record):
        return False
    return all(
        source.read(key, start, _PIECE_BYTES) == target.read(key, start, _PIECE_BYTES)
        for key, num_bytes in (*own.files, *own.last)
        for start in range(0, num_bytes, _PIECE_BYTES)
    )


def _copy_beside(copying: _Copying, key: str, own: str, last_slot: int) -> None:
    """Copies what is told beside a checkpoint; what is damaged there is left out."""
    before = copying.renamed[0]
    with suppress(KeyMissingError, DamagedCheckpointError):
        data = copying.source.read(key)
        if info_slot(key) is not None:
            key = info_key(last_slot)
        elif key == trace_key(before):
            data = encode_trace(replace(decode_trace(data, key=key), attempt=own))
        else:
            data = data.replace(before.encode(), own.encode(), 1)
        copying.create(copying.name_of(key), data, durable=key != trace_key(before))


def _commit(
    copying: _Copying,
    target: Target,
    vote: Vote,
    record: bytes,
    opener: Callable[[Target], Storage],
) -> int:
    """Returns the slot in which the copy is committed."""
    # Careful: from here on the record may stand, and files may only go when it is sure not to.
    copying.may_stand = True
    try:
        decision = decide(vote, vote.commit(record), opener)
    except BaseException:
        ended = settle(target, vote.attempt, reason=STOPPED, rank=None, opener=opener)
        copying.may_stand = not isinstance(ended, Fenced)
        raise
    failed = decision.error if isinstance(decision, Open) else None
    if failed is not None:
        decision = settle(
            target, vote.attempt, reason=STOPPED, rank=None, opener=opener,
            create_if_absent=opener(target).traits.create_if_absent,
        )  # fmt: skip
    match decision:
        case Won():
            return decision.slot
        case Open():
            raise undecided(vote, str(failed))
        case Lost():
            copying.may_stand = False
            raise lost_race(vote, decision)
        case Fenced():
            copying.may_stand = False
            raise failed or fenced_off(vote, decision)


def _key_taken_error(storage: Storage, key: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"expected to be the only one who writes to {storage.url}, but somebody else created "
        f"{key} there meanwhile; choose another place",
        checkpoint_id=storage.url,
        key=key,
    )


class _Copying:
    """One copy that is under way.

    Attributes:
        renamed: Attempt in the names of the source, and what takes its place.
        may_stand: The copy may be committed: nothing is undone.
    """

    def __init__(
        self,
        source: Storage,
        target: Storage,
        plan: CopyPlan,
        meter: Meter,
        lease: TargetLease,
        links: bool,
    ) -> None:
        self.source, self.target = source, target
        self._links = links
        self.lease = lease
        self.renamed: tuple[str, str] = ("", "")
        self.may_stand = False
        self._stop = Stop()
        self._own: list[str] = []
        self._unsure: dict[str, str | bytes] = {}
        """Files that may have been created when they were interrupted: the key in the source, or
        the bytes."""
        self._plan, self._meter = plan, meter
        self._lengths = dict((*plan.files, *plan.last))
        self._make_durable = getattr(target, "make_durable", None) if links else None
        """What makes files durable together that were linked without that, if the target has it."""
        self._linked: list[str] = []
        self._active = 0
        self._quiet = threading.Condition()

    def name_of(self, key: str) -> str:
        """Returns the key of a file at the target."""
        before, own = self.renamed
        return key.replace(before, own) if before else key

    def files(self) -> None:
        """Copies data files and chunk table."""
        files = self._plan.files
        self._checked = CheckedFiles(self.source, self._plan.checkpoint, self._stop)
        run_tasks(files, self._file, min(_NUM_THREADS, len(files)), self._stop)
        if self._make_durable is not None and self._linked:
            self._make_durable(self._linked)

    def create(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Creates a small file.

        Raises:
            CheckpointExistsError: It is there.
        """
        target = self.target if durable else volatile(self.target)
        try:
            target.write(key, data, create=self.target.traits.create_if_absent)
        except KeyExistsError as error:
            raise _key_taken_error(self.target, key) from error
        except BaseException:
            self._unsure[key] = data
            raise
        self._own.append(key)

    def _file(self, item: tuple[str, int]) -> None:
        with self._quiet:
            self._active += 1
        try:
            self._copy(*item)
        finally:
            with self._quiet:
                self._active -= 1
                self._quiet.notify_all()

    def is_there(self, key: str) -> bool:
        """Returns whether an earlier process has copied a file, with all its bytes.

        Of a file with the name of an attempt, the name has to be given anew.
        """
        before = self.renamed[0]
        if not before:
            if is_same := self.lease.is_again and self._is_same(key, key):
                self._own.append(key)
            return is_same
        if not hasattr(self.target, "reuse"):
            return False
        for attempt in self.lease.again:
            name = key.replace(before, attempt)
            if self._is_same(key, name) and self._reuse(self.target, name, key, sync=True):
                return True
        if not self._links or not self._reuse(
            self.source, key, key, sync=self._make_durable is None
        ):
            return False
        self._linked.append(self.name_of(key))
        return True

    def _reuse(self, storage: Storage, name: str, key: str, *, sync: bool) -> bool:
        """Gives a file of the copy the bytes of an equal one, if the storage can without moving."""
        num_bytes = self._lengths[key]
        published = PublishedFile(storage.url, name, num_bytes, digest="")
        end = self.source.read(key, max(0, num_bytes - _END_BYTES), _END_BYTES)
        return reuse_file(self.target, self.name_of(key), published, end, sync=sync) is not None

    def _is_same(self, key: str, name: str) -> bool:
        """Returns whether a file is equal, unless this copy has to stop."""
        return self._is_equal(key, name, lambda: self._stop.asked)

    def _is_equal(self, key: str, name: str, stops: Callable[[], bool] = lambda: False) -> bool:
        """Returns whether a file at the target has the bytes of one of the source, all compared."""
        num_bytes = self._lengths.get(key)
        with suppress(KeyMissingError):
            for start in range(0, (num_bytes or 0) + 1, _PIECE_BYTES):
                there = self.target.read(name, start, _PIECE_BYTES)
                if stops() or there != self.source.read(key, start, _PIECE_BYTES):
                    return False
            return num_bytes is not None
        return False

    def _copy(self, key: str, num_bytes: int) -> None:
        name = self.name_of(key)
        # Why: nobody else uses a name that has the id, so it may go even if nobody knows whether
        # it was created.
        if self.renamed[1] and self.renamed[1] in name:
            self._own.append(name)
        if self.is_there(key):
            self._meter.add(num_bytes, key)
            return
        problem = self._passed(key, name, num_bytes, self._meter)
        if problem is not None:
            # Why again: bytes may have been altered in transit.
            problem = self._passed(key, name, num_bytes, uncounted())
        if problem is not None:
            raise DamagedCheckpointError(f"{problem}; copy another step", key=key)

    def _passed(self, key: str, name: str, num_bytes: int, meter: Meter) -> str | None:
        """Copies a file unless it is damaged; returns what is damaged in it, or None."""
        writer: PartWriter | None = None
        try:
            writer = self.target.open_writer(name)
            problem = self._checked.read(key, num_bytes, writer.write, meter)
            if problem is not None:
                return problem
            self._unsure[name] = key
            writer.commit()
            self._own.append(name)
            return None
        except KeyExistsError as error:
            self._unsure.pop(name, None)
            raise _key_taken_error(self.target, name) from error
        finally:
            if writer is not None:
                writer.abort()

    def undo(self, error: BaseException) -> None:
        """Stops the other threads, and deletes what this copy created, unless it may stand."""
        self._stop.because(error)
        with self._quiet:
            self._quiet.wait_for(lambda: not self._active, bounds.COPY_END_S)
        if self.may_stand:
            return
        with suppress(CheckpointError):
            # Why backwards: what makes the files of others a checkpoint was created last.
            unsure = [name for name in self._unsure if name not in self._own]
            own = [*self._own, *(name for name in unsure if self._is_own(name))]
            for key in reversed(list(dict.fromkeys(own))):
                self.target.delete([key])

    def _is_own(self, name: str) -> bool:
        """Returns whether a file that may have been created has the bytes of this copy."""
        made = self._unsure[name]
        if isinstance(made, str):
            return self._is_equal(made, name)
        return read_if_there(self.target, name) == made
