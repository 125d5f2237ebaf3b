"""Collectives on host arrays, without Horovod."""

from __future__ import annotations

import pytest

pytest.importorskip("keras")

from hvdtrain.keras import ops


def test_operations_in_flight_are_awaited_before_an_error_is_raised():
    done = []

    def started():
        for i in range(5):
            yield lambda i=i: done.append(i) if i != 1 else pytest.fail("of rank 1")

    with pytest.raises(pytest.fail.Exception, match="of rank 1"):
        ops.finish_in_turn(started(), at_once=3)
    assert done == [0, 2, 3]
