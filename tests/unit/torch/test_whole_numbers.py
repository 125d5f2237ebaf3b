"""Whole numbers times a factor: a double would lose some."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from hvdtrain.torch.ops import solo, whole_numbers

LARGE = [2**53 + 1, -(2**53) - 1, 2**61 + 7, -(2**61) - 7]


@pytest.mark.parametrize("factor", [0.75, -0.75, 2.5 / 4, 0.3, 1e-9])
def test_products_above_a_doubles_reach_are_exact(factor):
    found = whole_numbers.times(torch.tensor(LARGE), factor)
    assert found.tolist() == [int(number * Fraction(factor)) for number in LARGE]


@pytest.mark.parametrize("ranks", [2, 3, 49, -7])
def test_one_over_n_divides_by_n_and_cuts(ranks):
    numbers = [*LARGE, 49, 48, -49, 0]
    found = whole_numbers.times(torch.tensor(numbers), 1.0 / ranks)
    assert found.tolist() == [int(Fraction(number, ranks)) for number in numbers]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(("factor", "expected"), [(3.0, [0, 3, 21]), (0.0, [0, 0, 0]), (2.5, [0, 2, 17])])
def test_small_numbers_are_multiplied_and_cut(dtype, factor, expected):
    found = whole_numbers.times(torch.tensor([0, 1, 7], dtype=dtype), factor)
    assert found.tolist() == expected
    assert found.dtype == dtype


def test_one_process_scales_whole_numbers_as_many_do():
    tensor = torch.tensor([2**53 + 1])
    solo.synchronize(solo.allreduce_async_(tensor, prescale_factor=3.0, postscale_factor=1.0))
    assert tensor.tolist() == [3 * (2**53 + 1)]
