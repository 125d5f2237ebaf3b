from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.system.quantities import format_size, format_time, parse_rate, parse_size, parse_time


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (parse_time, "200ms", 0.2),
        (parse_time, "416ms", 0.416),
        (parse_time, "5us", 5e-6),
        (parse_time, "5µs", 5e-6),
        (parse_time, " 1.5 h ", 5400.0),
        (parse_time, "0s", 0.0),
        (parse_size, "80MB", 80e6),
        (parse_size, "64MiB", 64 * 2**20),
        (parse_size, ".5GB", 5e8),
        (parse_rate, "25Gb/s", 25e9 / 8),
        (parse_rate, "3.9GB/s", 3.9e9),
        (parse_rate, "1e3MiB/s", 1e3 * 2**20),
    ],
)
def test_quantities_are_read_in_si_units(parse: Callable[[str], float], text: str, expected: float) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text", ["", "25", "25Gb", "25gb/s", "25GBps", "Gb/s", "2 5Gb/s", "nanGb/s", "infGb/s", "0x2Gb/s", "1e999Gb/s"]
)
def test_what_is_no_rate_is_refused_by_naming_what_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a data rate: .* Gb/s, .*b is bits, B is bytes"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("parse", "text", "kind"),
    [
        (parse_time, "-1ms", "time"),
        (parse_size, "-80MB", "size"),
        (parse_rate, "-25Gb/s", "data rate"),
    ],
)
def test_negative_quantities_are_refused(parse: Callable[[str], float], text: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"a {kind} cannot be negative. Received: '{text}'"):
        parse(text)


def test_a_size_is_no_time() -> None:
    with pytest.raises(ValueError, match=r"'80MB' is not a time: write a number and one of ns, us, "):
        parse_time("80MB")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (1.5e-6, "1.5 us"), (9.99e-4, "999 us"), (9.997e-4, "1,000 us"), (0.0123, "12.3 ms"), (2.0, "2 s")],
)
def test_times_have_their_unit(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


@given(st.floats(1e-9, 1e9))
def test_a_printed_time_reads_back_within_its_digits(seconds: float) -> None:
    number, unit = format_time(seconds).split()
    scale = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}[unit]
    assert float(number.replace(",", "")) * scale == pytest.approx(seconds, rel=0.006)


@given(st.floats(1, 1e15))
def test_a_printed_size_reads_back_within_its_digits(size: float) -> None:
    assert parse_size(format_size(size).replace(",", "")) == pytest.approx(size, rel=0.006)
