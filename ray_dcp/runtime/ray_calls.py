"""Ray's calls as they are for a process that is connected: none of them starts a Ray.

*Why*: Ray's public ones start a new cluster in a process that has none. A thread that follows a
save would do so when another thread shuts Ray down between its look and its call, and then wait
for ever for an answer that the new cluster can't have. These raise `RaySystemError` instead.
"""

from __future__ import annotations

import inspect

import ray

__all__ = ["get", "get_actor", "kill", "nodes", "put", "wait"]

# Ray wraps each of them, by functools.wraps, in what starts a cluster.
get = inspect.unwrap(ray.get)
get_actor = inspect.unwrap(ray.get_actor)
kill = inspect.unwrap(ray.kill)
nodes = inspect.unwrap(ray.nodes)
put = inspect.unwrap(ray.put)
wait = inspect.unwrap(ray.wait)
