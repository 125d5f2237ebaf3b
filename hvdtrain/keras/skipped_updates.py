"""How a compiled step tells the host of an update that it left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Told:
    """What a compiled step tells of an update that it left out.

    Attributes:
        reduced: path of the first variable whose reduced gradient is not finite.
        own: path of the first whose gradient on this rank alone is not; None where all are finite.
        by_scaling: whether loss scaling left it out, and looks for a scale with which it can be made.
    """

    reduced: str
    own: str | None
    by_scaling: bool


class Watch:
    """Hears on the host, out of the compiled step, of updates that were not made."""

    def __init__(self) -> None:
        self._told: Told | None = None

    def tell(self, paths: Sequence[str], by_scaling: bool, own: Any, reduced: Any) -> None:
        """Note such an update.

        Args:
            paths: of the variables.
            by_scaling: see `Told`; then `reduced` is nobody's.
            own: for each variable, whether its gradient on this rank is not finite.
            reduced: likewise, over all ranks.
        """
        self._told = Told(_first(paths, reduced) or "none", _first(paths, own), by_scaling)

    def take(self) -> Told | None:
        """Return what was noted since the last call."""
        told, self._told = self._told, None
        return told


def _first(paths: Sequence[str], flags: Any) -> str | None:
    return next((path for path, flag in zip(paths, np.asarray(flags), strict=True) if flag), None)
