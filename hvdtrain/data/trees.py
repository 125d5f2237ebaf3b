"""Arrays in the users' data."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def as_array(leaf: Any) -> NDArray[Any]:
    """Return `leaf` as a NumPy array. NumPy has no bfloat16, which becomes float32."""
    if hasattr(leaf, "detach"):
        leaf = (leaf.float() if str(leaf.dtype) == "torch.bfloat16" else leaf).detach().cpu()
    return np.asarray(leaf)
