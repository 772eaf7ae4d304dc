from torch.distributed.checkpoint.storage import *
