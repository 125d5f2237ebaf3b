"""Digests of tensors: what a GPU sums up gives the digest that the host gives."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.distributed import checksums
from hvdtrain.torch.ops import digests

WORDS = checksums.BLOCK
TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]


def numbers(size, dtype=torch.float32):
    count = size * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=torch.Generator().manual_seed(size))
    return data.to(torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("words", [0, 3, WORDS - 1, WORDS, 2 * WORDS + 700])
def test_sums_on_the_device_give_the_digest_of_the_host(words, dtype):
    tensor = numbers(8 * words // dtype.itemsize + 1, dtype)
    expected = digests.of_tensor(tensor, on_device=False)
    assert digests.of_tensor(tensor, on_device=True) == expected
    assert digests.of_tensor(tensor) == expected


@pytest.mark.parametrize("place", [0, WORDS, 2 * WORDS - 1, 4 * WORDS + 5])
def test_a_flipped_bit_changes_the_digest_from_the_device(place):
    tensor = numbers(4 * WORDS + 10)
    before = digests.of_tensor(tensor, on_device=True)
    tensor.view(torch.int32)[place] ^= 1
    assert digests.of_tensor(tensor, on_device=True) != before


def test_how_a_tensor_lies_in_memory_does_not_count():
    tensor = numbers(8 * WORDS).reshape(1024, -1)
    expected = digests.of_tensor(tensor, on_device=True)
    odd = torch.empty(tensor.numel() + 1)[1:].view_as(tensor).copy_(tensor)  # not aligned to words
    for other in (tensor.t().contiguous().t(), odd):
        assert digests.of_tensor(other, on_device=True) == digests.of_tensor(other, on_device=False) == expected


def test_type_shape_and_conjugation_count():
    one = numbers(24, torch.complex64)
    others = [one.view(torch.int64), one.reshape(4, 6), one.conj(), one[:23], one.reshape(6, 4)]
    assert len({digests.of_tensor(each) for each in [one, *others]}) == 6
    assert digests.of_tensor(one.conj()) == digests.of_tensor(one.conj().resolve_conj())
    assert digests.of_tensor(torch.zeros(())) != digests.of_tensor(torch.zeros(1))
