from torch.distributed.checkpoint.default_planner import *
