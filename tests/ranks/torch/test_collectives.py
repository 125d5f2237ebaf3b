"""Collectives take every type and layout, and are differentiable as Horovod's are."""

from __future__ import annotations

import time

import pytest
import torch

pytestmark = [pytest.mark.world_size(2, 3), pytest.mark.over_gloo]
EVERY_TYPE = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", EVERY_TYPE, ids=str)
def test_allreduce_takes_every_number(hvd, rank, size, dtype):
    tensor = torch.full((2, 3), rank + 1).to(dtype)
    total = size * (size + 1) // 2
    summed = hvd.allreduce(tensor, op=hvd.Sum)
    assert summed.dtype == dtype
    assert torch.equal(summed, torch.full((2, 3), total).to(dtype))
    mean = hvd.allreduce(tensor)
    expected = total / size if dtype.is_floating_point else total // size
    torch.testing.assert_close(mean, torch.full((2, 3), expected).to(dtype))
    assert torch.equal(tensor, torch.full((2, 3), rank + 1).to(dtype))
    in_place = tensor.t()  # not contiguous
    assert hvd.allreduce_(in_place, op=hvd.Max) is in_place
    assert torch.equal(tensor, torch.full((2, 3), size).to(dtype))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_allreduce_of_complex_numbers_is_that_of_their_parts(hvd, rank, size, dtype):
    tensor = torch.tensor([[rank + 2j, 1j * rank]]).to(dtype)
    total = size * (size - 1) / 2
    assert hvd.allreduce(tensor, op=hvd.Sum).tolist() == [[total + 2j * size, total * 1j]]
    assert hvd.allreduce(tensor.conj(), compression=hvd.Compression.bf16).tolist() == [
        [total / size - 2j, -total / size * 1j]
    ]
    assert tensor.tolist() == [[rank + 2j, 1j * rank]]
    turned = tensor.t()
    assert hvd.allreduce_(turned, op=hvd.Sum) is turned
    assert tensor.tolist() == [[total + 2j * size, total * 1j]]
    with pytest.raises(TypeError, match="averaged and added up only"):
        hvd.allreduce(tensor, op=hvd.Max)


