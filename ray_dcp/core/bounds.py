"""Bounds of waiting: each names since when it counts, until when, and what happens then.

Here is a time on which more than one module counts, or for which a call of the user may wait. What
only one function uses, and no call waits for (the interval of a look, the pause before another try,
the age of what is stale), stays above that function. Deadlines that the user chooses are options
(`plan_timeout_s` and others); `CONTRIBUTING.md` has since when those count.

Of two bounds of which one must outlive the other, the longer one is an expression of the shorter
one; where their values have reasons of their own, `tests/unit/test_bounds.py` compares them.
"""

from __future__ import annotations

from ray_dcp.options import SaveOptions

# Calls of an actor or of the coordinator

OUT_OF_REACH_S = 300.0
"""Since a call first did not reach an actor, until one does; then the call fails. Ray may take a
minute to see that a node is lost, and more to start a process on one that is busy. *Why* so long:
where the call of one rank fails and that of another succeeds, the second waits for the first."""

REACHED_S = 10.0
"""Since a call was sent, until it failed; what lasted longer than this had reached the actor, and
then `OUT_OF_REACH_S` begins anew."""

LONG_WAIT_S = 30.0
"""Since a rank began to wait, until what it waits for has come; then a warning is logged, once."""

MARGIN_S = 120.0
"""Since the last deadline of the coordinator for a request has passed, until its answer; then the
rank fails the call itself. *Why* so long: the coordinator knows which ranks are missing, so its
error is the better one."""

LEFT_TIMEOUT_S = 60.0
"""Since the coordinator last answered a heartbeat, until it does, while only left operations are
reported; then it counts as frozen. Calls have `heartbeat_timeout_s`."""

LEAVING_S = 10.0
"""Since a rank was interrupted, until its report of that has arrived; then it ends all the same."""

UNWIND_S = 1.0
"""Since work was asked to stop, until its thread ends; then the thread is abandoned. *Why* not 0:
it may clean up."""

OWN_DEADLINE_S = 2 * UNWIND_S
"""Since a deadline passed in a process that is alone, until the rank has reported it; then the
coordinator does. *Why*: the rank's error has the file, and comes after it has unwound."""

CALLS_END_S = 10.0
"""Since `ray.shutdown` was called, until no thread is in Ray; then it shuts down all the same. Only
a call that Ray itself delays needs so long, for a large value or a control store that hangs."""

SLICE_S = 0.1
"""Since a thread began to wait inside Ray, until it comes out; then it looks whether Ray is shut
down, and waits on. So much longer `ray.shutdown` may take."""

# An operation of all ranks

ERRORS_S = 5.0
"""Since an operation failed, until all ranks have reported how they fared; then the error goes to
all of them. *Why* not 0: a cause that fails one rank (a full disk, a bad option) often fails all of
them, and the error should show that. *Why* not the whole deadline: a user should not wait an hour
for a failure that is already known."""

LOST_ERRORS_S = ERRORS_S / 10
"""The same since ranks died or froze. *Why* shorter: ranks that die together are detected together,
and their loss says little about what the others will report."""

STEP_GRACE_S = 6 * ERRORS_S
"""Since a rank's own deadline for a step of foreign storage has passed, until the others have its
message; then they fail. *Why*: so that its error arrives, and not only its absence."""

GATHER_S = 0.1
"""Since a request of a step reached a gatherer, until those of all its ranks have; then it sends
what it has."""

GATHERER_ANSWER_S = 60.0
"""Since a request was given to a gatherer, until its answer; then the rank calls the coordinator
itself. This is for ranks without heartbeats; the others wait for `heartbeat_timeout_s`."""

PRESENT_S = 10.0
"""Since a replica was ready for a save, until one that makes steps is; then the save begins without
that one."""

NEW_S = PRESENT_S / 5
"""The same until one that has begun, and makes no steps yet, is ready."""

RESUMED_ANSWER_S = 5.0
"""Since a new coordinator asked a stager what it holds, until its answer; then it is asked again
later, as it may be frozen, or be that of another job."""

TRACE_S = 0.2
"""Since a save was decided and published, until its trace is written; then the outcome goes out
before it. A caller that lists the place finds the trace, unless the storage is slow."""

