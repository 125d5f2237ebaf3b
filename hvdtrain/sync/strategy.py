"""A strategy: options that say when ranks synchronize, and what they need of a framework."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hvdtrain.adapter import Adapter, Needs, Options
from hvdtrain.distributed.world import World
from hvdtrain.sync.synchronizer import Synchronizer


@dataclass(frozen=True)
class Strategy:
    """The options of a strategy, equal on all ranks; each strategy explains its own."""

    @property
    def needs(self) -> Needs:
        """The operations that an adapter must have."""
        raise NotImplementedError

    def synchronizer(self, adapter: Adapter, options: Options, world: World) -> Synchronizer:
        """Return what keeps ranks equal as the strategy says."""
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
