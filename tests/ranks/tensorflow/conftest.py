"""Horovod for TensorFlow, and what its tests share."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

import hvdtrain.tensorflow as hvd

hvd.init()


class Kit:
    """Comparisons between ranks."""

    def digest(self, variables: list[Any]) -> str:
        """Return a hash of the values' bits."""
        return hashlib.sha256(b"".join(np.ascontiguousarray(v.numpy()).tobytes() for v in variables)).hexdigest()

    def assert_same_everywhere(self, variables: list[Any]) -> None:
        """Check that values are equal on all ranks, bit for bit."""
        mine = self.digest(variables)
        assert hvd.allgather_object(mine) == [mine] * hvd.size()


@pytest.fixture
def kit() -> Kit:
    return Kit()