SETTLED_READ_S = 1.0
"""Since a save asked which files are unchanged, until those of the last one are read (in a process
without one: those of its run); then it writes what is not read. Mostly that ended long ago."""

# Reads that ranks share

SHARE_PLAN_S = 60.0
"""Since all ranks can read, until it is planned who reads for others; then each reads for itself.
The options' `plan_timeout_s` and `read_timeout_s` may be shorter."""

SHARE_TIMEOUT_S = 20.0
"""Since a reader offered its units, until other ranks have used them; then it declines those that
are left. *Why*: a frozen rank must not keep the others from reading."""

TAKE_TIMEOUT_S = 1.5 * SHARE_TIMEOUT_S
"""Since a rank asked for a unit, until it comes; then the rank reads it from storage. It is longer
than the time of its reader, which may wait for others before it declines."""

# How ranks meet

FIRST_CALL_S = SaveOptions.plan_timeout_s
"""Since the first collective call of a rank without options, until all ranks made it; then it fails
and names those that did not."""

STORE_S = 20.0
"""Since a rank began to connect to the store of its job, until it is connected; then the call
fails, as who served the store has ended. torch itself would try for half an hour."""

PROBE_S = 10.0
"""Since a process began to connect to a cluster's control store, until that accepts; then the call
fails. Ray itself would try for many minutes."""

ACTOR_LEASE_S = 120.0
"""Since a detached actor was last used, until it is used; then it ends. This is longer than any
pause between the start of two ranks, and short enough to be in nobody's way. The next call creates
it again."""

KILL_S = 15.0
"""Since a frozen process was killed, until it has ended; then it counts as frozen again. Ray asks
it first, and a stopped process does not answer."""

NAME_FREE_S = KILL_S
"""Since an actor was to be made whose name one has that is ending, until the name is free; then
Ray's error is raised."""

JOIN_S = 60.0
"""Since a rank came to a session over sockets, until all have come and are connected; then the call
fails and names those that are missing."""

HANDSHAKE_S = 10.0
"""Since a connection was opened, until both ends have authenticated; then it is closed, and a rank
tries again."""

SERVED_S = 0.3 * HANDSHAKE_S
"""The same at rank 0, whose places for connections are few."""

STRANGER_S = SERVED_S / 12
"""Since rank 0 accepted a connection, until it authenticates; then it is closed, if others wait for
its place."""

RETURN_S = 0.5
"""Since the connection of a rank closed, until it has connected again; then the rank is dead."""

EXIT_S = 10.0
"""Since the process of rank 0 is to end, until the other ranks have their answers; then it ends all
the same."""

VALUES_END_S = 10.0
"""Since the tasks that write a step's values were cancelled, until they have ended; then the save
fails all the same."""

LEAVE_GROUP_S = 15.0
"""Since ranks of a `WorkerGroup` were asked to leave their process group, or killed, until they
have; then they are replaced, or a warning is logged."""

# Stagers, and the memory tier

STAGER_START_S = 300.0
"""Since a rank looked for the stager of its node, until one answers its first call; then the save
fails. A stager's process imports torch, on a node that is busy training."""

STAGER_ANSWER_S = 60.0
"""Since a rank called a stager that has started, until its answer; then the rank turns to another
one, or its save fails."""

WARM_S = 2 * STAGER_START_S
"""Since memory was asked for ahead of the first save, until a stager has touched it; then that save
is slower."""

ROOM_OTHERS_S = 10.0
"""Since a rank found all room taken by saves of other sessions, until there is some; then it stages
in its own process. Their storage may hang."""

ROOM_LOOK_S = ROOM_OTHERS_S / 5
"""Since a rank asked a stager for room, until it has some; then it asks who has it, and again."""

TURN_S = 10.0
"""Since a process came to put bytes into a node's memory, until it is its turn; then there is no
room for it. Another one may be stopped in its turn."""

STUCK_S = 30.0
"""Since a writer in the storage last had a byte, until it has the next; then it counts as stuck,
and its stager ends once no save depends on it."""

