"""Code that several backends share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class BatchWeight:
    """What a rank's gradients are multiplied by; a compiled step reads it each time it runs."""

    def __init__(self) -> None:
        self.value = 1.0

    def set(self, value: float) -> None:
        """Set the weight of the steps from now on."""
        self.value = value


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`: the backend runs Python as it is written."""
    return function


def fused_update(optimizer: Any, step: Any, gradient: Any, variable: Any, learning_rate: Any) -> bool:
    """Return False: torch updates all variables together, and XLA fuses updates."""
    return False


def on_update_step(optimizer: Any, function: Callable[[list[Any]], list[Any]], gradients: list[Any]) -> list[Any]:
    """Return `function(gradients)`: Keras clips gradients in the branch that updates weights, and in no other."""
    return function(gradients)


def wait_for_reports() -> None:
    """Return at once: a step ends after its calls to the host."""
