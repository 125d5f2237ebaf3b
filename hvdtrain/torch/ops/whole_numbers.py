"""Multiply whole numbers by a factor as Horovod does here, by horovod/common/ops/whole_factor.h."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

_LARGEST = 2**53  # a double holds all whole numbers up to it


def times(numbers: Tensor, factor: float) -> Tensor:
    """Return integers times `factor`, cut towards zero; exact above 2^53 too. A factor 1/n divides by n."""
    inverse = round(1.0 / factor) if 1.0 / _LARGEST <= abs(factor) < 1.0 else 0
    if inverse and factor == 1.0 / inverse:
        return torch.div(numbers, inverse, rounding_mode="trunc")
    if abs(factor) <= _LARGEST and factor == round(factor):
        return numbers * round(factor)
    products = (numbers.double() * factor).to(numbers.dtype)
    if numbers.dtype == torch.int64 and abs(factor) <= _LARGEST:
        large = (numbers > _LARGEST) | (numbers < -_LARGEST)
        if large.any():
            exact = [int(number * Fraction(factor)) for number in numbers[large].tolist()]
            products[large] = torch.tensor(exact, dtype=torch.int64, device=numbers.device)
    return products
