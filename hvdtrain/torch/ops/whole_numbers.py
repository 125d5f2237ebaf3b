"""Multiply whole numbers by a factor as Horovod does here, by horovod/common/ops/whole_factor.h."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from hvdtrain.distributed import whole_factors
from hvdtrain.distributed.whole_factors import LARGEST


def times(numbers: Tensor, factor: float) -> Tensor:
    """Return integers times `factor`, cut towards zero; exact above 2^53 too. A factor 1/n divides by n."""
    if divisor := whole_factors.divisor(factor):
        return torch.div(numbers, divisor, rounding_mode="trunc")
    if (multiplier := whole_factors.multiplier(factor)) is not None:
        return numbers * multiplier
    products = (numbers.double() * factor).to(numbers.dtype)
    if numbers.dtype == torch.int64 and abs(factor) <= LARGEST:
        large = (numbers > LARGEST) | (numbers < -LARGEST)
        if large.any():
            exact = [int(number * Fraction(factor)) for number in numbers[large].tolist()]
            products[large] = torch.tensor(exact, dtype=torch.int64, device=numbers.device)
    return products
