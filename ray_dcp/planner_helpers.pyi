from torch.distributed.checkpoint.planner_helpers import *
