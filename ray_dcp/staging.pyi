from torch.distributed.checkpoint.staging import *
