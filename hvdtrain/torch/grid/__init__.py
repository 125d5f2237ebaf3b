"""A grid of ranks: torch's own model parallelism within a replica, Horovod across replicas.

layout.py says which rank has which place, groups.py runs torch.distributed on Horovod, grid.py has what a script uses.
"""

from hvdtrain.torch.grid.grid import Grid as Grid
