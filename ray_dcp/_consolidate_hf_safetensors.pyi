from torch.distributed.checkpoint._consolidate_hf_safetensors import *
