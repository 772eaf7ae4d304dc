from torch.distributed.checkpoint.stateful import *
