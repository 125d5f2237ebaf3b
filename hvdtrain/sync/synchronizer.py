"""Keep the ranks of a Trainer equal: the contract of a strategy, and the default, in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdtrain.adapter import Adapter, Fault, State
from hvdtrain.data.sources import Batch
from hvdtrain.distributed.world import World


class Synchronizer:
    """Synchronizes ranks in every step, by the adapter's own reduction; a strategy overrides what it does otherwise.

    It stands beside the adapter. The loop calls `before_step` and `after_step` around each step of the adapter, and
    `make_equal` after the last step of an epoch. The state of a training is the adapter's and the synchronizer's own:
    `start`, `state`, `load_state` and `finish` are for both.

    Attributes:
        adapter: takes the steps.
        between_exchanges: called within steps, on all ranks, if the exchange of each step is in flight until the next
            step: at this point other collectives do not wait for an exchange.
    """

    def __init__(self, adapter: Adapter, world: World) -> None:
        self.adapter, self._world = adapter, world
        self.between_exchanges: Callable[[], None] = lambda: None

    # Steps

    @property
    def in_sync(self) -> bool:
        """True if ranks hold equal weights; equal on all ranks."""
        return True

    @property
    def in_flight(self) -> bool:
        """True if an exchange is in flight, for which another collective would wait; equal on all ranks."""
        return False

    @property
    def step_taken(self) -> bool:
        """False if the last step changed no weight; see `Adapter.step_taken`."""
        return self.adapter.step_taken

    def before_step(self) -> None:
        """Prepare the next step of the adapter."""

    def after_step(self, batches: Sequence[Batch]) -> Fault | None:
        """Synchronize what is due after a step over `batches`; return why ranks did not take a step, if they did not.

        The fault is of this step, or of an earlier one of which ranks learn now; set on all ranks or on none.
        """
        return self.adapter.fault

    def request_sync(self) -> None:
        """Request that ranks hold equal weights soon: after the next step, or at their next synchronization."""

    def make_equal(self) -> Fault | None:
        """Give all ranks equal weights and statistics, after an epoch; return a fault of which they learn now."""
        self.adapter.average_buffers()
        return self.adapter.fault

    # State

    def start(self) -> None:
        """Give all ranks the root's weights, optimizer state and state of the strategy; a collective."""
        self.adapter.start()

    def state(self) -> State:
        """Return the state that training changes; a collective. See `Adapter.state`."""
        return self.adapter.state()

    def load_state(self, state: State) -> None:
        """Restore what `state` returned. Raises ValueError naming the first tensor that does not fit."""
        self.adapter.load_state(state)

    def finish(self) -> Fault | None:
        """End a fit; see `Adapter.finish`."""
        return self.adapter.finish()