OTHER_TYPES = [torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint64, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", [*EVERY_TYPE, *OTHER_TYPES], ids=str)
def test_moving_takes_every_type_bit_for_bit(hvd, rank, size, dtype):
    tensor = torch.full((rank + 1, 2), rank).to(dtype)
    gathered = hvd.allgather(tensor)
    assert torch.equal(gathered, torch.cat([torch.full((r + 1, 2), r).to(dtype) for r in range(size)]))
    assert torch.equal(hvd.broadcast(torch.full((2,), rank).to(dtype), 1), torch.full((2,), 1).to(dtype))
    scalar = torch.tensor(rank).to(dtype)
    assert hvd.broadcast_(scalar, 1) is scalar
    assert scalar == torch.tensor(1).to(dtype)
    received, rows = hvd.alltoall(torch.full((size, 1), rank).to(dtype), splits=torch.ones(size, dtype=torch.int64))
    assert torch.equal(received, torch.arange(size).view(-1, 1).to(dtype))
    assert rows.tolist() == [1] * size


def test_bits_that_are_not_numbers_arrive_as_they_were(hvd, rank):
    bits = torch.tensor([0x7FC1, 0xFF81, 1, 0x8000], dtype=torch.int32).to(torch.uint16).view(torch.int16)
    sent = (bits if rank == 0 else torch.zeros_like(bits)).view(torch.bfloat16)
    assert torch.equal(hvd.broadcast(sent, 0).view(torch.int16), bits)


@pytest.mark.on_gpus
def test_every_form_of_allreduce_agrees(hvd, rank, size):
    def tensors():
        return [torch.full((3,), float(rank)), torch.full((2, 2), 2.0 * rank, dtype=torch.bfloat16)]

    expected = [torch.full((3,), (size - 1) / 2), torch.full((2, 2), float(size - 1), dtype=torch.bfloat16)]
    forms = [
        [hvd.allreduce(t) for t in tensors()],
        [hvd.allreduce_(t) for t in tensors()],
        [hvd.synchronize(hvd.allreduce_async(t)) for t in tensors()],
        [hvd.synchronize(hvd.allreduce_async_(t)) for t in tensors()],
        hvd.grouped_allreduce(tensors()),
        hvd.grouped_allreduce_(tensors()),
        hvd.synchronize(hvd.grouped_allreduce_async(tensors())),
        hvd.synchronize(hvd.grouped_allreduce_async_(tensors())),
        [hvd.allreduce(t, compression=hvd.Compression.fp16) for t in tensors()],
        [hvd.allreduce(t, compression=hvd.Compression.bf16) for t in tensors()],
        hvd.grouped_allreduce(tensors(), compression=hvd.Compression.bf16),
        [hvd.allreduce(t, prescale_factor=0.5, postscale_factor=2.0) for t in tensors()],
    ]
    for form in forms:
        for got, want in zip(form, expected, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.on_gpus
def test_poll_and_handles(hvd, rank):
    handle = hvd.allreduce_async(torch.ones(2))
    while not hvd.poll(handle):
        pass
    assert torch.equal(hvd.synchronize(handle), torch.ones(2))
    assert torch.equal(hvd.synchronize(handle), torch.ones(2))


def test_reducescatter_scales_before_it_reduces(hvd, rank, size):
    tensor = torch.ones(size * 40_000, 2) * (rank + 1)  # more than a fusion buffer of Horovod's holds
    mine = hvd.reducescatter(tensor, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    torch.testing.assert_close(mine, torch.full((40_000, 2), 2.0 * sum(range(1, size + 1))))
    large = torch.full((size,), 2**40 + 1)  # exact in float64 alone
    assert hvd.reducescatter(large, op=hvd.Sum, prescale_factor=2.0).tolist() == [(2**41 + 2) * size]


@pytest.mark.on_gpus
def test_reducescatter_and_grouped_gathers(hvd, rank, size):
    tensor = torch.arange(float(size * 2)) * (rank + 1)
    mine = hvd.reducescatter(tensor, op=hvd.Sum)
    total = size * (size + 1) / 2
    torch.testing.assert_close(mine, torch.arange(float(size * 2))[2 * rank : 2 * rank + 2] * total)
    a, b = hvd.grouped_reducescatter([tensor, tensor.to(torch.bfloat16)])
    torch.testing.assert_close(a, mine / size)
    assert b.dtype == torch.bfloat16
    c, d = hvd.grouped_allgather([torch.ones(1) * rank, torch.ones(1, dtype=torch.bool)])
    assert c.tolist() == list(range(size))
    assert d.dtype == torch.bool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:Parameter `average`:DeprecationWarning")  # Horovod's own backward
def test_gradients_are_horovods(hvd, rank, size, dtype):
    import horovod.torch as horovod

    def gradients(module, cast):
        results = []
        calls = [
            lambda m, x: m.allreduce(x, op=m.Average, name=f"d1{cast}"),
            lambda m, x: m.allreduce(x, op=m.Sum, name=f"d2{cast}"),
            lambda m, x: m.grouped_allreduce([x, x * 2], name=f"d3{cast}")[1],
            lambda m, x: m.allgather(x, name=f"d4{cast}"),
            lambda m, x: m.broadcast(x, 1, name=f"d5{cast}"),
            lambda m, x: m.alltoall(
                x, splits=torch.tensor([size - 1] + [1] * (size - 1), dtype=torch.int32), name=f"d6{cast}"
            )[0],
            lambda m, x: m.reducescatter(x, op=m.Sum, name=f"d7{cast}"),
        ]
        for call in calls:
            x = (torch.arange(2.0 * (size - 1)) + rank).to(cast).requires_grad_()
            out = call(module, x)
            (out * (torch.arange(out.numel(), dtype=cast) + 1)).sum().backward()
            results.append(x.grad)
        return results

    horovods = gradients(horovod, torch.float32)
    for got, want in zip(gradients(hvd, dtype), horovods, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)


def test_bf16_compression_sends_half_the_bytes_and_adds_up_in_float32(hvd, rank, size, native_calls):
    numel = 1200 * size
    # 256 + 1 is 256 in bfloat16: adding up in it would lose all the ones but one rank's
    tensor = torch.full((numel,), 256.0 if rank == 0 else 1.0)
    got = hvd.allreduce(tensor, op=hvd.Sum, compression=hvd.Compression.bf16)
    assert torch.equal(got, torch.full((numel,), 256.0 + size - 1).to(torch.bfloat16).float())
    # each rank sends its bits once, all but its own shard, and then one shard to the others
    assert native_calls.bytes_sent["alltoall"] == 2 * numel
    assert native_calls.bytes_sent["allgather"] == 2 * numel // size
    assert native_calls.bytes_sent["allreduce"] == 4  # the count of active ranks


@pytest.mark.on_gpus
def test_operations_in_flight_have_their_names(hvd):
    """The watchdog reads them, to say in which operation a rank waits."""
    one = torch.ones(hvd.size())
    handles = [
        hvd.allreduce_async_(one.clone(), name="a"),
        hvd.grouped_allreduce_async([one, one], name="b"),
        hvd.allgather_async(one, name="c"),
        hvd.broadcast_async_(one.clone(), 0, name="d"),
        hvd.alltoall_async(one, name="e"),
        hvd.reducescatter_async(one, name="f"),
        hvd.sparse_allreduce_async(one.to_sparse(), "g", hvd.Sum),
    ]
    names = [handle.name for handle in handles]
    for handle in handles:
        hvd.synchronize(handle)
    assert names == list("abcdefg")


@pytest.mark.on_gpus
def test_objects_travel(hvd, rank, size):
    thing = {"rank": rank, "nested": [None, (1, "two"), torch.ones(2) * rank]}
    assert hvd.broadcast_object(thing, 1)["nested"][2].tolist() == [1, 1]
    assert [t["rank"] for t in hvd.allgather_object(thing)] == list(range(size))
    assert hvd.broadcast_object(1 if rank == 0 else "another type", 0) == 1


def test_unnamed_operations_of_a_process_set_do_not_upset_the_others(hvd, rank, size):
    process_set = hvd.add_process_set([1])
    try:
        if process_set.included():
            for _ in range(3):
                assert float(hvd.allreduce(torch.ones(1), process_set=process_set)) == 1
        assert float(hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum)) == size * (size - 1) / 2
    finally:
        hvd.remove_process_set(process_set)


def test_barriers_and_process_sets_take_turns_at_any_pace(hvd, rank):
    """A rank that added its set late found it there; the others' barrier stayed behind, and their next one failed."""
    for turn in range(60):
        hvd.barrier()
        if (turn + rank) % 3 == 0:
            time.sleep(0.0007)
        process_set = hvd.add_process_set([0])
        hvd.barrier()
        hvd.remove_process_set(process_set)
    hvd.join()


@pytest.mark.parametrize("ranks", [[], [0, 0], [0, 64], [-1]])
def test_a_process_set_of_ranks_that_do_not_exist_is_refused(hvd, size, ranks):
    with pytest.raises(ValueError, match=rf"ranks from 0 to {size - 1}, each of them once. Received: "):
        hvd.add_process_set(ranks)


def test_process_sets_that_ranks_do_not_agree_on_are_errors_and_change_nothing(hvd, rank, size):
    """Such ranks waited for ever, or ended with an exception in the background."""
    with pytest.raises(ValueError, match=rf"rank {rank}: not all ranks have called add_process_set"):
        hvd.add_process_set([rank])
    first = hvd.add_process_set([0])
    with pytest.raises(ValueError, match="not all ranks"):
        hvd.add_process_set([1]) if rank == 0 else hvd.remove_process_set(first)
    second = hvd.add_process_set([1])
    with pytest.raises(ValueError, match="not all ranks"):
        hvd.remove_process_set(first if rank == 0 else second)
    assert (first.process_set_id, second.process_set_id) == (1, 2)
    if rank < 2:
        assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=[first, second][rank])) == 1
    assert hvd.remove_process_set(second)
    assert hvd.remove_process_set(first)
    third = hvd.add_process_set([1])
    assert third.process_set_id == 1
    hvd.remove_process_set(third)


def test_collectives_work_in_inference_mode(hvd, rank, size):
    with torch.inference_mode():
        mine = torch.full((size,), float(rank), device="cpu")
        ranks = [float(each) for each in range(size)]
        assert hvd.allgather(mine[:1]).tolist() == ranks
        assert hvd.allgather_object(rank) == ranks
        assert hvd.alltoall(mine).tolist() == ranks
        assert hvd.reducescatter(mine, op=hvd.Sum).tolist() == [sum(ranks)]
        assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [sum(ranks)] * size
        assert hvd.broadcast(mine, 1).tolist() == [1.0] * size
