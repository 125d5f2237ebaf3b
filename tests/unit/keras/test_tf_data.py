"""tf.data.Datasets as a source of steps."""

from __future__ import annotations

import pytest

tf = pytest.importorskip("tensorflow")
pytest.importorskip("keras")

from hvdtrain.data.sources import Consumed  # noqa: E402
from hvdtrain.distributed.world import SoloWorld  # noqa: E402
from hvdtrain.keras.sources import as_source  # noqa: E402
from hvdtrain.training.arguments import check_end  # noqa: E402
from hvdtrain.training.progress import Budget, check_data  # noqa: E402
from hvdtrain.training.validation import Validation  # noqa: E402


class OfTwo(SoloWorld):
    size = 2


@pytest.fixture(autouse=True)
def no_global_seed():
    """Other tests of this process may have set TensorFlow's, which seeds every shuffle."""
    tf.random.set_seed(None)


def test_an_epoch_of_two_ranks_goes_on_on_one():
    rows = tf.data.Dataset.range(8).shuffle(8, seed=3).batch(2)
    facts = [as_source(rows, batch_size=2, world=world, seed=0).facts for world in (OfTwo(), SoloWorld())]
    check_data(*facts)
    check_data(*reversed(facts))


def test_an_infinite_dataset_needs_steps_or_seconds():
    source = as_source(tf.data.Dataset.range(4).batch(2).repeat(), batch_size=2, world=SoloWorld(), seed=0)
    with pytest.raises(ValueError, match=r"train never ends.*epochs=1\. Give steps or seconds"):
        check_end(source.facts, Budget(epochs=1))
    check_end(source.facts, Budget(steps=3))
    check_end(source.facts, Budget(epochs=1, seconds=3.0))
    with pytest.raises(ValueError, match="data to evaluate never ends"):
        Validation(None, None).evaluate(source)
    rest = source.epoch(0, shuffle=True, after=Consumed(samples=6, batches=3))
    assert [next(rest).inputs.numpy().tolist() for _ in range(3)] == [[2, 3], [0, 1], [2, 3]]


def test_one_rank_takes_a_shuffle_without_a_seed():
    rows = tf.data.Dataset.range(8).shuffle(8).batch(2)
    assert as_source(rows, batch_size=2, world=SoloWorld(), seed=0).steps == 4
    with pytest.raises(ValueError, match="needs a seed"):
        as_source(rows, batch_size=2, world=OfTwo(), seed=0)


def test_a_run_that_goes_on_after_an_epochs_last_step_draws_the_next_order_next():
    def source():
        return as_source(tf.data.Dataset.range(8).shuffle(8, seed=3).batch(2), batch_size=2, world=SoloWorld(), seed=0)

    def rows(epoch):
        return [int(row) for batch in epoch for row in batch.inputs]

    straight, resumed = source(), source()
    orders = [rows(straight.epoch(number, shuffle=True)) for number in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert rows(resumed.epoch(0, shuffle=True, after=Consumed(8, 4, 1))) == []
    assert resumed.example(0).inputs.shape == (1,)  # by which metrics learn what they are made of
    assert [rows(resumed.epoch(number, shuffle=True)) for number in (1, 2)] == orders[1:]
