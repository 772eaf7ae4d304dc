from torch.distributed.checkpoint.quantized_hf_storage import *
