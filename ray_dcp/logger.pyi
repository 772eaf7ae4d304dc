from torch.distributed.checkpoint.logger import *
