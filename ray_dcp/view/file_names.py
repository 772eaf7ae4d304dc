"""What the names of the files of a checkpoint tell, ours and stock DCP's."""

from __future__ import annotations

import re

from ray_dcp.view.runs import PART_NAME

__all__ = ["METADATA", "OUR_FILE", "STOCK_FILE", "rank_of_file"]

METADATA = ".metadata"
OUR_FILE = re.compile(rf"__\d+_\d+\..+\.distcp|[^/]+/{PART_NAME.pattern}")
"""Data files that ray_dcp writes."""
STOCK_FILE = re.compile(r"__\d+_\d+\.distcp")
"""Data files that stock DCP writes."""

_RANK = re.compile(r"(?:.*/)?__(\d+)_\d+\.(?:.+\.)?distcp|.*/rank-(\d+)-part-\d+\.safetensors")


def rank_of_file(key: str) -> int | None:
    """Returns the rank in the name of a data file, ours or stock DCP's.

    Args:
        key: Key of the file.

    Example:
        >>> rank_of_file("__12_0.distcp"), rank_of_file("model.safetensors")
        (12, None)
    """
    match = _RANK.fullmatch(key)
    return int(match[1] or match[2]) if match else None
