"""What options may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}. Received: {name}={value!r}")


def check_positive(name: str, value: Any, kind: type) -> None:
    """Raise ValueError unless `value` is an int >= 1, or with `kind` float a number > 0."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, np.integer) if kind is int else (int, float))
        or value <= 0
    ):
        raise ValueError(
            f"{name} must be {'an int >= 1' if kind is int else 'a number > 0'}. Received: {name}={value!r}"
        )
