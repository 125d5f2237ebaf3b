from __future__ import annotations

import sys

import pytest

from hvdtrain.distributed.watchdog import waits
from hvdtrain.torch.ops.compression import Compressor
from hvdtrain.torch.ops.engine import Handle


def test_the_watchdog_names_the_operation_that_a_handle_waits_for():
    """Two ranks in different operations must not look alike, or nobody says which one is missing where."""

    def part():
        frame = sys._getframe().f_back  # what is above it is the test's own
        return waits.describe(frame)

    assert Handle([part], lambda text: text, "p1").wait() == "allreduce of 'p1'"
    assert Handle([part], lambda text: [text], "p2").first().wait() == "allreduce of 'p2'"


def test_a_compressor_that_lacks_a_method_is_an_error():
    class Half(Compressor):
        @staticmethod
        def compress(tensor):
            return tensor.half(), None

    with pytest.raises(NotImplementedError):
        Half.decompress(None, None)
