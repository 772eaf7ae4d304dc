"""The names of Ray's actors, and of the entries in Ray's control store: all are made here.

A name has all that it depends on: what it is of, the version of the protocol, the Ray namespace,
and the session, job or node. The cluster is the one whose control store has it. So jobs that use
the same name in two namespaces share nothing, and a job with a newer ray_dcp never calls an actor
that an older one left. Parts are joined by a character that no part contains, so that a prefix
which ends with it matches nothing else: `exp` never matches `exp:1`.

An entry is removed when what it is of has ended: those of a coordinator with its last rank, those
of a stager with the stager, or by another one that finds it dead.

*Careful*: importing this module does not import ray; a process that is alone never needs it.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

from ray_dcp.commit_protocol.messages import OpKey

NAMESPACE = "ray_dcp"
"""The Ray namespace of all actors, unless the caller names another."""

PROTOCOL_VERSION = 8
"""Increased with each change of the messages between ranks, coordinators and stagers."""

_SEPARATOR = ":"


def coordinator_name(session: str, namespace: str = NAMESPACE) -> str:
    """Returns the actor name of a session's coordinator.

    Examples:
        >>> coordinator_name("exp"), coordinator_name("exp:1")
        ('ray_dcp:8:ray_dcp:coordinator:exp', 'ray_dcp:8:ray_dcp:coordinator:exp%3A1')
    """
    return _join(*_version(namespace), "coordinator", session)


def gatherer_name(session: str, ranks: range, namespace: str = NAMESPACE) -> str:
    """Returns the actor name of the gatherer of some ranks."""
    return _join(*_version(namespace), "gatherer", f"{ranks.start}-{ranks.stop}", session)


def stager_name(node_id: str, job: str = "", namespace: str = NAMESPACE) -> str:
    """Returns the actor name of a node's stager of one job.

    Args:
        node_id: Ray's hex id of the node.
        job: Names the job and its environment (`ray_calls.job_of`).
        namespace: Ray namespace of the actor.
    """
    return _join(*_version(namespace), "stager", node_id, job)


def job_coordinator_name(run: str, namespace: str = NAMESPACE) -> str:
    """Returns the actor name of the coordinator of a run's job steps.

    Args:
        run: Absolute path or URL of the run.
        namespace: Ray namespace of the actor.
    """
    return _join(*_version(namespace), "job", run)


def stager_process(actor: str, process: str) -> str:
    """Returns the name of one process of a stager, by the name of its actor."""
    return f"{actor}#{quote(process, safe='')}"


def actor_of(process: str) -> str:
    """Returns the actor name of a process of a stager."""
    return process.partition("#")[0]


# Entries of the control store


def epoch_key(coordinator: str) -> str:
    """Returns under which name the epoch of a coordinator is counted, by its actor name."""
    return f"epoch:{coordinator}"


def roster_key(coordinator: str) -> str:
    """Returns under which name a coordinator keeps its living ranks."""
    return f"roster:{coordinator}"


def pulse_name(coordinator: str) -> str:
    """Returns the name under which a coordinator writes to the control store that it lives."""
    return f"pulse:{coordinator}"


def staged_plan_name(coordinator: str, key: OpKey | None = None) -> str:
    """Returns the name under which the control store keeps the plan of a staged save.

    Args:
        coordinator: Actor name of the coordinator.
        key: The save; None for the prefix of all saves of the coordinator.
    """
    return f"staged:{coordinator}:" + (_join(str(key.seq), key.session) if key else "")


def stagers_key(node_id: str = "", stager: str = "", namespace: str = "") -> str:
    """Returns under which name a node's stager is registered.

    Args:
        node_id: Ray's hex id of the node.
        stager: Its actor name; without it, a prefix is returned: of all stagers of the node, or of
            all nodes.
        namespace: Ray namespace of the actor.
    """
    prefix = _join("stagers", str(PROTOCOL_VERSION)) + _SEPARATOR
    if node_id:
        prefix += quote(node_id, safe="") + _SEPARATOR
    return prefix + (_join(namespace, stager) if stager else "")


def kept_key(
    attempt: str = "", node_id: str = "", stager: str = "", *, namespace: str = NAMESPACE
) -> str:
    """Returns under which name the cluster remembers that a stager keeps an attempt in memory.

    Args:
        attempt: Its id.
        node_id: Of the stager's node.
        stager: Its actor name; without it, a prefix is returned: of all stagers of the attempt, or
            of all attempts.
        namespace: Ray namespace of the actor.
    """
    prefix = _join("kept", str(PROTOCOL_VERSION), namespace) + _SEPARATOR
    if attempt:
        prefix += quote(attempt, safe="") + _SEPARATOR
    return prefix + (_join(node_id, stager) if stager else "")


def parts_of(name: str) -> list[str]:
    """Returns the parts of a name, as they were given.

    Examples:
        >>> parts_of(stagers_key("n0", "a:b", "team"))
        ['stagers', '8', 'n0', 'team', 'a:b']
    """
    return [unquote(part) for part in name.split(_SEPARATOR)]


def _version(namespace: str) -> tuple[str, str, str]:
    return "ray_dcp", str(PROTOCOL_VERSION), namespace


def _join(*parts: str) -> str:
    return _SEPARATOR.join(quote(part, safe="") for part in parts)
