"""Collectives on host arrays, without Horovod."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from hvdtrain.keras import ops  # noqa: E402


def test_operations_in_flight_are_awaited_before_an_error_is_raised():
    done = []

    def started():
        for i in range(5):
            yield lambda i=i: done.append(i) if i != 1 else pytest.fail("of rank 1")

    with pytest.raises(pytest.fail.Exception, match="of rank 1"):
        ops.finish_in_turn(started(), at_once=3)
    assert done == [0, 2, 3]


@pytest.mark.parametrize(
    ("numbers", "dtype", "factor", "scaled"),
    [
        ([49, -49, 50, -50, 0], "int32", 1 / 49, [1, -1, 1, -1, 0]),
        ([7, -7], "int32", -1 / 2, [-3, 3]),
        ([200, 49], "uint8", 1 / 49, [4, 1]),
        ([2**30 + 1], "int32", 1.0, [2**30 + 1]),
        ([3, -3], "int8", 2.0, [6, -6]),
        ([10, -10], "int32", 0.25 + 0.5, [7, -7]),
        ([1.5], "float32", 0.5, [0.75]),
    ],
)
def test_one_process_scales_integers_as_ranks_do_and_keeps_their_type(monkeypatch, numbers, dtype, factor, scaled):
    monkeypatch.setattr(ops.basics, "running", lambda: None)
    value = np.array(numbers, dtype)
    for factors in ({"prescale_factor": factor}, {"postscale_factor": factor}):
        result = ops.allreduce(value, **factors)
        assert keras.backend.standardize_dtype(result.dtype) == dtype
        assert keras.ops.convert_to_numpy(result).tolist() == scaled
