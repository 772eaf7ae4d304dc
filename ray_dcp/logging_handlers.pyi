from torch.distributed.checkpoint.logging_handlers import *
