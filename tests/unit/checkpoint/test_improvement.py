"""Which value of a metric is better."""

from __future__ import annotations

import math

import pytest

from hvdtrain.checkpoint.store import improves, sign


@pytest.mark.parametrize(
    ("metric", "mode", "expected"),
    [
        ("val_loss", "auto", -1),
        ("mean_error", "auto", -1),
        ("accuracy", "auto", 1),
        ("loss", "max", 1),
        ("f1", "min", -1),
    ],
)
def test_a_loss_or_an_error_is_better_when_less_unless_said_otherwise(metric, mode, expected):
    assert sign(metric, mode) == expected


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="'less'"):
        sign("loss", "less")


def test_equal_nan_and_less_than_min_delta_are_no_improvement():
    assert improves(1.0, -math.inf)
    assert improves(1.2, 1.0, min_delta=0.1)
    assert not improves(1.0, 1.0)
    assert not improves(1.05, 1.0, min_delta=0.1)
    assert not improves(math.nan, -math.inf)
