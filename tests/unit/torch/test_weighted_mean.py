"""The numbers that travel with gradients, and what they correct."""

from __future__ import annotations

import pytest

from hvdtrain.torch.reduction.weighted_mean import FAILED, WeightedMean


def received(weight: float | None, expected: float | None, total: float) -> WeightedMean:
    mean = WeightedMean([1.0, 0.0], weight, expected)
    mean.receive([total, 2.0, 1.0])
    return mean


def test_gradients_are_corrected_for_the_sum_of_weights_that_came() -> None:
    mean = received(3.0, 8.0, 4.0)
    assert (mean.weight, mean.flags, mean.correction()) == (4.0, [2.0, 1.0], 2.0)


@pytest.mark.parametrize(("weight", "expected", "total"), [(3.0, 8.0, 8.00004), (None, 8.0, 4.0), (3.0, None, 4.0)])
def test_a_rounded_or_a_known_sum_and_losses_that_are_sums_correct_nothing(weight, expected, total) -> None:
    assert received(weight, expected, total).correction() == 1.0


def test_a_rank_without_a_weight_learns_that_another_has_failed() -> None:
    assert received(None, 8.0, FAILED).weight == FAILED
    assert WeightedMean([True], None).numbers == [0.0, True]
