"""Saves and loads by any number of ranks in one thread, without Ray; the ranks hold arrays.

What a rank holds is in `array_states`. Which errors the ranks of one operation may be told together
is in `one_outcome`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ray_dcp.commit_protocol.messages import (
    OpKey,
    PartsHeld,
    PartsWritten,
    Reply,
    Request,
    SaveOutcome,
    SaveStaged,
    Target,
)
from ray_dcp.errors import CheckpointError, CommitUnknownError
from ray_dcp.io.checkpoint import Checkpoint
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.runtime.rank_load import LoadResult
from ray_dcp.runtime.rank_save import (
    Captured,
    PlanMemory,
)
from ray_dcp.runtime.tasks import perform
from ray_dcp.store.storage import Storage
from tests.crash.array_states import ArrayCapture, ArrayWork, State, same_value
from tests.inline_ranks import RankResult, run_ranks
from tests.rank_saves import load_rank, rank_save, save_rank

Opener = Callable[[Target], Storage]
Capturing = Callable[[State, int, int], Captured]


def save_ranks(
    state: State,
    world_size: int,
    url: str,
    *,
    session: str = "save",
    seq: int = 0,
    options: SaveOptions | None = None,
    states: Sequence[State] | None = None,
    capture: Capturing = ArrayCapture,
    staged: bool = False,
    nodes: Sequence[str] = (),
    memories: Sequence[PlanMemory] = (),
    **more: Any,
) -> list[Generator[Request, Reply, SaveOutcome]]:
    """Returns the generators of a save, for `run_ranks`.

    Args:
        state: What to save.
        world_size: Number of ranks.
        url: Where.
        session: Of the ranks.
        seq: Number of the operation in the session.
        options: How.
        states: Gives each rank a state of its own.
        capture: From state, rank and world size to what a rank captures.
        staged: As `async_save` does: a stager tells of each file, which here is the rank itself.
        nodes: Names the node of each rank; what they write together is balanced.
        memories: Of each rank: what it knows of earlier saves.
        **more: As for `save_rank`, of each rank.
    """
    save = _save_staged if staged else save_rank
    return [
        save(
            OpKey(session, seq), rank=rank, world_size=world_size, target=Target(url),
            options=options or SaveOptions(),
            capture=partial(capture, states[rank] if states else state, rank, world_size),
            node=nodes[rank] if nodes else "",
            memory=memories[rank] if memories else None, **more,
        )
        for rank in range(world_size)
    ]  # fmt: skip


def _save_staged(
    key: OpKey, *, capture: Callable[[], Captured], **how: Any
) -> Generator[Request, Reply, SaveOutcome]:
    """What a rank and its stager say and do in an asynchronous save, one after the other."""
    save = rank_save(key, staged=True, **how)
    rank = save.rank
    go, captured = yield from save.join(capture)
    held = PartsHeld(key, rank, go.attempt, go.epoch, f"stager {rank}")
    yield held
    written = save.write(go, captured.source, captured.deferred)
    yield PartsWritten(key, rank, go.attempt, go.epoch, written.files, written.error)
    told = SaveStaged(key, rank, go.attempt, go.epoch, held=held)
    return (yield from save.outcome(go, told))


def load_ranks(
    like: State,
    world_size: int,
    url: str,
    *,
    session: str = "load",
    seq: int = 0,
    options: LoadOptions | None = None,
    work: type[ArrayWork] = ArrayWork,
    **more: Any,
) -> tuple[list[Generator[Request, Reply, LoadResult]], list[ArrayWork]]:
    """Returns the generators of a load, and the list that will hold each rank's work.

    Args:
        like: A state with the names, dtypes and shapes that are wanted.
        world_size: Number of ranks.
        url: Where.
        session: Of the ranks.
        seq: Number of the operation in the session.
        options: How.
        work: What each rank makes of its part.
        **more: As for `load_rank`, of each rank.
    """
    works: list[Any] = [None] * world_size

    def plan(checkpoint: Checkpoint, rank: int) -> ArrayWork:
        works[rank] = work(checkpoint, like, rank, world_size)
        return works[rank]  # type: ignore[no-any-return]

    ranks = [
        load_rank(
            OpKey(session, seq), rank=rank, world_size=world_size, target=Target(url),
            options=options or LoadOptions(), plan=partial(plan, rank=rank), **more,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    return ranks, works


@dataclass(frozen=True)
class _Opener:
    storage: Storage

    def __call__(self, target: Target) -> Storage:
        return self.storage


def save_state(
    storage: Storage,
    state: State,
    world_size: int = 2,
    *,
    options: SaveOptions | None = None,
    **how: Any,
) -> SaveOutcome:
    """Saves a state to a storage, by several ranks in this thread.

    Args:
        storage: Where; also one that `open_storage` does not know.
        state: What to save.
        world_size: Number of ranks.
        options: How; by default with one thread.
        **how: As for `save_ranks`.

    Raises:
        CheckpointError: What the ranks were told.
        AssertionError: They were told different things.
    """
    opener = _Opener(storage)
    options = options or SaveOptions(num_threads=1)  # so that all calls come in one order
    ranks = save_ranks(state, world_size, storage.url, options=options, opener=opener, **how)
    return one_outcome(run_ranks(ranks, performer=partial(perform, opener=opener)))


def load_state(storage: Storage, like: State, world_size: int = 2) -> dict[str, Any]:
    """Returns the state that stands in a storage, put together from what several ranks load.

    Args:
        storage: Where.
        like: A state with the names, dtypes and shapes that are wanted.
        world_size: Number of ranks.

    Raises:
        CheckpointError: It can't be loaded.
        AssertionError: Ranks loaded different objects.
    """
    opener = _Opener(storage)
    ranks, works = load_ranks(
        like, world_size, storage.url, options=LoadOptions(num_threads=1), opener=opener
    )
    for result in run_ranks(ranks, performer=partial(perform, opener=opener)):
        result.get()
    whole: dict[str, Any] = {}
    for name, value in like.items():
        parts = [work.state[name] for work in works]
        if not isinstance(value, np.ndarray):
            if any(not same_value(parts[0], part) for part in parts):
                raise AssertionError(f"ranks loaded different values of {name}: {parts}")
            whole[name] = parts[0]
            continue
        whole[name] = np.full_like(value, 0)
        for work, part in zip(works, parts, strict=True):
            box = tuple(slice(o, o + s) for o, s in zip(work.boxes[name], part.shape, strict=True))
            whole[name][box] = part
    return whole


def one_outcome(results: Sequence[RankResult[SaveOutcome]]) -> SaveOutcome:
    """Returns what the ranks of one save were told together.

    Args:
        results: Of all ranks.

    Raises:
        CommitUnknownError: None was told of a commit, and one that it is unknown.
        CheckpointError: All were told that it failed.
        AssertionError: Some were told of a commit, and others that it failed.
    """
    unknown = [r.error for r in results if isinstance(r.error, CommitUnknownError)]
    failed: list[CheckpointError] = [
        r.error for r in results if r.error is not None and r.error not in unknown
    ]
    committed = [result for result in results if result.error is None]
    if committed and failed:
        raise AssertionError(
            f"some ranks were told of a commit, and {len(failed)} that it failed: {failed[0]}"
        )
    for error in (*unknown, *failed):
        if not committed:
            raise error
    return committed[0].get()
