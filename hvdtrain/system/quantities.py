"""Quantities as people write them, such as 25Gb/s, 200ms and 80MB: parsed strictly, printed shortly."""

from __future__ import annotations

import re
from decimal import Decimal
from functools import partial

_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,2})?)\s*(\S*)")

_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_SIZES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_BIT_RATES = {
    f"{prefix}b/s": scale / 8 for prefix, scale in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))
}
_RATES = _BIT_RATES | {f"{unit}/s": scale for unit, scale in _SIZES.items()}


_SHOWN_SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_SHOWN_TIMES = (
    ("us", 1e-6, 1e-3),
    ("ms", 1e-3, 1.0),
    ("s", 1.0, 120.0),
    ("min", 60.0, 7200.0),
    ("h", 3600.0, 259200.0),
)


def _parse(text: str, units: dict[str, float], kind: str, example: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2] not in units:
        raise ValueError(
            f"{text!r} is not a {kind}: write a number and one of {', '.join(units)} (for example {example})"
        )
    # In decimal, so that 416ms is 0.416 s and not 0.41600000000000004.
    value = float(Decimal(match[1]) * Decimal(str(units[match[2]])))
    if value < 0:
        raise ValueError(f"a {kind} cannot be negative. Received: {text!r}")
    return value


# Each reads a text, such as "1.5h", "64MiB" (2^20) or "3.9GB/s", in seconds, bytes or bytes a second; or a ValueError.
parse_time = partial(_parse, units=_TIMES, kind="time", example="200ms")
parse_size = partial(_parse, units=_SIZES, kind="size", example="80MB")
parse_rate = partial(_parse, units=_RATES, kind="data rate", example="25Gb/s or 3.9GB/s; b is bits, B is bytes")


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit that suits a time, and its seconds: ("ms", 0.001)."""
    found = (each for each in _SHOWN_TIMES if seconds < each[2])
    return ("s", 1.0) if seconds == 0 else next(found, ("d", 86400.0))[:2]


def format_time(seconds: float) -> str:
    """Return seconds with three digits in the unit that suits them: "416 ms", "2.31 h", "12.5 d"."""
    unit, scale = time_unit(seconds)
    return f"{three_digits(seconds / scale)} {unit}"


def format_size(size_bytes: float) -> str:
    """Return bytes with three digits: "553 MB"."""
    unit, scale = next((each for each in _SHOWN_SIZES if size_bytes >= each[1]), ("B", 1.0))
    return f"{three_digits(size_bytes / scale)} {unit}"


def three_digits(value: float) -> str:
    """Return value with three significant digits, or as a whole number from 100 on: "0.12", "4.57", "54,321"."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"
