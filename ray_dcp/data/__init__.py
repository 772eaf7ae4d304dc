"""Saves the position in the training data per sample, not per rank, so that it survives a resize.

- `ElasticBatchSampler`: map-style datasets, with any torch `DataLoader`.
- `ElasticStream` and `LoaderPosition`: files, read through torchdata's `StatefulDataLoader`.
- `RowsSeen`: Ray Data.

Put such an object at the top level of the state dict; it is saved and loaded with it.
"""

from ray_dcp.data.sampler import ElasticBatchSampler
from ray_dcp.data.stream import ElasticStream, LoaderPosition, RowsSeen

__all__ = ["ElasticBatchSampler", "ElasticStream", "LoaderPosition", "RowsSeen"]
