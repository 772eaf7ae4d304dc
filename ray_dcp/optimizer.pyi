from torch.distributed.checkpoint.optimizer import *
