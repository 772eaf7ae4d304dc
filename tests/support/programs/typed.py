"""A user's program for the type checker: DCP's modules and names have torch's types here too."""

from typing import assert_type

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.state_dict import StateDictOptions

import ray_dcp as dcp
import ray_dcp.state_dict
from ray_dcp.filesystem import FileSystemReader
from ray_dcp.state_dict_saver import async_save

assert_type(ray_dcp.state_dict.StateDictOptions(), StateDictOptions)
assert_type(dcp.state_dict.StateDictOptions(), StateDictOptions)
assert_type(FileSystemReader("run"), filesystem.FileSystemReader)
assert_type(async_save({}, checkpoint_id="run"), dcp.SaveHandle)
assert_type(dcp.open("run"), dcp.CheckpointView | dcp.RunView)
assert_type(dcp.open_checkpoint("run@latest"), dcp.CheckpointView)
assert_type(dcp.open_run("run"), dcp.RunView)
assert_type(dcp.open_run("run")["latest"], dcp.CheckpointView)
assert_type(dcp.DamagedCheckpointError("torn").step, int | None)
