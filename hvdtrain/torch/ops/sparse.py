"""Gradients of embeddings with sparse=True: a row for each index."""

from __future__ import annotations

from typing import Any

import torch
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


def no_entries(parameter: Tensor) -> Tensor:
    """Return a sparse gradient without entries; its indices are those of an embedding, of one dimension."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    # torch warns without `check_invariants`.
    return torch.sparse_coo_tensor(indices, values, parameter.shape, device=parameter.device, check_invariants=False)
