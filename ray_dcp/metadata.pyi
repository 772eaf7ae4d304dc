from torch.distributed.checkpoint.metadata import *
