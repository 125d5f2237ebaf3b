"""Several optimizers of one loss, as one optimizer: one backward pass and one step of all, or of none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.reduction import fused_update

_GRAPH_IS_GONE = ("backward through the graph a second time", "modified by an inplace operation")


class Together:
    """Offers what an `Update` calls of an optimizer, for several; those of a distributed one if they all are."""

    def __init__(self, optimizers: Mapping[str, Any]) -> None:
        self.by_name = dict(optimizers)
        self._each = list(optimizers.values())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all optimizers: loss scaling, clipping and the finite test take them as one gradient."""
        return [group for each in self._each for group in each.param_groups]

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for each in self._each:
            each.zero_grad()

    def step(self) -> None:
        """Take a step of each."""
        for each in self._each:
            with fused_update.chosen(each) if fused_update.applies_to(type(each)) else nullcontext():
                each.step()

    def register_step_post_hook(self, hook: Callable[..., None]) -> Any:
        """Call `hook` after a step: after the first optimizer's, since all take it or none."""
        return self._each[0].register_step_post_hook(hook)

    def synchronize(self, *, weight: float | None, expected: float = 0.0) -> float | None:
        """Reduce all gradients over ranks; return the sum of the ranks' weights."""
        totals: list[float | None] = [each.synchronize(weight=weight, expected=expected) for each in self._each]
        return totals[0]

    def skip_synchronize(self) -> AbstractContextManager[Any]:
        """Within the block, `step` does not reduce."""
        stack = ExitStack()
        for each in self._each:
            if hasattr(each, "skip_synchronize"):  # else there is one process
                stack.enter_context(each.skip_synchronize())
        return stack

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes that make up one step; 0 where the optimizers differ."""
        passes = {each.backward_passes_per_step for each in self._each}
        return passes.pop() if len(passes) == 1 else 0

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes per step."""
        for each in self._each:
            each.set_backward_passes_per_step(passes)


def optimizers_by_name(optimizer: Any, name: str) -> dict[str, torch.optim.Optimizer]:
    """Return an Update's optimizers by name."""
    return optimizer.by_name if isinstance(optimizer, Together) else {name: optimizer}


@contextmanager
def graph_of_a_later_yield(names: Sequence[str], earlier: Sequence[str], rank: int) -> Iterator[None]:
    """Say how to yield one loss for several optimizers, where torch says that a graph was used up or changed."""
    try:
        yield
    except RuntimeError as error:
        if not any(text in str(error) for text in _GRAPH_IS_GONE):
            raise
        every = ", ".join(map(repr, dict.fromkeys([*earlier, *names])))
        raise HvdTrainError(
            f"A yield ends with the step of its optimizer, and a loss that was computed before it cannot go backward "
            f"through the same graph. Received: a loss for {', '.join(map(repr, names))} that uses the graph or the "
            f"weights of an earlier yield, on rank {rank}. If one loss trains several optimizers, yield them together: "
            f"`yield ({every}), hvdtrain.Loss(loss)`. Else compute each loss after the yield before it."
        ) from error
