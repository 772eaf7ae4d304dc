from torch.distributed.checkpoint.planner import *
