"""`LoaderPosition`: the position of torchdata's `StatefulDataLoader`, merged on a resize.

Only this module interprets the loader's state. `tests/unit/test_data_position.py` compares it with
the state that the installed torchdata writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ray_dcp.data.sampler import ElasticBatchSampler
from ray_dcp.data.stream import ElasticStream, merged
from ray_dcp.errors import InvalidRequestError, StateDictError
from ray_dcp.torch_adapter.per_rank import PerRank

Resized = Callable[[Sequence[Any], int, int], Any]


@runtime_checkable
class _Loader(Protocol):
    dataset: Any

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of this rank's loader."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the position of the next iteration."""
        ...


class LoaderPosition:
    """Saves the position of each rank's `StatefulDataLoader`.

    On the same number of ranks, each loader continues exactly where it was. On another number, the
    rest of the epoch is redistributed, by an `ElasticStream` or by `resized`. For a map-style
    dataset, save an `ElasticBatchSampler` instead, which needs no merging.

    Args:
        loader: Loader of this rank. Prefetched samples do not count as consumed.
        resized: Called with the states of all loaders by rank, this rank and the number of ranks;
            returns the state for this rank's loader. An `ElasticStream` does not need it; for
            any other dataset without it, another number of ranks is refused.

    Raises:
        InvalidRequestError: The loader has no state or uses an `ElasticBatchSampler`; its settings
            do not allow to determine the position of an `ElasticStream`; or `resized` is not
            callable.

    Examples:
        >>> from torchdata.stateful_dataloader import StatefulDataLoader
        >>> from ray_dcp.data import ElasticStream
        >>> def read(source, start):
        ...     return [f"{source}{number}" for number in range(start, 3)]
        >>> def loader_of_one_rank():
        ...     stream = ElasticStream(["a", "b"], read, rank=0, world_size=1, shuffle=False)
        ...     return StatefulDataLoader(stream, batch_size=2)
        >>> loader = loader_of_one_rank()
        >>> next(iter(loader))
        ['a0', 'a1']
        >>> state = {"data": LoaderPosition(loader).state_dict()}
        >>> loader = loader_of_one_rank()
        >>> LoaderPosition(loader).load_state_dict(state["data"])
        >>> list(loader)
        [['a2', 'b0'], ['b1', 'b2']]
    """

    def __init__(self, loader: Any, *, resized: Resized | None = None) -> None:
        if not isinstance(loader, _Loader):
            raise InvalidRequestError(
                f"expected a loader with state_dict, load_state_dict and dataset, as torchdata's "
                f"StatefulDataLoader has, but got {type(loader).__name__}",
                key="loader",
            )
        if isinstance(getattr(loader, "batch_sampler", None), ElasticBatchSampler):
            raise InvalidRequestError(
                "the loader has an ElasticBatchSampler, which knows the place for any number of "
                "ranks; put the sampler into the state dict instead of the loader",
                key="loader",
            )
        if resized is not None and not callable(resized):
            raise InvalidRequestError(
                f"resized must be a function of (states, rank, world_size), but is {resized!r}",
                key="resized",
            )
        self._loader = loader
        self._stream = loader.dataset if isinstance(loader.dataset, ElasticStream) else None
        self._resized = resized
        if self._stream is not None:
            _check_settings(loader)

    def state_dict(self) -> dict[str, Any]:
        """Returns the loader's state as a per-rank value."""
        rule: str | Resized = self._resized or ("error" if self._stream is None else _dealt_anew)
        return {"loader": PerRank(self._loader.state_dict(), resized=rule)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the position of the loader's next iteration.

        Raises:
            StateDictError: `state` is not the state of a `LoaderPosition`, or was saved by a loader
                with another number of workers.
        """
        own = state.get("loader") if isinstance(state, Mapping) else None
        found = own.value if isinstance(own, PerRank) else None
        if not isinstance(found, dict):
            raise StateDictError("expected the state of a LoaderPosition, found something else")
        if self._stream is None or self._resized is not None:
            self._loader.load_state_dict(found)
        elif _MERGED in found:
            self._stream.load_state_dict(found[_MERGED])
            self._loader.load_state_dict({})
        else:
            self._go_on(self._stream, found)

    def _go_on(self, stream: ElasticStream, found: dict[str, Any]) -> None:
        places = _places_in(found)
        workers = getattr(self._loader, "num_workers", 0)
        if (_SNAPSHOT in found) != (workers > 0) or len(places) != max(workers, 1):
            raise StateDictError(
                f"this rank's place in the data was saved by a loader with "
                f"{len(places) if _SNAPSHOT in found else 0} workers, but this one has {workers}; "
                f"give it as many, or resume on another number of ranks"
            )
        whole = merged(places)
        # Why not the merged position: it would assign samples of other ranks to this one.
        stream.load_state_dict({**places[0], "epoch": whole["epoch"], "own": {}, "ended": False})
        if found.get("_iterator_finished"):
            stream.end()
            self._loader.load_state_dict({})
        else:
            self._loader.load_state_dict(found)


def _check_settings(loader: Any) -> None:
    needed = {
        "persistent_workers": (False, "its workers would not hear of a new epoch"),
        "snapshot_every_n_steps": (1, "between snapshots nobody knows what was consumed"),
        "in_order": (True, "what was consumed would not be what comes first"),
    }
    for name, (value, why) in needed.items():
        found = getattr(loader, name, value)
        if found != value:
            raise InvalidRequestError(
                f"a loader of an ElasticStream needs {name}={value!r}, but has {found!r}: {why}",
                key=name,
            )


_MERGED = "ray_dcp.merged"
_SNAPSHOT = "_snapshot"


def _dealt_anew(states: Sequence[Any], rank: int, world_size: int) -> dict[str, Any]:
    return {_MERGED: merged([place for state in states for place in _places_in(state)])}


def _places_in(state: Any) -> list[Any]:
    """Returns the stream's states in a loader's state, one for each worker."""
    if isinstance(state, Mapping) and _MERGED in state:
        return [state[_MERGED]]
    try:
        if _SNAPSHOT in state:
            workers = state[_SNAPSHOT]["_worker_snapshots"]
            return [workers[f"worker_{number}"]["dataset_state"] for number in range(len(workers))]
        return [state["dataset_state"]]
    except (KeyError, TypeError) as error:
        raise StateDictError(
            f"the state of a loader was not written by a version of torchdata that is known here: "
            f"{type(error).__name__} {error}"
        ) from error
