"""What tests share: jobs, storages, servers, states, and the programs that tests start."""
