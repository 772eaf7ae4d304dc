from torch.distributed.checkpoint._fsspec_filesystem import *
