from torch.distributed.checkpoint.utils import *
