from torch.distributed.checkpoint.hf_storage import *