LINGER_S = 1.5
"""Since the last reference to a window is gone, until Ray has freed its memory; then that
counts as free. Ray frees objects once a second (`free_objects_period_milliseconds`), and has to
hear of them."""

AFTER_RANKS_S = 10.0
"""Since a stager was last called, with no rank left, until it is called; then it ends, unless it
has something to write or to keep. A stager starts in less time than ranks that are started anew."""

KEPT_S = 900.0
"""The same while it keeps a checkpoint in memory: for ranks that are started anew."""

PEER_S = 2.0
"""Since a stager asked another one of its node, until its answer; then it goes by what it knew."""

TIER_ANSWER_S = 10.0
"""Since a load asked a stager for bytes in memory, until its answer; then they come from
storage."""

TIER_COMMIT_S = 10.0
"""Since all of a save is written, until it is committed or aborted; then a load waits for it no
longer."""

# A run of steps

LEASE_S = 30.0
"""Since a holder of a lease on another machine last renewed it, until it does; then it is dead.
This is the default of the options."""

ASK_AGAIN_S = (0.0, 0.5, 2.0)
"""Since the last answer about a save of unknown outcome, until the storage is asked again; then
there is another answer, and after the last one the save stays unknown."""

DRAIN_S = 300.0
"""Since `join` or `close` was called, until deletions are done; then they go on behind it."""

DELETION_END_S = 60.0
"""Since a writer is to end, until its deletion pass has ended; then it ends all the same."""

CLOSE_S = 2 * DELETION_END_S
"""Since a manager began to give its writer lease back, which waits for a deletion pass, until it is
given back; then it is left to expire, with a warning."""

NODES_ANSWER_S = 1.0
"""Since a decision asked for Ray's table of nodes, until it is there; then it is made without the
table. *Why*: training goes on while the store of that table is away."""

# What shows or records an operation

TRACKER_END_S = 5.0
"""Since the process began to exit, until a tracker that was not closed has recorded its events;
then they are lost."""

SHOWN_END_S = 1.0
"""Since an operation ended, until the function that shows its progress has returned; then a warning
is logged."""

# A job with parts

JOB_ANSWER_S = 60.0
"""Since a message was sent to a job's coordinator, until it has answered; then the call fails."""

DRIVER_END_S = 2.0
"""Since a new driver attached to a job's coordinator, until the one before has ended; then the new
one is refused. *Why*: Ray's tables show a death a moment later, and a job that is restarted at once
would be refused."""

# Ray Train

REPORTED_S = 5.0
"""Since Ray Train was asked for the checkpoints that were reported to it, until it has answered;
then the call fails."""

GROUP_STAGED_S = 60.0
"""Since a worker group began, until saves that earlier groups staged on its node have ended; then
it begins with the steps that are committed."""

REPLICA_STAGED_S = GROUP_STAGED_S / 6
"""The same of a group of replicas. *Why* shorter: the saves of replicas that train on follow each
other without end, and one of them gives a replaced worker its state."""

WORKER_ANSWER_S = 20.0
"""Since a controller called all workers, until they have answered; then it asks for no save. *Why*
so long: a worker may be importing a large module."""

HOLD_S = 3 * WORKER_ANSWER_S
"""Since a rank was held for a save, until the controller has named its step; then the rank trains
on. *Why*: the controller may be dead, but two calls to all ranks must fit, as a rank that goes on
early does not save with the others."""

RESIZE_END_S = 30.0
"""Since the time for a save before a resize or preemption is over, until the workers are ended;
then they train on."""

# Storage

FIRST_ANSWER_S = 10.0
"""Since a command made its first request to an object store, until it has answered; then the
command fails. *Why* not `retry_timeout_s`: a person may have mistyped an endpoint."""

REFUSED_S = 10.0
"""Since the first try of a request, while connections are refused, the host is unknown or answers
are unreadable, until it succeeds; then it fails. *Why* short: most likely no server is there, or
the wrong one."""

RETRY_S = 60.0
"""The same of filesystems of fsspec and pyarrow, while connections break or time out. Object stores
have `retry_timeout_s`."""

COPY_END_S = 30.0
"""Since a copy failed or was interrupted, until its threads have stopped; then what it created is
deleted all the same."""
