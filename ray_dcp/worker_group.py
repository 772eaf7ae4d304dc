"""`WorkerGroup`: any number of ranks as Ray actors, with a gloo process group among them.

It serves notebooks, tools and tests, and does what a launcher does for a training job. A rank that
dies is named within seconds, and the ranks that wait for it are released. The actor of a rank runs
the functions that it receives; it knows nothing of the other ranks except the address of their
store.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from ray_dcp.commit_protocol.error_aggregation import name_ranks
from ray_dcp.core import bounds
from ray_dcp.core.processes import OwnProcess
from ray_dcp.core.wire_error import add_note, cause_of, failure_of
from ray_dcp.errors import CheckpointError, DeadlineError, InvalidRequestError, ParticipantError
from ray_dcp.options import check_above_0, check_whole, set_checked
from ray_dcp.session import ray_calls
from ray_dcp.session.group_sessions import sessions
from ray_dcp.session.ray_cluster import attach_named
from ray_dcp.store.location import AnyPlace

_this: list[Rank] = []


def this_rank() -> Rank | None:
    """Returns the rank that runs in this process, for functions passed to `run`; None elsewhere."""
    return _this[0] if _this else None


class Rank:
    """One rank: its number, its process group, and the state that it keeps between runs.

    Attributes:
        rank: Number in the group, from 0.
        world_size: Number of ranks.
        state: Value that a run left here; `save` uses it if it gets no `make_state`.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1
        self.state: Any = None
        self._store: Any = None
        _this[:] = [self]

    def where(self) -> dict[str, Any]:
        """Returns `pid`, `node_id` and `node_ip` of this process."""
        context = ray.get_runtime_context()
        return {
            "pid": os.getpid(),
            "node_id": context.get_node_id(),
            "node_ip": ray.util.get_node_ip_address(),
        }

    def host(self, address: str, timeout_s: float) -> int:
        """Starts the store by which the ranks of a new group find each other; returns its port."""
        dist: Any = importlib.import_module("torch.distributed")
        self._store = dist.TCPStore(
            address, 0, None, True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
        port: int = self._store.port
        return port

    def join(
        self, rank: int, world_size: int, address: str, port: int, timeout_s: float, local: bool
    ) -> None:
        """Joins a new group; returns when all ranks have joined.

        Args:
            rank: Number of this rank.
            world_size: Number of ranks.
            address: Address of the store of rank 0.
            port: Port of that store.
            timeout_s: Timeout of every collective operation of the group, in seconds.
            local: Whether all ranks are on this node, so that only the loopback interface is used.
        """
        dist: Any = importlib.import_module("torch.distributed")
        timeout = timedelta(seconds=timeout_s)
        if rank != 0:
            self._store = dist.TCPStore(address, port, None, False, timeout=timeout)
        if local:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", store=self._store, rank=rank, world_size=world_size, timeout=timeout
        )
        self.rank, self.world_size = rank, world_size

    def part(self) -> None:
        """Leaves the group: closes the sessions and destroys the process group."""
        import torch.distributed as dist

        sessions.close_all()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None

    def run(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Any:
        """Returns the result of a function on this rank."""
        return function(*arguments, **named)


# What a rank runs for the methods of `WorkerGroup`. Why `ray_dcp` by name: a rank is a user of the
# package, as any training script; nothing below depends on it.


def _keep(function: Callable[..., Any], arguments: tuple[Any, ...], named: Any) -> None:
    _this[0].state = function(*arguments, **named)


def _save(path: AnyPlace, make_state: Callable[[], Any] | None, named: Any) -> Any:
    """Saves the state that `make_state` returns, or the kept one; rank 0 returns the metadata."""
    rank, package = _this[0], importlib.import_module("ray_dcp")
    state = rank.state if make_state is None else make_state()
    metadata = package.save(state, checkpoint_id=path, **named)
    return metadata if rank.rank == 0 else None


def _load(path: AnyPlace, make_state: Callable[[], Any] | None, named: Any) -> Any:
    """Loads into the state that `make_state` returns, or the kept one; keeps it."""
    rank, package = _this[0], importlib.import_module("ray_dcp")
    state = rank.state if make_state is None else make_state()
    report = package.load(state, checkpoint_id=path, **named)
    rank.state = state
    return report


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Options of the ranks of a `WorkerGroup`.

    Raises:
        InvalidRequestError: A field has an invalid value.
    """

    num_cpus: float = 0.0
    """CPUs that Ray reserves for a rank. 0: any number of ranks fits on any node."""
    num_gpus: float = 0.0
    """GPUs that Ray reserves for a rank."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Other resources that Ray reserves for a rank."""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks."""
    start_timeout_s: float = 180.0
    """How long the ranks may take to start and to find each other, in seconds."""
    collective_timeout_s: float = 300.0
    """How long a collective operation of the ranks may take, in seconds."""
    run_timeout_s: float | None = None
    """How long one `run`, `save` or `load` may take, in seconds; None for no limit."""
    release_s: float = 5.0
    """How long the other ranks may take to notice that one died, in seconds; those that still wait
    are killed."""

    def __post_init__(self) -> None:
        for name in ("num_cpus", "num_gpus"):
            value = check_above_0(getattr(self, name), f"WorkerGroup.{name}", or_0=True)
            set_checked(self, **{name: value})
        for name in ("start_timeout_s", "collective_timeout_s", "release_s", "run_timeout_s"):
            if (value := getattr(self, name)) is not None or name != "run_timeout_s":
                set_checked(self, **{name: check_above_0(value, f"WorkerGroup.{name}")})
        for name in ("resources", "env_vars"):
            if not isinstance(getattr(self, name), Mapping):
                raise InvalidRequestError(
                    f"WorkerGroup's {name} must be a mapping, but is {getattr(self, name)!r}",
                    key=name,
                )


_LOOK_S = 1.0


def _cause(error: RayTaskError, rank: int) -> Exception:
    """Returns the exception that the function raised, with a note of the rank."""
    cause = cause_of(error)
    if cause is error or not isinstance(cause, Exception):
        return error
    add_note(cause, f"Raised on rank {rank}:\n{error}")
    return cause


def _error_of(failed: Mapping[int, Exception], num_ranks: int) -> Exception:
    first = min(failed)
    error = failed[first]
    if isinstance(error, CheckpointError):
        if error._failures is None:
            error.with_failures({rank: failure_of(failed[rank]) for rank in sorted(failed)})
    elif len(failed) < num_ranks:
        add_note(error, f"Raised on {name_ranks(sorted(failed))} of {num_ranks}")
    return error


def _died_error(
    dead: Mapping[int, Exception],
    failed: Mapping[int, Exception],
    stuck: Sequence[int],
    doing: str,
) -> ParticipantError:
    reasons = [f"rank {rank}: {_first_line(error)}" for rank, error in sorted(dead.items())]
    released = f" {name_ranks(stuck)} still waited and was ended." if stuck else ""
    error = ParticipantError(
        f"Expected all ranks to live through {doing}, but {name_ranks(sorted(dead))} died."
        f"{released} Call resize to replace what is gone. " + "; ".join(reasons),
        rank=min(dead),
    )
    gone = {**failed, **dead}
    error.with_failures({rank: failure_of(gone[rank]) for rank in sorted(gone)})
    return error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:1] + lines[-1:]) if lines else type(error).__name__


logger = logging.getLogger(__name__)


class WorkerGroup:
    """Ranks as Ray actors, from 0 to `world_size - 1`.

    Uses the Ray that the process is connected to, or that `RAY_ADDRESS` names, or starts a local
    one for the life of the group. Functions that run on ranks may be closures. Not thread-safe.

    Args:
        world_size: Number of ranks, at least 1.
        name: Prefix of the actors' names, as dashboards show them.
        options: Fields of `WorkerOptions`.

    Raises:
        InvalidRequestError: An argument is invalid.
        ParticipantError: A rank could not start or died.

    Examples:
        >>> import torch
        >>> with WorkerGroup(2) as ranks:
        ...     ranks.run(lambda: torch.distributed.get_rank())
        [0, 1]
    """

    def __init__(self, world_size: int, *, name: str | None = None, **options: Any) -> None:
        world_size = check_whole(world_size, "world_size", 1)
        unknown = [name for name in options if name not in WorkerOptions.__dataclass_fields__]
        if unknown:
            raise InvalidRequestError(
                f"WorkerGroup has no option {', '.join(unknown)}. It has "
                f"{', '.join(WorkerOptions.__dataclass_fields__)}",
                key=unknown[0],
            )
        self.options = WorkerOptions(**options)
        self.name = name or f"workers-{secrets.token_hex(4)}"
        self._ranks: list[Any] = []
        self._pids: list[int] = []
        self._broken = False
        self._closed = False
        started_ray = _ensure_ray()
        self._finalizer = weakref.finalize(self, _shut_down, self._ranks, started_ray, OwnProcess())
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
        """Returns the results of a function on all ranks.

        Args:
            function: Called on every rank at the same time.
            *args: Its arguments, the same on all ranks.
            **kwargs: Its keyword arguments, the same on all ranks.

        Raises:
            Exception: The exception of the lowest rank on which the function raised one, with a
                note that names the rank.
            ParticipantError: A rank died; the group needs `resize` before it can be used again.
            DeadlineError: It took longer than `run_timeout_s`.
        """
        _check_callable("function", function)
        return self._run_on_all("run", function, *args, **kwargs)

    def keep(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Keeps the result of a function on each rank as that rank's `state`.

        Args:
            function: As for `run`.
            *args: As for `run`.
            **kwargs: As for `run`.

        Raises:
            Exception: As for `run`.
        """
        _check_callable("function", function)
        self._run_on_all("keep", _keep, function, args, kwargs)

    def save(
        self,
        path: AnyPlace,
        make_state: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Saves the ranks' states as one checkpoint and returns its metadata.

        Args:
            path: The `checkpoint_id`, or the `Part` of a job's step.
            make_state: Returns the state dict of the rank on which it is called; without it, the
                rank's `state` is saved.
            **kwargs: As for `ray_dcp.save`.

        Raises:
            CheckpointError: As `ray_dcp.save`.
        """
        _check_callable("make_state", make_state, optional=True)
        return self._run_on_all("save", _save, _sendable(path), make_state, kwargs)[0]

    def load(
        self,
        path: AnyPlace,
        make_state: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Loads a checkpoint into the ranks' states and returns each rank's report.

        Args:
            path: The `checkpoint_id`, or the `Part` of a committed step.
            make_state: Returns the state dict to load into, on the rank on which it is called; it
                becomes the rank's `state`. Without it, the checkpoint is loaded into the rank's
                `state`.
            **kwargs: As for `ray_dcp.load`.

        Raises:
            CheckpointError: As `ray_dcp.load`.
        """
        _check_callable("make_state", make_state, optional=True)
        return self._run_on_all("load", _load, _sendable(path), make_state, kwargs)

    def resize(self, world_size: int) -> None:
        """Changes the number of ranks, with a new process group among them.

        Living ranks with a number below the new one keep their process and their `state`; the
        others end, and new ones start without state. Ranks that died are replaced, so that
        `resize(world_size)` repairs a group. No process ever gets another number, as torch caches
        meshes with the position of the process.

        Args:
            world_size: Number of ranks, at least 1.

        Raises:
            InvalidRequestError: The number is invalid, or the group was shut down.
            ParticipantError: A rank could not start.
        """
        world_size = check_whole(world_size, "world_size", 1)
        self._check_open()
        self._regroup(world_size)

    def kill(self) -> None:
        """Kills all ranks at once, in the middle of their work, as the loss of a node would.

        `resize` restores the group, without state.

        Raises:
            InvalidRequestError: The group was shut down.
        """
        self._check_open()
        self._broken = True
        _kill_all(self._ranks)

    def shutdown(self) -> None:
        """Ends all ranks, and the Ray that was started for them. Does nothing if called again."""
        if not self._closed:
            self._closed = True
            if not self._broken and ray.is_initialized():
                self._part(self._ranks)
        self._finalizer()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"WorkerGroup({self.world_size}, name={self.name!r})"

    def _run_on_all(
        self, doing: str, function: Callable[..., Any], /, *arguments: Any, **named: Any
    ) -> list[Any]:
        self._check_open()
        if self._broken:
            raise ParticipantError(
                f"Expected all ranks of {self!r} to live, but one died or hung before. Call "
                f"resize({self.world_size}) to replace it"
            )
        answers = [rank.run.remote(function, arguments, named) for rank in self._ranks]
        try:
            return self._gather(answers, doing, self.options.run_timeout_s)
        except ParticipantError:
            # The error may also be one of a checkpoint, raised by ranks that all live.
            self._broken = not self._all_live()
            raise

    def _gather(self, answers: Sequence[Any], doing: str, timeout_s: float | None) -> list[Any]:
        """Returns the values of one call on every rank, in order.

        Args:
            answers: A reference for each rank.
            doing: Description of the call, for errors.
            timeout_s: For everything, in seconds; None for no limit.

        Raises:
            ParticipantError: A rank died. Ranks that still wait after `release_s` are killed, as a
                process that is stuck in a collective can't be freed otherwise.
            DeadlineError: The time has passed; the message names the ranks that have not answered.
            Exception: The exception of the lowest rank that raised one, if no rank died.
        """
        values: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        dead: dict[int, Exception] = {}
        waiting = {answer: rank for rank, answer in enumerate(answers)}
        end_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while waiting and (left_s := end_s - time.monotonic()) > 0:
            done, _ = ray_calls.wait(list(waiting), num_returns=1, timeout=min(_LOOK_S, left_s))
            for answer in done:
                rank = waiting.pop(answer)
                try:
                    values[rank] = ray_calls.get(answer)
                except RayActorError as error:
                    if not dead:
                        end_s = min(end_s, time.monotonic() + self.options.release_s)
                    dead[rank] = error
                except RayTaskError as error:
                    failed[rank] = _cause(error, rank)
                except RayError as error:
                    failed[rank] = error
        stuck = sorted(waiting.values())
        if dead:
            for rank in stuck:
                ray_calls.kill(self._ranks[rank])
            raise _died_error(dead, failed, stuck, doing)
        if stuck:
            raise DeadlineError(
                f"Expected {doing} to end on all {len(answers)} ranks within {timeout_s:g} s, but "
                f"{name_ranks(stuck)} did not. Look what they do, or raise the timeout",
                rank=stuck[0],
            )
        if failed:
            raise _error_of(failed, len(answers))
        return [values[rank] for rank in range(len(answers))]

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
                kept[index] = self._start_actor(index)
                self._ranks.append(kept[index])
        self._ranks[:] = [kept[index] for index in range(world_size)]
        self._create_process_group()
        self._broken = False

    def _start_actor(self, index: int) -> Any:
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

    def _create_process_group(self) -> None:
        """Creates a new process group of the ranks."""
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
            return self._gather(answers, "start", self.options.start_timeout_s)
        except DeadlineError as error:
            free = ray.available_resources()
            raise DeadlineError(
                f"{error.message}. Each rank needs {self.options.num_cpus:g} CPUs and "
                f"{self.options.num_gpus:g} GPUs; free in the cluster are "
                f"{free.get('CPU', 0):g} and {free.get('GPU', 0):g}"
            ) from None

    def _part(self, ranks: Sequence[Any]) -> list[Any]:
        """Removes ranks from their process group; returns the living ones that left it."""
        answers = {rank.part.remote(): rank for rank in ranks}
        done, _ = ray_calls.wait(
            list(answers), num_returns=len(answers), timeout=bounds.LEAVE_GROUP_S
        )
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
    """Connects to the Ray that `RAY_ADDRESS` names, or starts one; returns False if connected."""
    if ray.is_initialized():
        return False
    if attach_named(None) is None:
        with ray_calls.signal_handlers_kept():
            ray.init(
                # Why: without an address Ray takes any cluster that runs on this machine.
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
            )
    return True


def _shut_down(ranks: list[Any], started_ray: bool, owner: OwnProcess) -> None:
    """Kills actors, waits until they are gone, and shuts down the Ray that was started for them."""
    if not owner.is_this or not ray.is_initialized():
        return
    _kill_all(ranks)
    ranks.clear()
    if started_ray:
        with ray_calls.signal_handlers_kept():
            ray.shutdown()


def _kill_all(ranks: list[Any]) -> None:
    """Kills actors and waits until they are gone."""
    for rank in ranks:
        ray_calls.kill(rank)
    end_s = time.monotonic() + bounds.LEAVE_GROUP_S
    for rank in ranks:
        try:
            # Why again and again: a rank may answer until the kill reaches it.
            while True:
                ray_calls.get(rank.where.remote(), timeout=max(0.0, end_s - time.monotonic()))
        except GetTimeoutError:
            logger.warning("A rank of a WorkerGroup did not end within %g s", bounds.LEAVE_GROUP_S)
        except RayError:
            continue


def _sendable(path: AnyPlace) -> AnyPlace:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _check_callable(what: str, value: Any, *, optional: bool = False) -> None:
    if not callable(value) and not (optional and value is None):
        raise InvalidRequestError(
            f"Expected {what} to be something that can be called on the ranks, but found "
            f"{type(value).__name__}",
            key=what,
        )
