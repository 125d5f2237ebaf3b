"""tf.data.Datasets as a source of steps; one whose order differs between ranks is refused."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("keras")

from hvdtrain.data.sources import Consumed
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import SoloWorld
from hvdtrain.keras.sources import as_source
from hvdtrain.training.arguments import check_end
from hvdtrain.training.progress import Budget, check_data
from hvdtrain.training.validation import evaluate

pytestmark = pytest.mark.tensorflow


class OfTwo(SoloWorld):
    size = 2


@pytest.fixture
def tf():
    """TensorFlow, which loads for seconds, so not in workers that run other files.

    Without a seed: other tests of this process may have set the global one, which seeds every shuffle.
    """
    import tensorflow

    tensorflow.random.set_seed(None)
    return tensorflow


def test_an_epoch_of_two_ranks_goes_on_on_one(tf):
    rows = tf.data.Dataset.range(8).shuffle(8, seed=3).batch(2)
    facts = [as_source(rows, batch_size=2, ranks=DataRanks(world), seed=0).facts for world in (OfTwo(), SoloWorld())]
    check_data(*facts)
    check_data(*reversed(facts))


def test_an_infinite_dataset_needs_steps_or_seconds(tf):
    source = as_source(tf.data.Dataset.range(4).batch(2).repeat(), batch_size=2, ranks=DataRanks(SoloWorld()), seed=0)
    with pytest.raises(ValueError, match=r"train never ends.*epochs=1\. Give steps or seconds"):
        check_end(source.facts, Budget(epochs=1))
    check_end(source.facts, Budget(steps=3))
    check_end(source.facts, Budget(epochs=1, seconds=3.0))
    with pytest.raises(ValueError, match="data to evaluate never ends"):
        evaluate(None, None, source)
    rest = source.epoch(0, shuffle=True, after=Consumed(samples=6, batches=3))
    assert [np.asarray(next(rest).inputs).tolist() for _ in range(3)] == [[2, 3], [0, 1], [2, 3]]


def test_one_rank_takes_a_shuffle_without_a_seed(tf):
    rows = tf.data.Dataset.range(8).shuffle(8).batch(2)
    assert as_source(rows, batch_size=2, ranks=DataRanks(SoloWorld()), seed=0).steps == 4
    with pytest.raises(ValueError, match="needs a seed"):
        as_source(rows, batch_size=2, ranks=DataRanks(OfTwo()), seed=0)


def test_a_run_that_goes_on_after_an_epochs_last_step_draws_the_next_order_next(tf):
    def source():
        return as_source(
            tf.data.Dataset.range(8).shuffle(8, seed=3).batch(2), batch_size=2, ranks=DataRanks(SoloWorld()), seed=0
        )

    def rows(epoch):
        return [int(row) for batch in epoch for row in batch.inputs]

    straight, resumed = source(), source()
    orders = [rows(straight.epoch(number, shuffle=True)) for number in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert rows(resumed.epoch(0, shuffle=True, after=Consumed(8, 4, 1))) == []
    assert resumed.example(0).inputs.shape == (1,)  # by which metrics learn what they are made of
    assert [rows(resumed.epoch(number, shuffle=True)) for number in (1, 2)] == orders[1:]


def interleaved(tf, **options):
    rows = tf.data.Dataset.range(6)
    return rows.interleave(lambda i: tf.data.Dataset.range(2), num_parallel_calls=2, **options).batch(2)


def with_options(tf):
    options = tf.data.Options()
    options.deterministic = False
    return tf.data.Dataset.range(6).with_options(options).map(lambda i: i).batch(2)


UNORDERED = {
    "map": lambda tf: tf.data.Dataset.range(6).map(lambda i: i, num_parallel_calls=2, deterministic=False).batch(2),
    "batch": lambda tf: tf.data.Dataset.range(6).batch(2, num_parallel_calls=2, deterministic=False).prefetch(1),
    "interleave": lambda tf: interleaved(tf, deterministic=False),
    "options": with_options,
}


@pytest.mark.parametrize("name", UNORDERED)
def test_an_order_that_differs_between_ranks_is_refused(tf, name):
    with pytest.raises(ValueError, match=r"same order on every rank.*deterministic=False.*rank 0"):
        as_source(UNORDERED[name](tf), batch_size=2, ranks=DataRanks(OfTwo()), seed=0)
    assert as_source(UNORDERED[name](tf), batch_size=2, ranks=DataRanks(SoloWorld()), seed=0) is not None


def test_parallel_reading_in_order_is_taken(tf):
    data = interleaved(tf).map(lambda i: i, num_parallel_calls=2)
    assert as_source(data, batch_size=2, ranks=DataRanks(OfTwo()), seed=0) is not None
