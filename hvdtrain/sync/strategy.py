"""What a strategy is: options that wrap the framework's adapter in one that lets ranks step alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from numpy.typing import NDArray

from hvdtrain.adapter import Adapter, Fault, OpenStep, Options, Ranks, Reduce, Replica, State
from hvdtrain.data.sources import Batch
from hvdtrain.distributed.world import World


@dataclass(frozen=True)
class Strategy:
    """The options of a strategy, equal on all ranks; each strategy explains its own."""

    is_delayed: ClassVar[bool] = False  # whether the framework applies each gradient one step late

    def wrap(self, adapter: Adapter, options: Options, world: World) -> Adapter:
        """Return an adapter that takes steps as the strategy says."""
        raise NotImplementedError

    def describe(self, steps: int | None) -> list[str]:
        """Return log lines on what the options mean for a run whose epochs, or which itself, takes so many steps."""
        return []

    @property
    def config(self) -> dict[str, Any]:
        """The strategy and its options as JSON."""
        return {"strategy": type(self).__name__, **asdict(self)}


def check_count(strategy: str, name: str, value: Any, *, least: int) -> None:
    """Raise ValueError unless an option is an int >= `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{strategy}: {name} must be an int >= {least}. Received: {name}={value!r}")


def describe_period(strategy: Strategy, every: int, steps: int | None) -> list[str]:
    """Return a log line if epochs, or the run, end more often than ranks would synchronize: they do so there too."""
    if steps is None or every <= steps:
        return []
    name = f"{type(strategy).__name__}(every={every})"
    when = f"ranks synchronize at its end, about every {steps} steps"
    return [f"{name} exceeds the {steps} steps of an epoch or the run: {when}. For a short run begin with every=8"]


class WrappedAdapter:
    """An adapter that does all as another one does, for strategies to change parts of."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self.fault: Fault | None = None
        self.couples_samples = adapter.couples_samples
        self.notes = adapter.notes

    @property
    def step_taken(self) -> bool:
        """False if the last step was left out, equal on all ranks."""
        return self._adapter.step_taken

    @property
    def learning_rates(self) -> list[float]:
        """One per parameter group."""
        return self._adapter.learning_rates

    @learning_rates.setter
    def learning_rates(self, rates: list[float]) -> None:
        self._adapter.learning_rates = rates

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The optimizer's settings, one dict a parameter group."""
        return self._adapter.settings

    @settings.setter
    def settings(self, settings: list[dict[str, Any]]) -> None:
        self._adapter.settings = settings

    @property
    def class_weight(self) -> dict[int, float] | None:
        """Weight of training samples by class."""
        return self._adapter.class_weight

    @class_weight.setter
    def class_weight(self, weight: dict[int, float] | None) -> None:
        self._adapter.class_weight = weight

    @property
    def rank_state(self) -> dict[str, NDArray[Any]]:
        """State of this rank only."""
        return self._adapter.rank_state

    @rank_state.setter
    def rank_state(self, held: dict[str, NDArray[Any]]) -> None:
        self._adapter.rank_state = held

    def reseed(self, seeds: Mapping[str, int]) -> None:
        """Seed the framework's generators."""
        self._adapter.reseed(seeds)

    @property
    def between_exchanges(self) -> Callable[[], None]:
        """Called where another collective does not have to wait."""
        return self._adapter.between_exchanges

    @between_exchanges.setter
    def between_exchanges(self, function: Callable[[], None]) -> None:
        self._adapter.between_exchanges = function

    @property
    def in_sync(self) -> bool:
        """Whether ranks hold equal weights."""
        return self._adapter.in_sync

    @property
    def in_flight(self) -> bool:
        """Whether an exchange is in flight."""
        return self._adapter.in_flight

    def request_sync(self) -> None:
        """Request that ranks hold equal weights soon."""
        self._adapter.request_sync()

    def start(self) -> None:
        """Broadcast the root's weights and optimizer state."""
        self._adapter.start()

    def train_step(self, batches: Sequence[Batch]) -> None:
        """Take one optimizer step."""
        self._adapter.train_step(batches)
        self.fault = self._adapter.fault

    def open_step(self, step: OpenStep) -> None:
        """Take a step that may close before every rank is done."""
        self._adapter.open_step(step)

    def reduce_over(self, ranks: Ranks) -> None:
        """Reduce the next steps' gradients over these ranks."""
        self._adapter.reduce_over(ranks)

    def replica(self) -> Replica:
        """Return access to weights and optimizer state."""
        return self._adapter.replica()

    def eval_step(self, batch: Batch) -> None:
        """Add a batch to the metrics."""
        self._adapter.eval_step(batch)

    def predict_step(self, inputs: Any) -> NDArray[Any]:
        """Return the model's outputs."""
        return self._adapter.predict_step(inputs)

    def metrics(self, reduce: Reduce, *, keep: bool = False) -> dict[str, float]:
        """Return the metrics since the last reset."""
        return self._adapter.metrics(reduce, keep=keep)

    def reset_metrics(self) -> None:
        """Drop what the metrics have counted."""
        self._adapter.reset_metrics()

    def local_metrics(self) -> dict[str, float]:
        """Return this rank's metrics."""
        return self._adapter.local_metrics()

    def settle(self) -> None:
        """Synchronize what ranks still hold alone."""
        self._adapter.settle()

    def abandon(self) -> None:
        """Stop what is in flight, after an error."""
        self._adapter.abandon()

    def finish(self) -> Fault | None:
        """Change weights as the framework does when training ends."""
        return self._adapter.finish()

    def state(self) -> State:
        """Return weights, optimizer state and precision scaler."""
        return self._adapter.state()

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
        self._adapter.load_state(state)
