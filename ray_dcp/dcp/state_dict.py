"""Mirror of `torch.distributed.checkpoint.state_dict`.

State dicts of models and optimizers by names of parameters; torch's own.
"""

from torch.distributed.checkpoint import state_dict as _stock
from torch.distributed.checkpoint.state_dict import *

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)
