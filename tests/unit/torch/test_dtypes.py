"""Buffers and parameters of every type that torch has: saved and restored, made equal on ranks, or refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from thread_ranks import on_ranks
from torch import nn

import hvdtrain
from hvdtrain.callbacks.sync_check import digests
from hvdtrain.checkpoint import files
from hvdtrain.distributed import rank_state
from hvdtrain.distributed.world import SoloWorld
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.averaging import AveragedWeights
from hvdtrain.torch.ops import dtypes
from hvdtrain.torch.ops.average_buffers import average_buffers
from hvdtrain.torch.steps import training_state
from hvdtrain.torch.steps.attempt import Attempt
from hvdtrain.torch.steps.metrics import Totals

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

ALL = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
NOT_NUMBERS = ["bits16", "qint8", "qint32", "quint8", "quint4x2", "quint2x4"]  # or torch itself cannot copy them
NOT_NUMBERS += [f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)]
REFUSED = [each for each in ALL if str(each).removeprefix("torch.") in NOT_NUMBERS]
HELD = [each for each in ALL if each not in REFUSED]
BYTES = [each for each in HELD if "bits" in str(each) or "float4" in str(each)]


def values(dtype):
    """Return eight values with awkward bits: signs of zero, the largest integers, infinity."""
    if dtype is torch.bool:
        return torch.arange(8) % 3 == 0
    if dtype.is_complex:
        parts = torch.tensor([[0.6, 0.8], [-0.0, 3e-4], [1 / 3, -1 / 3], [float("-inf"), 0.0]]).repeat(2, 1)
        return torch.view_as_complex(parts.double()).to(dtype)
    if dtype.is_floating_point and dtype not in BYTES:
        return torch.tensor([0.0, -0.0, 1 / 3, -1 / 3, 0.1, 448.0, 2.0**-9, float("-inf")]).to(dtype)
    return torch.arange(255, 255 - 8 * dtype.itemsize, -1, dtype=torch.uint8).view(dtype)


def bits(tensor):
    return tensor.detach().resolve_conj().contiguous().view(torch.uint8).tolist()


class Holder(nn.Module):
    def __init__(self, dtype, *, empty=False):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        held = values(dtype)
        self.register_buffer("each", torch.zeros_like(held.view(torch.uint8)).view(dtype) if empty else held)


@pytest.mark.parametrize("dtype", HELD, ids=str)
def test_a_buffer_of_every_type_is_saved_and_restored_bit_for_bit(dtype, tmp_path):
    model, other = Holder(dtype), Holder(dtype, empty=True)
    dtypes.check(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", enabled=False)
    state = training_state.capture(model, {"": optimizer})
    files.write(tmp_path / "a", files.Contents({"model": state.arrays}, {}))
    state.arrays = files.read(tmp_path / "a").arrays["model"]
    training_state.restore(state, other, {"": (torch.optim.SGD(other.parameters(), lr=0.1), optimizer[1])})
    assert bits(other.each) == bits(model.each)
    states = [training_state.capture(each, {}) for each in (model, other)]
    assert digests(states[0], settled=True) == digests(states[1], settled=True)
    world, again = SoloWorld(), Holder(dtype, empty=True)
    held = rank_state.gather(training_state.rank_state(model), world=world)
    training_state.set_rank_state(rank_state.scatter(held, world=world), again)
    assert bits(again.each) == bits(model.each)
    attempt = Attempt(again, Totals({}, torch.device("cpu"), world, ["loss"]))
    attempt.begin()
    dtypes.copy_array(again.each, dtypes.to_array(Holder(dtype, empty=True).each))
    attempt.undo()
    assert bits(again.each) == bits(model.each)


@pytest.mark.parametrize("dtype", REFUSED, ids=str)
def test_a_buffer_that_no_checkpoint_can_hold_is_refused_by_name(dtype):
    model = nn.Linear(1, 1)
    model.register_buffer("codes", torch.zeros(8, dtype=torch.uint8).view(dtype))
    with pytest.raises(ValueError, match=rf"Received: codes of type {dtype}\."):
        dtypes.check(model)


def test_a_sparse_buffer_is_refused_by_name():
    model = nn.Linear(1, 1)
    model.register_buffer("graph", torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match=r"must be dense\. Received: graph of layout torch\.sparse_coo"):
        dtypes.check(model)


@pytest.mark.parametrize("dtype", HELD, ids=str)
def test_what_is_equal_on_all_ranks_settles_to_itself_bit_for_bit(dtype):
    def on_rank(world):
        buffers = [
            ("each", values(dtype)),
            ("conj", values(dtype).conj()),
            ("other", torch.tensor([float(world.rank)])),
        ]
        average_buffers(buffers, world)
        return [bits(each) for _, each in buffers]

    found = on_ranks(3, on_rank)
    assert found == [[bits(values(dtype)), bits(values(dtype).conj()), bits(torch.ones(1))]] * 3


@pytest.mark.parametrize("dtype", [each for each in HELD if each not in BYTES], ids=str)
def test_buffers_of_ranks_settle_to_means_largest_integers_or_any(dtype):
    top = torch.iinfo(dtype).max - 2 if not (dtype.is_complex or dtype.is_floating_point or dtype == torch.bool) else 0
    mine = [torch.tensor([rank + top], dtype=torch.uint64 if top else torch.float64).to(dtype) for rank in range(3)]
    if dtype.is_complex:
        mine = [torch.tensor([2 * rank + 1j * rank]).to(dtype) for rank in range(3)]
    if dtype is torch.float8_e8m0fnu:  # powers of two only
        mine = [torch.tensor([each]).to(dtype) for each in (1.0, 1.0, 4.0)]
    on_ranks(3, lambda world: average_buffers([("each", mine[world.rank])], world))
    expected = {torch.complex32: 2 + 1j, torch.complex64: 2 + 1j, torch.complex128: 2 + 1j, torch.bool: True}
    wanted = expected.get(dtype, 2.0 if dtype is torch.float8_e8m0fnu else 1.0 if dtype.is_floating_point else top + 2)
    assert [each.tolist() for each in mine] == [[wanted]] * 3


@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_bytes_that_differ_on_ranks_are_an_error_on_every_rank(dtype):
    def on_rank(world):
        with pytest.raises(HvdTrainError, match=rf"the buffer codes.*Received: {dtype} on rank {world.rank}"):
            average_buffers([("codes", torch.full((2,), world.rank, dtype=torch.uint8).view(dtype))], world)

    on_ranks(2, on_rank)


def test_complex_statistics_of_two_ranks_resume_on_one_as_their_mean():
    parts = [{"mean.buffer.z": np.array([2 * rank + 1j * rank], np.complex64)} for rank in range(2)]
    found = rank_state.combine(parts, rank=0, size=1)["mean.buffer.z"]
    assert found.dtype == np.complex64
    assert found.tolist() == [1 + 0.5j]


def test_what_three_ranks_hold_alike_resumes_on_two_bit_for_bit():
    parts = [{"mean.buffer.z": np.array([0.1])} for _ in range(3)]  # whose mean in float64 is another number
    assert rank_state.combine(parts, rank=0, size=2)["mean.buffer.z"].tolist() == [0.1]


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_averages_of_complex_weights_are_complex(dtype):
    model = nn.Module()
    model.z = nn.Parameter(torch.tensor([2 + 4j]).to(dtype))
    averages = AveragedWeights(model)
    with torch.no_grad():
        model.z.zero_()
    averages.update(0.5)
    averages.show()
    assert model.z.tolist() == [1 + 2j]


@pytest.mark.parametrize(("real", "other"), [(torch.float32, torch.complex64), (torch.complex64, torch.float32)])
def test_a_checkpoint_of_complex_weights_fits_no_real_ones(real, other):
    saved, here = nn.Module(), nn.Module()
    saved.z, here.z = nn.Parameter(torch.ones(2, dtype=real)), nn.Parameter(torch.ones(2, dtype=other))
    kind = str(real).removeprefix("torch.")
    with pytest.raises(ValueError, match=f"tensor z is {kind} in the checkpoint and {other} in the model"):
        training_state.restore(training_state.capture(saved, {}), here, {})


class Wide(torch.optim.Optimizer):
    """Keeps float32 sums and bytes beside weights in half precision, as optimizers with state of their own type do."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["sum"] = torch.full(param.shape, 1 / 3) + state.get("sum", 0)
            state["code"] = torch.tensor([200], dtype=torch.uint8)


def test_optimizer_state_keeps_its_type_in_a_checkpoint():
    pairs = []
    for _ in range(2):
        model = nn.Linear(2, 1).to(torch.bfloat16)
        pairs.append((model, Wide(model.parameters())))
    (model, optimizer), (other, restored) = pairs
    optimizer.step()
    off = torch.amp.GradScaler("cpu", enabled=False)
    training_state.restore(training_state.capture(model, {"": (optimizer, off)}), other, {"": (restored, off)})
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        for name, value in optimizer.state[mine].items():
            assert restored.state[theirs][name].dtype == value.dtype
            assert torch.equal(restored.state[theirs][name], value)


@pytest.mark.usefixtures("alone")
def test_loss_scaling_of_complex_weights_is_refused_by_name():
    model = nn.Linear(1, 1, dtype=torch.complex64)
    with pytest.raises(ValueError, match="weight of type torch"):
        hvdtrain.Trainer(
            model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.MSELoss(), precision="fp16"
        )
