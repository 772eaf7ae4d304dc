from torch.distributed.checkpoint._extension import *
