"""Which value of a metric is the better one: a single rule for early stopping and for the best checkpoint."""

from __future__ import annotations

from typing import Literal

Mode = Literal["auto", "min", "max"]

_LESS_IS_BETTER = ("loss", "error", "mse", "mae")


def sign(metric: str, mode: Mode) -> float:
    """Return 1.0 where more of `metric` is better, -1.0 where less is; "auto" goes by its name."""
    if mode not in ("auto", "min", "max"):
        raise ValueError(f'mode must be "auto", "min" or "max". Received: {mode!r}')
    if mode == "auto":
        mode = "min" if any(word in metric for word in _LESS_IS_BETTER) else "max"
    return 1.0 if mode == "max" else -1.0


def improves(score: float, best: float, *, min_delta: float = 0.0) -> bool:
    """Return whether a score (a value times its `sign`) is better than the best before; NaN and equal never are."""
    return score > best + min_delta
