"""How the workers of a group come together for one run: who writes, under which number, with whom.

Rank 0 looks at the storage once and tells the others, through Ray Train, or why it can't.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ray_dcp.errors import CheckpointExistsError, CheckpointNotFoundError, ParticipantError
from ray_dcp.integrations.train.context import RunFacts, target_of_run
from ray_dcp.integrations.train.keeping import Keeper, Owner, owner_of
from ray_dcp.integrations.train.names import StepFolder, check_folder, next_group, parse
from ray_dcp.manager.places import Root
from ray_dcp.manager.processes import this_process
from ray_dcp.manager.writing import Right
from ray_dcp.operations import session_for
from ray_dcp.protocol.messages import Target
from ray_dcp.runtime.inline import InlineSession
from ray_dcp.runtime.kept import NodeMemory
from ray_dcp.runtime.session import Session
from ray_dcp.store.opening import absolute_target, open_storage
from ray_dcp.transfer.threads import Stop
from ray_dcp.view.runs import list_run

__all__ = ["Group", "join", "take_right"]

STAGED_S = 60.0
"""How long to wait for saves of earlier groups that are staged on this node, in seconds."""

REGISTERED_S = 5.0
"""How long Ray Train may take to tell what it has registered, in seconds."""


@dataclass
class Group:
    """This rank's place in a worker group that saves."""

    root: Root
    number: int
    """Of the group in the run, from 1."""
    word: str
    session: Session
    owns_session: bool
    has_steps: bool
    """There are folders of steps: of groups before this one, or of whoever saved there."""
    right: Right | None = None
    """On rank 0."""
    keeper: Keeper | None = None
    """On rank 0."""

    def folder_of(self, step: int) -> StepFolder:
        """Returns the folder of a step that this group saves."""
        return StepFolder(step, self.number, self.word)

    def check_has_steps(self) -> None:
        """Raises `CheckpointNotFoundError` when no group before this one has begun a save."""
        if not self.has_steps:
            raise CheckpointNotFoundError(
                "nothing was ever saved here", checkpoint_id=self.root.url
            )

    def leave(self) -> None:
        """Gives up what this rank holds."""
        if self.right is not None:
            self.right.give_back()
        if self.owns_session:
            self.session.close()


def join(
    facts: RunFacts,
    folder: str,
    max_to_keep: int,
    storage_options: Mapping[str, object] | None,
    broadcast: Callable[[Any], Any],
) -> Group:
    """Returns this rank's place; every rank calls it.

    Args:
        facts: Of the run.
        folder: In which the steps lie.
        max_to_keep: How many ray_dcp keeps; 0 for all.
        storage_options: For the object store.
        broadcast: Returns, on all ranks, what rank 0 gave.

    Raises:
        InvalidRequestError: An argument is wrong, on all ranks alike.
        CheckpointExistsError: Another run of this name writes here, and lives.
        CheckpointError: The storage can't be listed, or no session can be made.
    """
    root = Root(
        absolute_target(target_of_run(facts, check_folder(folder), storage_options))
    )  # fmt: skip
    owner = owner_of(max_to_keep, facts.num_to_keep)
    first, error = None, None
    if facts.rank == 0:
        try:
            first = _First.of(facts, root, owner, max_to_keep)
        except Exception as failed:  # noqa: BLE001 - the other ranks wait in the broadcast
            error = failed
    # Why cut: Ray Train broadcasts 1 kB.
    why = None if error is None else f"{type(error).__name__}: {error}"[:800]
    told = broadcast((None if first is None else first.told(), why))
    if error is not None:
        raise error
    if told[1] is not None:
        raise ParticipantError(f"Rank 0 could not begin: {told[1]}", rank=0)
    number, word, has_steps = told[0]
    session: Any = session_for(None, False)
    owns = isinstance(session, InlineSession)
    if owns:
        # Why with Ray although alone: its stager keeps what is staged when this worker is killed.
        session = Session(f"train-{facts.name}-{word}", 0, 1)
        session.greet()
    group = Group(root, number, word, session, owns, has_steps)
    if first is not None:
        group.right, group.keeper = first.right, first.keeper
    return group


@dataclass
class _First:
    """What rank 0 finds."""

    number: int
    right: Right
    keeper: Keeper
    has_steps: bool
    word: str = field(default_factory=lambda: secrets.token_hex(3))

    @classmethod
    def of(cls, facts: RunFacts, root: Root, owner: Owner, max_to_keep: int) -> _First:
        right = take_right(root, facts.run_id, facts.name)
        # Why: a save that a killed group has staged here may be all there is.
        NodeMemory().await_staged(root.url, STAGED_S, Stop())
        listed = list_run(root.target)
        names = [*(one.name for one in listed.steps), *listed.others]
        earlier = [folder for name in names if (folder := parse(name)) is not None]
        keeper = Keeper(
            root, owner, max_to_keep, earlier, _registered(), check=right.check
        )  # fmt: skip
        return cls(next_group(names), right, keeper, bool(listed.steps))

    def told(self) -> tuple[int, str, bool]:
        return self.number, self.word, self.has_steps


def take_right(
    root: Root, run_id: str, name: str, opener: Callable[[Target], Any] = open_storage, **how: Any
) -> Right:
    """Returns the right to write to a run, taken: at once from an earlier group of the same run.

    Args:
        root: Of the run.
        run_id: Of this `fit()`.
        name: Of the run.
        opener: What opens storages.
        **how: As for `Right`.

    Raises:
        CheckpointExistsError: Another run of this name lives.
        StorageError: The storage failed.
    """
    holder = replace(this_process(), nonce=run_id)
    right = Right(root, opener, holder=holder, **how)
    before = right.holder()
    try:
        right.take(even_if_held=before is not None and before.nonce == run_id)
    except CheckpointExistsError as error:
        raise CheckpointExistsError(
            f"Expected to be the only run named {name!r} that writes to {root.url}, but {before} "
            f"does, of another fit(), and lives. Give each run, and each trial of Ray Tune, a "
            f"RunConfig(name=...) of its own, or end that one: its checkpoints can then be resumed "
            f"under the same name",
            checkpoint_id=root.url,
        ) from error
    return right


def _registered() -> list[str]:
    """Returns the names of the folders that Ray Train has registered."""
    from ray.train import CheckpointConsistencyMode, get_all_reported_checkpoints

    found = get_all_reported_checkpoints(
        consistency_mode=CheckpointConsistencyMode.COMMITTED, timeout_s=REGISTERED_S
    )
    folders = (parse(one.checkpoint.path) for one in found)
    return [folder.name for folder in folders if folder is not None]
