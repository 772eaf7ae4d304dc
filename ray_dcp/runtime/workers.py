"""`WorkerGroup`: any number of ranks as Ray actors, with a gloo process group among them.

For notebooks, tools and tests: what a training job gets from its launcher. A rank that dies is
named within seconds, and nobody waits for it. How a rank works is in `worker`.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from ray_dcp.errors import DeadlineError, InvalidRequestError, ParticipantError
from ray_dcp.runtime import hooks, ray_calls
from ray_dcp.runtime.attach import attach_named
from ray_dcp.runtime.gathering import gather
from ray_dcp.runtime.worker import Rank
from ray_dcp.runtime.worker_options import WorkerOptions, worker_options
from ray_dcp.store.location import AnyPlace

__all__ = ["WorkerGroup"]

logger = logging.getLogger(__name__)

_PART_S = 15.0
"""How long ranks may take to leave their process group before they are replaced, in seconds."""


class WorkerGroup:
    """Ranks as Ray actors, from 0 to `world_size - 1`.

    Uses the Ray that the process is connected to, or that `RAY_ADDRESS` names, or starts a local
    one for as long as the group lives. Functions that are run on ranks may be closures. One thread
    at a time.

    Args:
        world_size: Number of ranks, at least 1.
        name: For the names of the actors, as dashboards show them.
        options: Fields of `WorkerOptions`.

    Raises:
        InvalidRequestError: An argument is wrong.
        ParticipantError: A rank could not start or died.

    Example:
        >>> import torch
        >>> with WorkerGroup(2) as ranks:
        ...     ranks.run(lambda: torch.distributed.get_rank())
        [0, 1]
    """

    def __init__(self, world_size: int, *, name: str | None = None, **options: Any) -> None:
        _check_world_size(world_size)
        self.options: WorkerOptions = worker_options(options)
        self.name = name or f"workers-{secrets.token_hex(4)}"
        self._ranks: list[Any] = []
        self._pids: list[int] = []
        self._broken = False
        self._closed = False
        started_ray = _ensure_ray()
        self._finalizer = weakref.finalize(self, _end, self._ranks, started_ray)
        try:
            self._regroup(world_size)
        except BaseException:
            self.shutdown()
            raise

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._ranks)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, each on its own node."""
        return list(self._pids)

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Returns what a function returns on each rank.

        Args:
            function: Called on every rank at the same time.
            *args: Its arguments, the same for all ranks.
            **kwargs: The same.

        Raises:
            Exception: What the function raised on the lowest rank on which it did, with a note
                that names the rank.
            ParticipantError: A rank died; the group needs `resize` before it is used again.
            DeadlineError: It took longer than `run_timeout_s`.
        """
        _check_callable("function", function)
        return self._everywhere("run", function, args, kwargs)

    def keep(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Keeps what a function returns on each rank as that rank's `state`.

        Args:
            function: As for `run`.
            *args: As for `run`.
            **kwargs: As for `run`.

        Raises:
            Exception: As for `run`.
        """
        _check_callable("function", function)
        self._everywhere("keep", function, args, kwargs)

    def save(
        self,
        path: AnyPlace,
        make_state: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Saves the ranks' states as one checkpoint and returns its metadata.

        Args:
            path: Where to: the `checkpoint_id`.
            make_state: Returns the state dict of the rank that it is called on; without it, the
                rank's `state` is saved.
            **kwargs: As for `ray_dcp.save`.

        Raises:
            CheckpointError: As `ray_dcp.save`.
        """
        _check_callable("make_state", make_state, optional=True)
        return self._everywhere("save", _sendable(path), make_state, kwargs)[0]

    def load(
        self,
        path: AnyPlace,
        make_state: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Loads a checkpoint into the ranks' states and returns each rank's report.

        Args:
            path: Where from: the `checkpoint_id`.
            make_state: Returns the state dict to load into, on the rank that it is called on; it
                becomes the rank's `state`. Without it, the rank's `state` is loaded into.
            **kwargs: As for `ray_dcp.load`.

        Raises:
            CheckpointError: As `ray_dcp.load`.
        """
        _check_callable("make_state", make_state, optional=True)
        return self._everywhere("load", _sendable(path), make_state, kwargs)

    def resize(self, world_size: int) -> None:
        """Makes it so many ranks, with a new process group among them.

        Ranks that live and have a number below that keep their process and their `state`; the
        others end, and new ones start without state. Ranks that died are replaced, so
        `resize(world_size)` repairs a group. No process ever gets another number: torch keeps
        meshes in caches, with the place that the process had in them.

        Args:
            world_size: At least 1.

        Raises:
            InvalidRequestError: The number is not one, or the group was shut down.
            ParticipantError: A rank could not start.
        """
        _check_world_size(world_size)
        self._check_open()
        self._regroup(world_size)

    def kill(self) -> None:
        """Ends all ranks at once, in the middle of what they do, as the loss of a node would.

        `resize` brings the group back, without state.

        Raises:
            InvalidRequestError: The group was shut down.
        """
        self._check_open()
        self._broken = True
        _kill_all(self._ranks)

    def shutdown(self) -> None:
        """Ends all ranks, and the Ray that was started for them. Does nothing the second time."""
        if not self._closed:
            self._closed = True
            if not self._broken and ray.is_initialized():
                self._part(self._ranks)
        self._finalizer()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"WorkerGroup({self.world_size}, name={self.name!r})"

    def _everywhere(self, method: str, *arguments: Any) -> list[Any]:
        self._check_open()
        if self._broken:
            raise ParticipantError(
                f"Expected all ranks of {self!r} to live, but one died or hung before. Call "
                f"resize({self.world_size}) to replace it"
            )
        answers = [getattr(rank, method).remote(*arguments) for rank in self._ranks]
        try:
            return gather(
                answers,
                self._ranks,
                doing=method,
                timeout_s=self.options.run_timeout_s,
                release_s=self.options.release_s,
            )
        except ParticipantError:
            # The error may also be one of a checkpoint, raised by ranks that all live.
            self._broken = not self._all_live()
            raise

    def _all_live(self) -> bool:
        answers = [rank.where.remote() for rank in self._ranks]
        try:
            ray_calls.get(answers, timeout=self.options.release_s)
        except RayError:
            return False
        return True

    def _regroup(self, world_size: int) -> None:
        living = self._part(self._ranks) if self._ranks else []
        kept = {i: rank for i, rank in enumerate(self._ranks[:world_size]) if rank in living}
        for rank in self._ranks:
            if rank not in kept.values():
                ray_calls.kill(rank)
        # In place: the finalizer ends what is in this list.
        self._ranks[:] = kept.values()
        self._broken = True
        for index in range(world_size):
            if index not in kept:
                kept[index] = self._start(index)
                self._ranks.append(kept[index])
        self._ranks[:] = [kept[index] for index in range(world_size)]
        self._meet()
        self._broken = False

    def _start(self, index: int) -> Any:
        options = self.options
        runtime_env = {"env_vars": dict(options.env_vars)} if options.env_vars else None
        actor = ray.remote(Rank).options(
            name=f"{self.name}:{index}:{secrets.token_hex(3)}",
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            resources=dict(options.resources),
            runtime_env=runtime_env,
            scheduling_strategy="SPREAD",
            max_restarts=0,
            max_task_retries=0,
        )
        return actor.remote()

    def _meet(self) -> None:
        """Makes a new process group of the ranks."""
        start_s = self.options.start_timeout_s
        places = self._starting([rank.where.remote() for rank in self._ranks])
        self._pids = [place["pid"] for place in places]
        local = len({place["node_id"] for place in places}) == 1
        address = "127.0.0.1" if local else places[0]["node_ip"]
        timeout_s = self.options.collective_timeout_s
        port = self._starting([self._ranks[0].host.remote(address, start_s)])[0]
        world_size = self.world_size
        self._starting(
            [
                rank.join.remote(index, world_size, address, port, timeout_s, local)
                for index, rank in enumerate(self._ranks)
            ]
        )

    def _starting(self, answers: Sequence[Any]) -> list[Any]:
        try:
            return gather(
                answers,
                self._ranks,
                doing="start",
                timeout_s=self.options.start_timeout_s,
                release_s=self.options.release_s,
            )
        except DeadlineError as error:
            free = ray.available_resources()
            raise DeadlineError(
                f"{error.message}. Each rank needs {self.options.num_cpus:g} CPUs and "
                f"{self.options.num_gpus:g} GPUs; free in the cluster are "
                f"{free.get('CPU', 0):g} and {free.get('GPU', 0):g}"
            ) from None

    def _part(self, ranks: Sequence[Any]) -> list[Any]:
        """Takes ranks out of their process group; returns those that live and did."""
        answers = {rank.part.remote(): rank for rank in ranks}
        done, _ = ray_calls.wait(list(answers), num_returns=len(answers), timeout=_PART_S)
        living = []
        for answer in done:
            try:
                ray_calls.get(answer)
            except RayError as error:
                logger.debug("A rank could not leave its group: %s", error)
            else:
                living.append(answers[answer])
        return [rank for rank in ranks if rank in living]

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequestError(
                f"Expected {self!r} to be open, but it was shut down. Make another one"
            )


def _ensure_ray() -> bool:
    """Connects to the Ray that `RAY_ADDRESS` names, or starts one; returns whether it did."""
    if ray.is_initialized():
        return False
    if attach_named(None) is None:
        with hooks.signal_handlers_kept():
            ray.init(
                # Why: without an address Ray takes any cluster that runs on this machine.
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
            )
    return True


def _end(ranks: list[Any], started_ray: bool) -> None:
    """Ends actors, waits until they are gone, and ends the Ray that was started for them."""
    if not ray.is_initialized():
        return
    _kill_all(ranks)
    ranks.clear()
    if started_ray:
        with hooks.signal_handlers_kept():
            ray.shutdown()


def _kill_all(ranks: list[Any]) -> None:
    """Ends actors and waits until they are gone."""
    ended = []
    for rank in ranks:
        ray_calls.kill(rank)
        ended.append(rank.where.remote())
    end_s = time.monotonic() + _PART_S
    for answer in ended:
        try:
            ray_calls.get(answer, timeout=max(0.0, end_s - time.monotonic()))
        except GetTimeoutError:
            logger.warning("A rank of a WorkerGroup did not end within %g s", _PART_S)
        except RayError:
            continue


def _sendable(path: AnyPlace) -> AnyPlace:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _check_world_size(world_size: int) -> None:
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise InvalidRequestError(
            f"Expected world_size to be a whole number of at least 1, but found {world_size!r}",
            key="world_size",
        )


def _check_callable(what: str, value: Any, *, optional: bool = False) -> None:
    if not callable(value) and not (optional and value is None):
        raise InvalidRequestError(
            f"Expected {what} to be something that can be called on the ranks, but found "
            f"{type(value).__name__}",
            key=what,
        )
