"""The ranks that the launcher started, under Lightning's name for such facts."""

from __future__ import annotations

from lightning.fabric.plugins.environments import ClusterEnvironment

import hvdtrain.torch as hvd
from hvdtrain.distributed.world import World


class HorovodEnvironment(ClusterEnvironment):
    """Horovod's ranks: the launcher has started all processes, and they have found each other."""

    creates_processes_externally = True
    main_address = "Horovod's ranks find each other without a main address"
    main_port = 0

    def __init__(self, world: World) -> None:
        self._world = world

    @staticmethod
    def detect() -> bool:
        """Return False: Lightning chooses other strategies' environment by it, and this one comes with its own."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._world.size

    def global_rank(self) -> int:
        """Return this process's rank."""
        return self._world.rank

    def local_rank(self) -> int:
        """Return this process's number on its host."""
        return self._world.local_rank

    def node_rank(self) -> int:
        """Return this host's number."""
        return int(hvd.cross_rank())

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher has decided."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher has decided."""
