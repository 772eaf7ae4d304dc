"""One rank's part in a save or load, with keyword arguments as tests choose them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from ray_dcp.commit_protocol.messages import OpKey, Reply, Request, SaveGo, SaveOutcome
from ray_dcp.runtime.rank_load import LoadResult, RankLoad
from ray_dcp.runtime.rank_save import Captured, RankSave


def rank_save(key: OpKey, **how: Any) -> RankSave:
    """Returns the part of a rank; `how` has its fields, those that are None are left out."""
    return RankSave(key, **{name: value for name, value in how.items() if value is not None})


def save_rank(
    key: OpKey, *, capture: Callable[[], Captured], **how: Any
) -> Generator[Request, Reply, SaveOutcome]:
    """Returns what a rank says from its join to the outcome."""
    return rank_save(key, **how).run(capture)


def join_save(
    key: OpKey, *, capture: Callable[[], Captured], **how: Any
) -> Generator[Request, Reply, tuple[SaveGo, Captured]]:
    """Returns what a rank says until it knows what to write."""
    return rank_save(key, **how).join(capture)


def load_rank(key: OpKey, **how: Any) -> Generator[Request, Reply, LoadResult]:
    """Returns what a rank says from its join to a load to the outcome."""
    return RankLoad(
        key=key, **{name: given for name, given in how.items() if given is not None}
    ).run()
