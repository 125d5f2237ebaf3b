"""The exchanges of one optimizer's gradients: over all ranks, over those of a host, or over none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Parameter

from hvdtrain.adapter import Options, Ranks
from hvdtrain.distributed import launch_environment
from hvdtrain.distributed.data_ranks import PartRanks
from hvdtrain.distributed.world import World
from hvdtrain.torch.ops import divided
from hvdtrain.torch.ops.compression import resolve
from hvdtrain.torch.ops.names import parameters_of
from hvdtrain.torch.reduction.alone import Alone
from hvdtrain.torch.reduction.delayed import Delayed
from hvdtrain.torch.reduction.divided import Divided
from hvdtrain.torch.reduction.exchange import DenseOnly, Exchange
from hvdtrain.torch.reduction.grid_part import GridPart
from hvdtrain.torch.reduction.host_mean import HostMean
from hvdtrain.torch.reduction.optimizer import DistributedOptimizer
from hvdtrain.torch.reduction.overlapped import Overlapped
from hvdtrain.torch.reduction.sharded import Shards
from hvdtrain.torch.steps.together import Together


class Exchanges:
    """Makes an optimizer distributed, and chooses its exchange. No other code knows the kinds of exchange.

    Attributes:
        optimizer: the given one; a distributed one after `make`, if there are ranks to reduce over.
        names: the names of the model's parameters.
        used: the exchange of the next step.
    """

    def __init__(self, optimizer: Any, names: dict[Parameter, str], options: Options, world: World) -> None:
        self.optimizer, self.names = optimizer, names
        self.used: Exchange = Alone(optimizer)
        self._options, self._world = options, world
        self._by_ranks: dict[Ranks, Exchange] = {}

    @property
    def every_step(self) -> Exchange:
        """The exchange over all ranks; one that does nothing while lazy modules have no shapes."""
        return self._by_ranks.get("all", self.used)

    @property
    def shards(self) -> list[Shards]:
        """The state in shards, if it is."""
        held = getattr(self.optimizer, "_hvd_shards", None)
        return [] if held is None else [held]

    def make(self) -> None:
        """Make the exchanges, unless this was done; the parameters have shapes."""
        if self._by_ranks:
            return
        options, world = self._options, self._world
        is_frozen = world.grid is not None and not parameters_of(self.optimizer)  # all of this part
        if is_frozen or any(map(divided.is_divided, self.names)):
            self._make_divided()
            return
        has_peers = PartRanks(world).size > 1 or launch_environment.reduces_alone()
        if has_peers and not isinstance(self.optimizer, Together):
            every = [(name, parameter) for parameter, name in self.names.items()]
            how = (every, options.compression, options.accumulate)
            self.optimizer = DistributedOptimizer(
                self.optimizer, *how, process_set=world.part_set, shard_state=options.shard is not None
            )
            if options.shard != "gradients":  # which are sent, and freed, in the first backward pass already
                self.optimizer._hvd_reducer.count_again()
        shards = self.optimizer._hvd_shards if has_peers and options.shard == "gradients" else None
        self.used = Overlapped(self.optimizer, shards) if has_peers else Alone(self.optimizer)
        within = self.dense_only('LocalSGD(within="host")', instead="within=None")
        by_host = HostMean(self.optimizer, within, world)
        self._by_ranks = {"all": self.used, "host": by_host, "none": Alone(self.optimizer)}
        self._tell_of_grid()
        if not isinstance(self.optimizer, Together):
            self.detach()

    def _make_divided(self) -> None:
        """Make the exchanges of divided weights, or of a frozen part, which only adds up the weights of losses."""
        self.used = Divided(self.optimizer, self._world)
        self._by_ranks = {"all": self.used, "none": Alone(self.optimizer)}
        self._tell_of_grid()

    def _tell_of_grid(self) -> None:
        """Let a step ask the ranks of the replica, if a Grid divides the model."""
        if self._world.grid is not None:
            for each in self._by_ranks.values():
                each.tensors = GridPart(self._world.grid)

    def delay(self, between_exchanges: Callable[[], None]) -> None:
        """Apply each step's gradient in the step after it; see `Adapter.delay`."""
        compressor = resolve(self._options.compression).bind(list(self.names.values()))
        dense = self.dense_only("sync=Delayed()", instead="sync=None")
        self.used = self._by_ranks["all"] = Delayed(self.optimizer, compressor, dense, between_exchanges)

    def dense_only(self, feature: str, *, instead: str) -> DenseOnly:
        """Return a check for a feature that averages dense gradients only."""
        return DenseOnly(feature, instead, self.names, self._world)

    def use(self, ranks: Ranks) -> None:
        """Use the exchange over these ranks from the next step on."""
        self.used = self._by_ranks[ranks]
        if ranks != "all":
            self.detach()

    def start(self) -> None:
        """Begin a fit, perhaps with other ranks than before; a collective."""
        for each in self._by_ranks.values():
            each.start()

    def detach(self) -> None:
        """Let backward passes send nothing; `synchronize` adds the hooks again, in the first step of a fit.

        Between fits, a rank may compute gradients alone, and another Trainer may train the same parameters.
        """
        for each in self._by_ranks.values():
            each.detach()
