"""`CommittedStep`: a committed step of a job, protected from deletion while it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray_dcp.errors import InvalidRequestError
from ray_dcp.format.job_parts import PartRecord
from ray_dcp.job.part import Part
from ray_dcp.job.step_files import folders_of
from ray_dcp.job.value import read_value, value_ref
from ray_dcp.manager.catalogue import Root, StepFound
from ray_dcp.manager.reader_leases import ReaderLease
from ray_dcp.session import ray_calls


class CommittedStep:
    """A committed step. `JobCheckpoints.latest` returns it; close it when all parts are loaded.

    Args:
        root: The run.
        found: The step.
        parts: What its record says of its parts.
        lease: Protects it from deletion.

    Attributes:
        step: Number of the step.
        checkpoint_id: Path or URL of its folder.
        versions: Version of each part that was saved with one.
        kept_from: For each part that was kept, the step whose part it is.
        metrics: Metrics of the step.
        metadata: The user's metadata.
    """

    def __init__(
        self,
        root: Root,
        found: StepFound,
        parts: Mapping[str, PartRecord],
        lease: ReaderLease | None,
    ) -> None:
        self.step = found.step
        self.checkpoint_id = root.below(found.name).url
        records = parts.items()
        self.versions = {n: one.version for n, one in records if one.version is not None}
        self.kept_from = {n: one.kept_from for n, one in records if one.kept_from is not None}
        info = found.info
        self.metrics: Mapping[str, float] = {} if info is None else dict(info.metrics)
        self.metadata: Mapping[str, Any] = {} if info is None else dict(info.metadata)
        self._root, self._parts, self._lease = root, parts, lease
        self._folders = folders_of(found)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of its parts."""
        return tuple(self._folders)

    def part(self, name: str) -> Part:
        """Returns the token of a part, which any number of ranks give to `load`.

        Raises:
            InvalidRequestError: The step has no such part.
        """
        if name not in self._folders:
            raise InvalidRequestError(
                f"step {self.step} has the parts {', '.join(self._folders)}, but was asked for "
                f"{name!r}",
                step=self.step,
                key=str(name),
            )
        target = self._root.below(self._folders[name])
        return Part(
            target.url,
            target.storage_options,
            target.filesystem,
            name=name,
            step=self.step,
            version=self.versions.get(name),
        )

    def ref(self, name: str, *, node_id: str = "") -> Any:
        """Returns an `ObjectRef` of the value of a part, which a task reads.

        Args:
            name: Name of the part.
            node_id: Hex id of the node on which it is read; "" for any.

        Raises:
            InvalidRequestError: The step has no such part, or this process has no Ray.
        """
        part = self.part(name)
        if ray_calls.this_connection() is None:
            raise InvalidRequestError(
                "expected a Ray, in which a task reads the value; call ray.init first, or value()"
            )
        return value_ref(part, node_id, is_wrapped=self._is_wrapped(name))

    def value(self, name: str) -> Any:
        """Returns the value of a part, read by this process.

        Raises:
            InvalidRequestError: The step has no such part.
            CheckpointError: As `ray_dcp.read_state_dict`.
        """
        return read_value(self.part(name), is_wrapped=self._is_wrapped(name))

    def close(self) -> None:
        """Lets the step be deleted. May be called repeatedly."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.__exit__()

    def __enter__(self) -> CommittedStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<CommittedStep {self.checkpoint_id!r}: {', '.join(self._folders)}>"

    def _is_wrapped(self, name: str) -> bool:
        return name in self._parts and self._parts[name].is_value
