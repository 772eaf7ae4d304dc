"""The place in the data: kept by sample, not by rank, so that it survives a resize.

`ElasticBatchSampler` is for data sets with indices and any torch `DataLoader`; `ElasticStream` and
`LoaderPosition` for files read through torchdata's `StatefulDataLoader`; `RowsSeen` for Ray Data.
Each goes into a state dict, at its top level, and is saved and loaded with it.
"""

from ray_dcp.data.loader import LoaderPosition
from ray_dcp.data.rows import RowsSeen
from ray_dcp.data.sampler import ElasticBatchSampler
from ray_dcp.data.stream import ElasticStream

__all__ = ["ElasticBatchSampler", "ElasticStream", "LoaderPosition", "RowsSeen"]
