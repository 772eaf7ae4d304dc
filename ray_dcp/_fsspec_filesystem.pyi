from ray_dcp.fsspec_filesystem import *
