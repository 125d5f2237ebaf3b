"""tf.data.Datasets whose order differs between ranks are refused."""

from __future__ import annotations

import pytest

pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

from hvdtrain.distributed.world import SoloWorld  # noqa: E402
from hvdtrain.keras.sources import as_source  # noqa: E402


class TwoRanks(SoloWorld):
    size = 2


def rows():
    return tf.data.Dataset.range(6)


def interleaved(**options):
    return rows().interleave(lambda i: tf.data.Dataset.range(2), num_parallel_calls=2, **options).batch(2)


def with_options():
    options = tf.data.Options()
    options.deterministic = False
    return rows().with_options(options).map(lambda i: i).batch(2)


UNORDERED = {
    "map": lambda: rows().map(lambda i: i, num_parallel_calls=2, deterministic=False).batch(2),
    "batch": lambda: rows().batch(2, num_parallel_calls=2, deterministic=False).prefetch(1),
    "interleave": lambda: interleaved(deterministic=False),
    "options": with_options,
}


@pytest.mark.parametrize("name", UNORDERED)
def test_an_order_that_differs_between_ranks_is_refused(name):
    with pytest.raises(ValueError, match=r"same order on every rank.*deterministic=False.*rank 0"):
        as_source(UNORDERED[name](), batch_size=2, world=TwoRanks(), seed=0)
    assert as_source(UNORDERED[name](), batch_size=2, world=SoloWorld(), seed=0) is not None


def test_parallel_reading_in_order_is_taken():
    data = interleaved().map(lambda i: i, num_parallel_calls=2)
    assert as_source(data, batch_size=2, world=TwoRanks(), seed=0) is not None
