"""The public names of ray_dcp and their homes, for type checkers and `__init__.py` alike."""

from torch.distributed.checkpoint.api import CheckpointException as CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner as DefaultLoadPlanner,
)
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner as DefaultSavePlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader as FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystemWriter as FileSystemWriter
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader as HuggingFaceStorageReader,
)
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageWriter as HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata as BytesStorageMetadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as ChunkStorageMetadata
from torch.distributed.checkpoint.metadata import Metadata as Metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata as TensorStorageMetadata
from torch.distributed.checkpoint.optimizer import (
    load_sharded_optimizer_state_dict as load_sharded_optimizer_state_dict,
)
from torch.distributed.checkpoint.planner import LoadPlan as LoadPlan
from torch.distributed.checkpoint.planner import LoadPlanner as LoadPlanner
from torch.distributed.checkpoint.planner import ReadItem as ReadItem
from torch.distributed.checkpoint.planner import SavePlan as SavePlan
from torch.distributed.checkpoint.planner import SavePlanner as SavePlanner
from torch.distributed.checkpoint.planner import WriteItem as WriteItem
from torch.distributed.checkpoint.quantized_hf_storage import (
    QuantizedHuggingFaceStorageReader as QuantizedHuggingFaceStorageReader,
)
from torch.distributed.checkpoint.staging import AsyncStager as AsyncStager
from torch.distributed.checkpoint.staging import BlockingAsyncStager as BlockingAsyncStager
from torch.distributed.checkpoint.stateful import Stateful as Stateful
from torch.distributed.checkpoint.storage import StorageReader as StorageReader
from torch.distributed.checkpoint.storage import StorageWriter as StorageWriter

from ray_dcp.asynchronous import SaveHandle as SaveHandle
from ray_dcp.asynchronous import SaveProgress as SaveProgress
from ray_dcp.asynchronous import SaveReport as SaveReport
from ray_dcp.asynchronous import async_save as async_save
from ray_dcp.core import __version__ as __version__
from ray_dcp.errors import *
from ray_dcp.fsspec_filesystem import FsspecReader as FsspecReader
from ray_dcp.fsspec_filesystem import FsspecWriter as FsspecWriter
from ray_dcp.job.checkpoints import JobCheckpoints as JobCheckpoints
from ray_dcp.job.committed import CommittedStep as CommittedStep
from ray_dcp.job.part import Part as Part
from ray_dcp.job.part_value import PartValue as PartValue
from ray_dcp.job.step import JobStep as JobStep
from ray_dcp.job.step import JobStepReport as JobStepReport
from ray_dcp.loading import load as load
from ray_dcp.loading import load_state_dict as load_state_dict
from ray_dcp.manager.following import FollowedStep as FollowedStep
from ray_dcp.manager.following import follow as follow
from ray_dcp.manager.following import record_metrics as record_metrics
from ray_dcp.manager.manager import CheckpointManager as CheckpointManager
from ray_dcp.manager.newest import load_newest as load_newest
from ray_dcp.options import LoadOptions as LoadOptions
from ray_dcp.options import SaveOptions as SaveOptions
from ray_dcp.place.collect import collect as collect
from ray_dcp.place.listing import CollectReport as CollectReport
from ray_dcp.place.outcome import outcome as outcome
from ray_dcp.place.step_deletion import delete as delete
from ray_dcp.place.stock_metadata import write_metadata as write_metadata
from ray_dcp.protocol import CheckpointableTensor as CheckpointableTensor
from ray_dcp.saving import save as save
from ray_dcp.saving import save_state_dict as save_state_dict
from ray_dcp.saving import warm_up as warm_up
from ray_dcp.session.discovery import connect as connect
from ray_dcp.session.session import Session as Session
from ray_dcp.stage.stager_options import StagerOptions as StagerOptions
from ray_dcp.store.location import Location as Location
from ray_dcp.torch_adapter.load_report import LoadReport as LoadReport
from ray_dcp.torch_adapter.state import PerRank as PerRank
from ray_dcp.transform.averaging import AverageReport as AverageReport
from ray_dcp.transform.averaging import average as average
from ray_dcp.transform.conversion import dcp_to_safetensors as dcp_to_safetensors
from ray_dcp.transform.conversion import dcp_to_torch_save as dcp_to_torch_save
from ray_dcp.transform.conversion import read_state_dict as read_state_dict
from ray_dcp.transform.conversion import torch_save_to_dcp as torch_save_to_dcp
from ray_dcp.transform.exporting import copy as copy
from ray_dcp.transform.exporting import export as export
from ray_dcp.transform.hf_assets import hf_assets as hf_assets
from ray_dcp.transform.importing import import_checkpoint as import_checkpoint
from ray_dcp.view.checkpoint_view import CheckpointView as CheckpointView
from ray_dcp.view.progress import Progress as Progress
from ray_dcp.view.run_view import RunView as RunView
from ray_dcp.view.run_view import open as open
from ray_dcp.view.run_view import open_checkpoint as open_checkpoint
from ray_dcp.view.run_view import open_run as open_run
from ray_dcp.view.verify import verify as verify
from ray_dcp.worker_group import WorkerGroup as WorkerGroup
