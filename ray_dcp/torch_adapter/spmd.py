"""torch_xla's SPMD planners: save and load state dicts with `XLAShardedTensor`s shard by shard.

`_CpuShards`, which torch_xla creates to save in the background, are supported too. The planners
work with ray_dcp and with stock DCP, and use the keys and chunks of torch_xla's own planners, so
that each can read the checkpoints of the other. torch_xla is used only if the program has imported
it. `state` primes an optimizer for a load.

Source: `torch_xla/experimental/distributed_checkpoint/planners.py`.
"""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element, traverse_state_dict_v_2_3
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ray_dcp.errors import MissingKeyError, ShapeMismatchError, StateDictError
from ray_dcp.torch_adapter.objects import load_object

Path = tuple[str | int, ...]


class _SplitState:
    """What torch_xla's planners have: sharded tensors, and all other values, in two mappings."""

    state_dict: dict[str, Any]

    @property
    def unsharded_state_dict(self) -> dict[str, Any]:
        """The values that are no sharded tensors, by name."""
        return self.state_dict

    @unsharded_state_dict.setter
    def unsharded_state_dict(self, values: dict[str, Any]) -> None:
        self.state_dict = values


class SPMDSavePlanner(_SplitState, DefaultSavePlanner):
    """Plans a save of a state dict that may have SPMD-sharded tensors.

    Each distinct shard is one chunk. A shard that several devices hold (of a tensor that is sharded
    over one axis of the mesh and replicated over another) is saved once; torch_xla's own planner
    does not save such tensors at all. Tensors are copied to the CPU one after the other.

    Attributes:
        sharded_state_dict: The sharded tensors by name, after `set_up_planner`.
        unsharded_state_dict: All other values by name. `create_local_plan` plans what is in the
            two, so that a subclass may change them, as with torch_xla's planner.

    Examples:
        >>> import tempfile, torch, ray_dcp
        >>> with tempfile.TemporaryDirectory() as root:
        ...     metadata = ray_dcp.save(
        ...         {"model": {"w": torch.ones(2)}}, checkpoint_id=root, planner=SPMDSavePlanner()
        ...     )
        ...     sorted(metadata.state_dict_metadata)
        ['model.w']
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.sharded_state_dict: dict[str, Any] = {}
        self._held: tuple[str, dict[torch.Size, torch.Tensor]] | None = None

    def set_up_planner(
        self,
        state_dict: Mapping[str, Any],
        storage_meta: StorageMeta | bool | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """See `SavePlanner.set_up_planner`. As in torch_xla, `is_coordinator` may come second.

        Raises:
            StateDictError: Two values would have the same name.
        """
        meta = None if isinstance(storage_meta, bool) else storage_meta
        is_coordinator = is_coordinator or storage_meta is True
        flat, self.mappings = _flattened(state_dict)
        self._held = None
        self.sharded_state_dict, plain = _split(flat)
        # Why off: the state is flat already, by torch_xla's rules; global plans then merge
        # what `mappings` contains.
        self.flatten_state_dict = False
        super().set_up_planner(plain, meta, is_coordinator)
        self.flatten_state_dict = True

    def create_local_plan(self) -> SavePlan:
        """See `SavePlanner.create_local_plan`."""
        plain = create_default_local_save_plan(self.unsharded_state_dict, self.is_coordinator)
        sharded = self.sharded_state_dict
        items = [item for fqn, tensor in sharded.items() for item in _write_items(fqn, tensor)]
        self.plan = SavePlan([*plain.items, *items], planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """See `DefaultSavePlanner.lookup_object`."""
        if index.fqn not in self.sharded_state_dict:
            return super().lookup_object(index)
        if self._held is None or self._held[0] != index.fqn:
            tensor = self.sharded_state_dict[index.fqn]
            shards = _local_shards(tensor)
            data = {
                offsets: shards[holders[0]].unpadded_data
                for (offsets, _), holders in _distinct(_indices_of(tensor)).items()
            }
            self._held = (index.fqn, data)
        # Why by offset: the number in an index is a hint, which a global plan may change.
        return self._held[1][torch.Size(index.offset or ())]

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
        """See `DefaultSavePlanner.transform_object`."""
        found = super().transform_object(write_item, object)
        return found.detach().cpu() if isinstance(found, torch.Tensor) else found


@dataclass
class _Filling:
    """A target whose shards are filled on the CPU."""

    shards: list[Any]
    """Local shards as torch_xla returns them, padded: copies of those on devices, else the target's
    own."""
    holders: dict[torch.Size, list[int]]
    """By offset of each distinct box, the shards that hold it; the first one is filled."""
    left: int
    """Number of elements that are not read yet."""


@dataclass
class _Copy:
    """A target on a device, which is filled on the CPU."""

    target: torch.Tensor
    data: torch.Tensor
    left: int
    """Number of elements that are not read yet; at least 1."""


class SPMDLoadPlanner(_SplitState, DefaultLoadPlanner):
    """Plans a load into a state dict whose tensors are on XLA devices, keeping their sharding.

    Tensors are filled in place, each once its last element has arrived. Another global shape is an
    error: torch_xla's own planner would silently load nothing, or a part.

    Attributes:
        sharded_state_dict: The sharded tensors by name, after `set_up_planner`.
        unsharded_state_dict: All other values by name. `create_local_plan` plans what is in the
            two, so that a subclass may change them, as with torch_xla's planner.

    Examples:
        >>> import tempfile, torch, ray_dcp
        >>> with tempfile.TemporaryDirectory() as root:
        ...     state = {"w": torch.ones(2)}
        ...     _ = ray_dcp.save(state, checkpoint_id=root, planner=SPMDSavePlanner())
        ...     state = {"w": torch.zeros(2)}
        ...     _ = ray_dcp.load(state, checkpoint_id=root, planner=SPMDLoadPlanner())
        ...     state["w"]
        tensor([1., 1.])
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.sharded_state_dict: dict[str, Any] = {}
        self._filling: dict[str, _Filling] = {}
        self._copies: dict[str, _Copy] = {}

    def set_up_planner(
        self,
        state_dict: MutableMapping[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """See `LoadPlanner.set_up_planner`.

        Raises:
            StateDictError: Two values would have the same name.
        """
        flat, mappings = _flattened(state_dict)
        self.sharded_state_dict, plain = _split(flat)
        self._filling, self._copies = {}, {}
        super().set_up_planner(plain, metadata, is_coordinator)
        self.original_state_dict = state_dict  # type: ignore[assignment]
        self.mappings = mappings

    def create_local_plan(self) -> LoadPlan:
        """See `LoadPlanner.create_local_plan`.

        Raises:
            MissingKeyError: The checkpoint lacks keys; the message names all of them.
            ShapeMismatchError: Tensors of the checkpoint have other global shapes; the message
                names all of them.
        """
        if self.metadata is None:
            raise StateDictError("set_up_planner was not given the metadata of a checkpoint")
        known = self.metadata.state_dict_metadata
        wanted = {**self.unsharded_state_dict, **self.sharded_state_dict}
        missing = [fqn for fqn in wanted if fqn not in known]
        if missing:
            raise MissingKeyError(
                f"Missing key in checkpoint state_dict: {', '.join(missing)}. The checkpoint has "
                f"{len(known)} keys; an optimizer that never stepped is primed by prime_optimizer",
                key=missing[0],
            )
        wrong = [
            f"{fqn}: {tuple(size)} wanted, {_shape(known[fqn])} stored"
            for fqn, t in wanted.items()
            if (size := _size_of(t)) is not None and tuple(size) != _shape(known[fqn])
        ]
        if wrong:
            raise ShapeMismatchError(
                f"tensors have other global shapes in the checkpoint: {'; '.join(wrong)}. Load "
                f"into tensors of the stored shapes",
                key=wrong[0].partition(":")[0],
            )
        plan = create_default_local_load_plan(self.unsharded_state_dict, self.metadata)
        for fqn, tensor in self.sharded_state_dict.items():
            plan.items.extend(self._read_items(fqn, tensor, known[fqn]))
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See `LoadPlanner.load_bytes`. Objects are loaded by the rules of `ray_dcp.load`."""
        fqn = read_item.dest_index.fqn
        loaded = load_object(value.getvalue(), fqn=fqn)
        self.state_dict[fqn] = loaded
        set_element(self.original_state_dict, self.mappings[fqn], loaded)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """See `DefaultLoadPlanner.lookup_tensor`."""
        if index.fqn not in self.sharded_state_dict:
            found = super().lookup_tensor(index)
            # Why: it is read to the CPU first, and copied to its device once it is complete.
            return self._copy_of(index.fqn, found).data if is_on_xla(found) else found
        filling = self._filling[index.fqn]
        if not filling.shards:
            filling.shards = _local_shards(self.sharded_state_dict[index.fqn])
        chosen = filling.holders[torch.Size(index.offset or ())][0]
        data: torch.Tensor = filling.shards[chosen].data
        return data

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """See `LoadPlanner.commit_tensor`."""
        fqn = read_item.dest_index.fqn
        count = prod(read_item.lengths)
        if fqn in self._copies:
            copy = self._copies[fqn]
            copy.left -= max(1, count)
            if copy.left <= 0:
                with torch.no_grad():
                    copy.target.detach().copy_(copy.data)
                del self._copies[fqn]
        elif fqn in self.sharded_state_dict:
            filling = self._filling[fqn]
            filling.left -= count
            if filling.left <= 0:
                self._load_shards(fqn, filling)

    def _copy_of(self, fqn: str, target: torch.Tensor) -> _Copy:
        if fqn not in self._copies:
            data = torch.empty(target.shape, dtype=target.dtype, device="cpu")
            self._copies[fqn] = _Copy(target, data, max(1, target.numel()))
        return self._copies[fqn]

    def _read_items(self, fqn: str, tensor: Any, stored: Any) -> list[ReadItem]:
        distinct = _distinct(_indices_of(tensor))
        chunks = [ChunkStorageMetadata(*box) for box in distinct]
        left = sum(prod(chunk.sizes) for chunk in chunks)
        holders = {offsets: found for (offsets, _), found in distinct.items()}
        self._filling[fqn] = _Filling([], holders, left)
        items: list[ReadItem] = create_read_items_for_chunk_list(fqn, stored, chunks)
        return items

    def _load_shards(self, fqn: str, filling: _Filling) -> None:
        for chosen, *others in filling.holders.values():
            for other in others:
                filling.shards[other].data.copy_(filling.shards[chosen].data)
        if not _is_cpu_shards(self.sharded_state_dict[fqn]):
            self.sharded_state_dict[fqn].load_local_shards_(filling.shards)
        filling.shards = []


# --- calls of torch_xla -------------------------------------------------------------------------


@dataclass(frozen=True)
class XlaModules:
    """The modules of torch_xla that are needed, if the program has imported them."""

    root: Any
    spmd: Any
    model: Any = field(default=None)


def xla_modules() -> XlaModules | None:
    """Returns torch_xla's modules; None if they are not imported: no tensor is on its devices."""
    if "torch_xla" not in sys.modules:
        return None
    spmd = importlib.import_module("torch_xla.distributed.spmd")
    model = importlib.import_module("torch_xla.core.xla_model")
    return XlaModules(sys.modules["torch_xla"], spmd, model)


def is_sync_point(step: int) -> bool:
    """Returns whether torch_xla's preemption sync manager chose a step for a checkpoint.

    False if the program has not activated that manager.
    """
    modules = xla_modules()
    ask = None if modules is None else getattr(modules.root._XLAC, "_sync_point_reached", None)
    try:
        return ask is not None and bool(ask(step))
    except (RuntimeError, TypeError):
        return False  # It is not active, or takes no step beyond 32 bits.


def is_on_xla(value: object) -> bool:
    """Returns whether a value is a tensor on an XLA device."""
    return isinstance(value, torch.Tensor) and value.device.type == "xla"


def _is_cpu_shards(value: object) -> bool:
    """Returns whether a value is a sharded tensor whose shards torch_xla copied to the CPU."""
    helpers = sys.modules.get("torch_xla.experimental.distributed_checkpoint._helpers")
    return helpers is not None and isinstance(value, helpers._CpuShards)


def _split(flat: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a state into its sharded tensors, and plain tensors and objects."""
    modules = xla_modules()
    if modules is None:
        return {}, dict(flat)
    sharded: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for fqn, value in flat.items():
        if _is_cpu_shards(value):
            sharded[fqn] = value
            continue
        wrapped = modules.spmd.wrap_if_sharded(value) if is_on_xla(value) else value
        if not isinstance(wrapped, modules.spmd.XLAShardedTensor):
            plain[fqn] = value
        elif wrapped.sharding_type == modules.spmd.ShardingType.REPLICATED:
            plain[fqn] = wrapped.global_tensor
        else:
            sharded[fqn] = wrapped
    return sharded, plain


def _indices_of(tensor: Any) -> list[list[slice]]:
    """Returns the place of each local shard in the global tensor, without fetching its data."""
    if _is_cpu_shards(tensor):
        return [shard.indices for shard in tensor.shards]
    modules = xla_modules()
    if modules is None:
        raise StateDictError("a sharded tensor of torch_xla, but torch_xla is not loaded")
    ask = modules.root._XLAC._get_local_shard_replica_and_indices
    return [indices for _, indices in ask([tensor.global_tensor])[0]]


def _local_shards(tensor: Any) -> list[Any]:
    """Returns the local shards, padded: copies on the CPU, or shards that are there already."""
    return list(tensor.shards if _is_cpu_shards(tensor) else tensor.local_shards)


def _size_of(value: Any) -> torch.Size | None:
    """Returns the global shape of a tensor; None for other values."""
    if _is_cpu_shards(value):
        return torch.Size(value.global_shape)
    return value.shape if isinstance(value, torch.Tensor) else None


# --- plan values --------------------------------------------------------------------------------


def _write_items(fqn: str, tensor: Any) -> list[WriteItem]:
    one = tensor.shards[0].data if _is_cpu_shards(tensor) else tensor.global_tensor
    properties = TensorProperties.create_from_tensor(one)
    size = torch.Size(_size_of(tensor) or ())
    return [
        WriteItem(
            index=MetadataIndex(fqn, offsets, holders[0]),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets, sizes), properties=properties, size=size
            ),
        )
        for (offsets, sizes), holders in _distinct(_indices_of(tensor)).items()
    ]


def _distinct(
    indices: list[list[slice]],
) -> dict[tuple[torch.Size, torch.Size], list[int]]:
    """Returns each distinct box of the local shards, with the shards that hold it.

    Empty boxes (in a dimension that the devices don't divide) are omitted, unless all are empty.
    """
    found: dict[tuple[torch.Size, torch.Size], list[int]] = {}
    for number, box in enumerate(indices):
        offsets = torch.Size(int(one.start) for one in box)
        sizes = torch.Size(int(one.stop) - int(one.start) for one in box)
        found.setdefault((offsets, sizes), []).append(number)
    filled = {box: holders for box, holders in found.items() if prod(box[1])}
    return filled or dict(list(found.items())[:1])


def _flattened(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Flattens a state by torch_xla's rules; returns values and paths by name.

    A collection without a tensor below it is one object.
    """

    def is_tensor(value: object) -> bool:
        return isinstance(value, torch.Tensor) or _is_cpu_shards(value)

    flat: dict[str, Any] = {}
    paths: dict[str, Path] = {}

    def visit(path: Path, value: Any) -> None:
        fqn = ".".join(map(str, path))
        if fqn in flat:
            raise StateDictError(
                f"duplicated flatten key {fqn}: two values of the state dict have this name; "
                f"rename one",
                key=fqn,
            )
        flat[fqn] = value
        paths[fqn] = path

    traverse_state_dict_v_2_3(dict(state_dict), visit, is_tensor)
    return flat, paths


def _shape(stored: Any) -> tuple[int, ...] | None:
    return tuple(stored.size) if isinstance(stored, TensorStorageMetadata) else None
