from torch.distributed.checkpoint.filesystem import *
