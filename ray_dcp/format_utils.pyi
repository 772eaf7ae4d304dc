from torch.distributed.checkpoint.format_utils import *
