"""Which ranks have come, and how a request is told that comes twice."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from ray_dcp.errors import CheckpointError, RankDisagreementError
from ray_dcp.protocol.messages import SaveJoin
from ray_dcp.protocol.verdict import Opening

__all__ = ["Roll", "compact", "content", "two_calls"]


class Roll:
    """One roll-call: which ranks have come, which failed, who is missing.

    Args:
        world_size: Ranks `0 … world_size - 1` are called.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.came: set[int] = set()
        self.errors: dict[int, CheckpointError] = {}

    def note(self, rank: int, error: CheckpointError | None) -> None:
        """Notes that a rank came, perhaps with an error."""
        self.came.add(rank)
        if error is not None:
            self.errors.setdefault(rank, error)

    @property
    def is_complete(self) -> bool:
        """Whether something is known of every rank. Costs the same for any number of ranks."""
        # Why only then: who came and who failed may be the same ranks.
        if len(self.came) + len(self.errors) < self.world_size:
            return False
        return len(self.came) >= self.world_size or not self.missing

    def blame(self, errors: Mapping[int, CheckpointError]) -> None:
        """Notes that ranks failed without saying so themselves; earlier errors stay."""
        for rank, error in errors.items():
            self.errors.setdefault(rank, error)

    @property
    def missing(self) -> list[int]:
        """Ranks of which nothing is known, ascending."""
        known = self.came | self.errors.keys()
        return [rank for rank in range(self.world_size) if rank not in known]


def two_calls(request: Opening, what: str) -> RankDisagreementError:
    """Returns the error of a rank that called twice.

    Args:
        request: The second call.
        what: In what it differs.
    """
    return RankDisagreementError(
        f"Expected one call of rank {request.rank} as operation {request.key.seq} of session "
        f"{request.key.session!r}, but a second one came with {what}. Two processes act as rank "
        f"{request.rank}, or it called from two threads at once",
        rank=request.rank,
    )


def compact(opening: Opening) -> Opening:
    """Returns what has to be kept to recognise a request that comes twice."""
    if isinstance(opening, SaveJoin) and opening.fingerprint:
        heavy = opening.columns or opening.contents
        return replace(opening, columns=b"", contents=b"") if heavy else opening
    if isinstance(opening, SaveJoin) and opening.columns:
        digest = hashlib.blake2b(opening.columns, digest_size=32).digest()
        return replace(opening, columns=digest)
    return opening


def content(opening: Opening) -> tuple[object, ...]:
    """Returns what is equal when the same call comes twice."""
    # Why not ==: errors are equal only to themselves, and came by way of a pickle.
    skipped, error = {"error"}, opening.error
    if isinstance(opening, SaveJoin) and opening.fingerprint:
        # Why: a rank that is asked for more joins once more, or fails then: it is the same call.
        skipped |= {"columns", "contents", "known", "values", "asked"}
        error = None
    rest = [value for name, value in vars(opening).items() if name not in skipped]
    return (*rest, None if error is None else (type(error), error.message))
