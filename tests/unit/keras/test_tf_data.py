"""tf.data.Datasets as a source of steps."""

from __future__ import annotations

import pytest

tf = pytest.importorskip("tensorflow")
pytest.importorskip("keras")

from hvdtrain.keras.data import as_source  # noqa: E402
from hvdtrain.position import check_data  # noqa: E402
from hvdtrain.world import SoloWorld  # noqa: E402


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


def test_one_rank_takes_a_shuffle_without_a_seed():
    rows = tf.data.Dataset.range(8).shuffle(8).batch(2)
    assert as_source(rows, batch_size=2, world=SoloWorld(), seed=0).steps == 4
    with pytest.raises(ValueError, match="needs a seed"):
        as_source(rows, batch_size=2, world=OfTwo(), seed=0)
