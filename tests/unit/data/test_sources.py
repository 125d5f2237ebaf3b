"""What users call data, turned into steps: on a fake world whose ranks are asked one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.data.reading import as_source
from hvdtrain.data.sources import IteratedSource, Sharded
from hvdtrain.data.trees import collate, unpack
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import SoloWorld
from hvdtrain.errors import DesyncError


class FakeWorld(SoloWorld):
    """Rank and size alone; collectives are scripted where a test needs one."""

    def __init__(self, rank, size):
        super().__init__()
        self.rank, self.size = rank, size


def batches(data, *, rank=0, size=1, batch_size=4, shuffle=True, epoch=0):
    source = as_source(data, batch_size=batch_size, world=FakeWorld(rank, size), seed=0)
    return list(source.epoch(epoch, shuffle=shuffle))


@pytest.mark.parametrize("n", [1, 2, 7, 24, 25])
def test_all_ranks_take_the_same_number_of_steps_and_see_everything_once(n):
    x, y = np.arange(n)[:, None], np.arange(n)
    ranks = [batches((x, y), rank=rank, size=3) for rank in range(3)]
    assert len({len(rank) for rank in ranks}) == 1
    seen = [batch.inputs[:, 0] for rank in ranks for batch in rank if batch.local_count]
    assert sorted(np.concatenate(seen)) == list(range(n))
    for step in zip(*ranks, strict=True):
        assert {batch.global_count for batch in step} == {sum(batch.local_count for batch in step)}


def test_trees_of_arrays_keep_their_structure():
    x = {"a": np.arange(6).reshape(6, 1), "b": (np.zeros((6, 2)), np.ones((6, 3)))}
    (batch, _) = batches((x, np.arange(6), np.ones(6)), shuffle=False)
    assert set(batch.inputs) == {"a", "b"}
    assert batch.inputs["b"][1].shape == (4, 3)
    assert batch.sample_weight.shape == (4,)


def test_a_map_style_dataset_is_collated():
    class Squares:
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return np.full(2, index), index**2

    (first, second) = batches(Squares(), shuffle=False)
    assert first.inputs.shape == (4, 2)
    assert second.targets.tolist() == [16]


def test_tensors_that_numpy_cannot_read_are_collated():
    torch = pytest.importorskip("torch")
    half = torch.arange(4, dtype=torch.bfloat16)
    (batch,) = batches([(each, each.float().requires_grad_()) for each in half], shuffle=False)
    assert batch.inputs.tolist() == batch.targets.tolist() == [0, 1, 2, 3]
    (batch,) = batches((half[:, None], half), shuffle=False)
    assert batch.inputs.dtype == np.float32


def test_a_rank_that_runs_out_goes_on_without_samples():
    class World(FakeWorld):
        def allreduce(self, array, op="sum", *, name="host", process_set=None):
            return array + np.array([0, 3, 1]) if self.steps_left() else array

        def steps_left(self):
            self.calls = getattr(self, "calls", 0) + 1
            return self.calls <= 3

    one_batch = [(np.zeros((2, 1)), np.zeros(2))]
    source = IteratedSource(lambda epoch, shuffle, after: iter(one_batch), ranks=DataRanks(World(0, 2)))
    counts = [(batch.local_count, batch.global_count) for batch in source.epoch(0, shuffle=False)]
    assert counts == [(2, 5), (0, 3), (0, 3)]


def test_sharded_data_is_not_shared_out_again():
    x = np.arange(5)[:, None]
    world = FakeWorld(1, 2)
    source = as_source(Sharded((x, x)), batch_size=5, world=world)
    (batch,) = source.epoch(0, shuffle=False)
    assert sorted(batch.inputs[:, 0]) == [0, 1, 2, 3, 4]


def test_arrays_of_different_lengths_are_an_error_that_shows_them():
    with pytest.raises(ValueError, match=r"'inputs': 5, 'targets': 4.*rank 0"):
        batches((np.zeros((5, 2)), np.zeros(4)))


@pytest.mark.parametrize("nothing", [(np.zeros((0, 2)), np.zeros(0)), []])
def test_no_samples_is_an_error(nothing):
    with pytest.raises(ValueError, match="no samples"):
        batches(nothing)


def test_data_of_no_known_kind_is_an_error_that_names_the_kinds():
    with pytest.raises(TypeError, match=r"DataLoader.*Received: int"):
        batches(3)


@pytest.mark.parametrize(
    ("data", "kinds"),
    [
        (([[1.0, 2.0], [3.0, 4.0]], [1.0, 2.0]), "(list, list)"),
        ((np.zeros((2, 3)), [0, 1]), "(ndarray, list)"),
    ],
)
def test_a_tuple_of_lists_is_an_error_that_says_how_to_pass_arrays(data, kinds):
    with pytest.raises(TypeError, match=r"np.asarray\(x\)") as raised:
        batches(data)
    assert f"Received: {kinds} on rank 0" in str(raised.value)


@pytest.mark.parametrize("wrap", [lambda data: data, Sharded])
def test_a_generator_is_refused_with_what_to_pass_instead(wrap):
    with pytest.raises(TypeError, match=r"IterableDataset.*hvdtrain\.Sharded.*Received: generator on rank 0"):
        as_source(wrap(row for row in np.ones((4, 2))), batch_size=2, world=SoloWorld())


def test_a_tuple_of_samples_is_a_dataset():
    (batch,) = batches(((np.zeros(2), 1), (np.ones(2), 0), (np.ones(2), 3), (np.ones(2), 4)), shuffle=False)
    assert batch.targets.tolist() == [1, 0, 3, 4]


def test_ranks_with_other_data_are_told_what_differs_and_what_to_do():
    class World(FakeWorld):
        def allgather_object(self, obj, *, name="object"):
            return [obj, {**obj, **self.other}] if name == "agreement" else [obj, obj]

    world, x = World(0, 2), np.arange(12.0).reshape(2, 6)
    world.other = {"first sample": "[0.5, 1.]; [1]", "first and last sample (crc32)": [1, 2]}
    with pytest.raises(DesyncError) as raised:
        as_source((x, np.array([1, 0])), batch_size=1, world=world)
    said = str(raised.value)
    assert "first sample is '[0., 1., 2., 3., ...]; [1]' on rank 0 but '[0.5, 1.]; [1]' on rank 1" in said
    assert "Set a seed" in said
    assert "hvdtrain.Sharded" in said


def test_unpack_takes_one_to_three_items():
    assert unpack((1,)) == (1, None, None)
    assert unpack((1, 2)) == (1, 2, None)
    assert unpack({"a": 1}) == ({"a": 1}, None, None)


def test_collate_keeps_dicts():
    assert collate([{"a": 1}, {"a": 2}])["a"].tolist() == [1, 2]


def objects(*values):
    array = np.empty(len(values), object)
    array[:] = values
    return array


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (objects(np.zeros(3), np.zeros(5)), r"ndarray of shapes \(3,\), \(5,\), on rank 1.*np\.stack.*Pad them"),
        (objects([1, 2], [3]), r"of list, on rank 1.*Pad them"),
        (np.array([[1, 2.5]], object), r'of int, on rank 1\. Convert it: array\.astype\("float32"\)'),
    ],
)
def test_an_array_of_objects_is_refused_with_a_way_out(array, said):
    with pytest.raises(TypeError, match=said):
        batches((array, np.zeros(len(array))), rank=1, size=2)


def test_ranks_agree_on_an_array_of_texts_by_its_contents():
    facts = []
    for last in ("b", "".join(["b", ""]), "c"):
        texts = np.array(["a" * 2, last * 3], object)
        facts.append(as_source((texts,), batch_size=1, world=SoloWorld()).facts)
    assert facts[0] == facts[1] != facts[2]


@pytest.mark.parametrize("data", [[], (np.zeros((0, 2)), np.zeros(0)), Sharded([])])
def test_empty_data_are_called_by_their_name(data):
    with pytest.raises(ValueError, match=r"validation data holds no samples\. Received: .* on rank 1"):
        as_source(data, batch_size=1, world=FakeWorld(1, 2), what="validation data")
