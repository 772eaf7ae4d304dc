from ray_dcp.entrypoints import load as load
from ray_dcp.entrypoints import load_state_dict as load_state_dict
