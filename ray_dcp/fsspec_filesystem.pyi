from torch.distributed.checkpoint._fsspec_filesystem import *
from torch.distributed.checkpoint.fsspec_filesystem import *
