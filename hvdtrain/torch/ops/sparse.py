"""Gradients of embeddings with sparse=True: a row for each index."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def gradient_values(parameter: Any) -> Tensor:
    """Return the numbers of a parameter's gradient, which share its memory.

    Rows of one index add up before they are squared.
    """
    if not parameter.grad.is_sparse:
        found: Tensor = parameter.grad
        return found
    parameter.grad = parameter.grad.coalesce()
    values: Tensor = parameter.grad.values()
    return values
