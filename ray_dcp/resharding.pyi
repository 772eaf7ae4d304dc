from torch.distributed.checkpoint.resharding import *
