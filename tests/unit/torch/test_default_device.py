"""Helpers of one process under another default type or device of torch's; the rank tests have the rest."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from hvdtrain.torch.data.draws import drawing, sampling
from hvdtrain.torch.ops import dtypes, solo
from hvdtrain.torch.reduction.tensors import Whole
from hvdtrain.torch.steps import clipping


@pytest.fixture(params=["meta", torch.float16], ids=str)
def other_default(request):
    if request.param == "meta":
        with torch.device("meta"):
            yield
        return
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


class Own(torch.utils.data.Sampler):
    """A sampler of a user's own."""


@pytest.mark.usefixtures("other_default")
def test_one_process_scales_integers_exactly():
    whole = torch.tensor([100001, -7], dtype=torch.int64, device="cpu")
    solo.allreduce_async_(whole, prescale_factor=3.0)()
    assert whole.tolist() == [300003, -21]
    _, rows = solo.alltoall_async(torch.zeros(3, device="cpu"), splits=[3])()
    assert rows.tolist() == [3]


@pytest.mark.usefixtures("other_default")
def test_the_norm_of_no_gradients_is_a_number_beside_the_weights():
    seen = []

    class Noting(Whole):
        def norm(self, norm):
            seen.append(norm)
            return norm

    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float32, device="cpu"))
    clipping.clip_norm([weight], 1.0, Noting())
    assert [(float(norm), norm.dtype, norm.device.type) for norm in seen] == [(0.0, torch.float32, "cpu")]


@pytest.mark.usefixtures("other_default")
def test_numbers_of_python_are_taken_exactly():
    assert dtypes.as_numbers(70000.123).tolist() == 70000.123
    held = torch.zeros(2, dtype=torch.int64, device="cpu")
    assert dtypes.as_numbers(held) is held
    assert dtypes.kind_on_host(held).shape == (2,)


def test_a_sampler_draws_where_its_generator_is():
    data = range(4)
    there = torch.Generator(device="cpu")
    with torch.device("meta"):
        for sampler in (RandomSampler(data), BatchSampler(RandomSampler(data, generator=there), 2, drop_last=False)):
            with sampling(sampler):
                assert torch.get_default_device().type == "cpu"
                assert sorted(torch.utils.data.SubsetRandomSampler(data)) == [0, 1, 2, 3]
        for sampler in (Own(), BatchSampler(Own(), 2, drop_last=False)):
            with sampling(sampler):
                assert torch.get_default_device().type == "meta"
        with drawing(SequentialSampler(data)):
            assert torch.get_default_device().type == "cpu"
    with drawing(RandomSampler(data)) as entered:  # the default device is the host: torch's functions stay as fast
        assert entered is None
