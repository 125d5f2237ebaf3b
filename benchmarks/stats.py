"""Ratios of step times, with their spread."""

from __future__ import annotations

from typing import Any

from hvdtrain.telemetry.step_times import Spread


def ratio(result: dict[str, Any], peer: str, against: str) -> Spread | None:
    """Return one peer's step time over another's: turn by turn, so that what slows both down cancels out."""
    ours, theirs = (result["peers"].get(name, {}).get("block_ms") for name in (peer, against))
    if not ours or not theirs:
        return None
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=False)])
