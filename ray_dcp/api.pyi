from torch.distributed.checkpoint.api import *
