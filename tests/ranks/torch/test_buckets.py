"""After the first step small gradients travel together, and nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch

from hvdtrain.distributed.buckets import ON_GPU

pytestmark = pytest.mark.world_size(2, 3)


class Many(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(4))
        self.large = torch.nn.Linear(3, 50_000)

    def forward(self, x, skip=None):
        for index, layer in enumerate(self.layers):
            x = x if index == skip else torch.relu(layer(x)) + x
        return self.large(x)


@pytest.fixture
def sent(hvd, monkeypatch):
    """The names under which gradients are sent."""
    from hvdtrain.torch.ops import engine

    native, names = engine.native(), []
    send = native.allreduce_async_
    monkeypatch.setattr(
        native, "allreduce_async_", lambda t, name=None, **options: names.append(name) or send(t, name=name, **options)
    )
    return names


@pytest.fixture(params=["as on a host", "as on a GPU"])
def sizes(request, monkeypatch):
    """Run the test also with the buckets that gradients on a GPU have, which carry no flags."""
    if request.param == "as on a GPU":
        from hvdtrain.torch.ops import pack
        from hvdtrain.torch.reduction import bucket

        monkeypatch.setattr(pack, "limits", lambda _: ON_GPU)
        monkeypatch.setattr(bucket, "can_carry_flags", lambda *_: False)


def wrap(hvd, model, **options):
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(plain, model.named_parameters(), **options)


def step(optimizer, model, rank, *, skip=None, seed=0):
    optimizer.zero_grad()
    torch.manual_seed(100 * seed + rank)
    model(torch.randn(2, 3).to(model.large.weight.dtype), skip).square().mean().backward()
    optimizer.synchronize()
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with optimizer.skip_synchronize():
        optimizer.step()
    return grads


def test_small_gradients_travel_as_one_from_the_second_step_on(hvd, rank, sent, assert_same_on_all_ranks):
    model = Many()
    optimizer = wrap(hvd, model)
    step(optimizer, model, rank)
    assert len(sent) == 10 + 1  # each parameter, and which gradients there are
    sent.clear()
    step(optimizer, model, rank)
    # What backward makes last waits for what ranks have to tell each other; 200 kB that were ready before do not.
    assert sorted(sent) == ["large.bias.bucket", "large.weight", "layers.3.bias.bucket"]
    assert_same_on_all_ranks(*model.parameters())


@pytest.mark.usefixtures("sizes")
def test_after_an_elastic_reset_old_ranks_list_gradients_as_new_ones_do(
    hvd, rank, monkeypatch, assert_same_on_all_ranks
):
    from hvdtrain.torch.ops import engine

    model = Many()
    optimizer = wrap(hvd, model)
    step(optimizer, model, rank)
    engine.start_over()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # a new rank makes its optimizer alone
    if rank != 0:
        optimizer = wrap(hvd, model)
    for _ in range(2):  # a layer that rank 0 alone leaves out: its zeros must meet that layer's gradients
        grads = step(optimizer, model, rank, skip=1 if rank == 0 else None)
        assert_same_on_all_ranks(*grads)
        assert grads[2].abs().sum() > 0


def test_small_gradients_travel_as_one_as_float16_too(hvd, rank, sent, assert_same_on_all_ranks):
    model = Many()
    optimizer = wrap(hvd, model, compression=hvd.Compression.fp16)
    step(optimizer, model, rank)
    sent.clear()
    step(optimizer, model, rank)
    # Which gradients there are is counted, and float16 does not count far.
    assert sorted(sent) == ["gradients.present", "large.bias.bucket", "large.weight", "layers.3.bias.bucket"]
    assert_same_on_all_ranks(*model.parameters())


def test_small_bfloat16_gradients_travel_as_one_of_float32(hvd, rank, sent, assert_same_on_all_ranks):
    model = Many().bfloat16()
    optimizer = wrap(hvd, model)
    step(optimizer, model, rank)
    sent.clear()
    step(optimizer, model, rank)
    assert sent == ["large.bias.bucket"]
    assert_same_on_all_ranks(*model.parameters())


@pytest.mark.parametrize("sizes", ["as on a host", "as on a GPU"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("skip", [None, 1])
def test_buckets_give_the_gradients_that_single_tensors_give(hvd, rank, size, sizes, skip, compression, dtype):
    packed, single = Many().to(dtype), Many().to(dtype)
    how = {"compression": getattr(hvd.Compression, compression)}
    with_buckets, without = wrap(hvd, packed, **how), wrap(hvd, single, groups=[[single.large.weight]], **how)
    for seed in range(3):
        left_out = skip if seed == 1 else None  # a layer of the bucket without gradients, on every rank
        ours = step(with_buckets, packed, rank, skip=left_out, seed=seed)
        theirs = step(without, single, rank, skip=left_out, seed=seed)
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None) == (b is None)
            if a is not None and size == 2:
                assert torch.equal(a, b)
            elif a is not None:  # on more than two ranks MPI adds up in an order that depends on the tensor
                is_exact = compression == "none" and dtype is torch.float32
                near = {"rtol": 1e-6, "atol": 1e-7} if is_exact else {"rtol": 1e-2, "atol": 1e-4}
                torch.testing.assert_close(a, b, **near)


@pytest.mark.usefixtures("sizes")
def test_a_gradient_missing_on_one_rank_counts_as_zeros_in_a_bucket_too(hvd, rank, size):
    model = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(3))
    optimizer = wrap(hvd, model)

    def gradients(used):
        optimizer.zero_grad()
        sum(model[i](torch.ones(1, 1)).sum() for i in used).backward()
        optimizer.synchronize()
        return [None if layer.weight.grad is None else layer.weight.grad.item() for layer in model]

    assert gradients([0, 1, 2]) == pytest.approx([1.0, 1.0, 1.0])
    assert gradients([0, 1] if rank == 0 else [0]) == pytest.approx([1.0, 1 / size, None])
    first = [layer.weight.grad for layer in model]
    assert gradients([0, 1, 2]) == pytest.approx([1.0, 1.0, 1.0])
    # What was handed out for a missing gradient is not written over by the next step.
    assert first[1].item() == pytest.approx(1 / size)


@pytest.mark.usefixtures("sizes")
def test_a_gradient_that_becomes_sparse_in_a_bucket_is_reduced(hvd, rank, size):
    torch.manual_seed(0)
    table, other = torch.nn.Embedding(5, 2), torch.nn.Linear(2, 1)
    model = torch.nn.ModuleList([table, other])
    optimizer = wrap(hvd, model)
    for sparse in (False, True):
        table.sparse = sparse
        optimizer.zero_grad()
        other(table(torch.tensor([rank]))).sum().backward()
        optimizer.synchronize()
        grad = table.weight.grad.to_dense() if table.weight.grad.is_sparse else table.weight.grad
        expected = torch.zeros(5, 2)
        expected[:size] = other.weight.detach() / size
        torch.testing.assert_close(grad, expected)


@pytest.mark.usefixtures("sizes")
def test_gradients_with_a_history_are_reduced_in_a_bucket(hvd, rank, size):
    model = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(2))
    optimizer = wrap(hvd, model)
    for _ in range(3):
        for layer in model:  # as after a backward with create_graph=True
            layer.weight.grad = layer.weight * 0 + rank
        optimizer.synchronize()
        for layer in model:
            assert layer.weight.grad.item() == pytest.approx((size - 1) / 2)


@pytest.mark.usefixtures("sizes")
def test_parameters_added_later_are_reduced_beside_the_buckets(hvd, rank, size):
    model, late = Many(), torch.nn.Linear(1, 1, bias=False)
    optimizer = wrap(hvd, model)
    step(optimizer, model, rank)
    optimizer.add_param_group({"params": list(late.parameters())})
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.ones(1, 3)).sum() + late(torch.full((1, 1), float(rank))).sum()).backward()
        optimizer.step()
        torch.testing.assert_close(late.weight.grad, torch.full((1, 1), (size - 1) / 2))


@pytest.mark.usefixtures("sizes")
def test_gradients_dropped_before_their_step_are_an_error_with_buckets_too(hvd, rank):
    model = torch.nn.Linear(3, 3)
    optimizer = wrap(hvd, model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        optimizer.step()


@pytest.mark.usefixtures("sizes")
def test_weights_of_ranks_correct_a_mean_that_travelled_as_float16_in_its_own_type(hvd, rank, size):
    def gradients(**options):
        params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        named = [(f"p{i}", p) for i, p in enumerate(params)]
        options["compression"] = hvd.Compression.fp16
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), named, **options)
        for _ in range(2):
            optimizer.zero_grad()
            sum(p.sum() * (rank + 1.0) / 3 for p in params).backward()
            optimizer.synchronize(weight=3.0 + rank, expected=5.3 * size)
        return [p.grad for p in params]

    for ours, theirs in zip(gradients(), gradients(groups=1), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6 if size == 2 else 1e-3, atol=0)
        assert not torch.equal(ours, ours.half().float())


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("ignored", [0, 3])
def test_weights_of_ranks_correct_a_mean_that_was_scaled_for_another_sum(hvd, rank, size, ignored):
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("p", param)])
    held = 4.0 + rank
    kept = held - ignored if rank == 0 else held
    expected = sum(4.0 + r for r in range(size))
    # The mean loss over what this rank kept, scaled as if nothing had been ignored anywhere.
    (param.sum() * (rank + 1.0) * kept * size / expected).backward()
    total = optimizer.synchronize(weight=kept, expected=expected)
    assert total == pytest.approx(expected - ignored)
    right = sum((r + 1.0) * (4.0 + r - (ignored if r == 0 else 0)) for r in range(size)) / (expected - ignored)
    torch.testing.assert_close(param.grad, torch.full((2,), right))


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("kind", ["bf16", "groups", "none"])
def test_after_a_reset_units_are_listed_as_on_a_new_rank(hvd, kind, monkeypatch):
    from hvdtrain.torch.ops import engine

    monkeypatch.setattr(hvd.Compression.bf16, "bucket_bytes", 64)  # several buckets under bf16
    model = Many()
    options = {
        "bf16": {"compression": hvd.Compression.bf16},
        "groups": {"groups": [[model.large.weight], [model.layers[3].weight, model.layers[0].bias]]},
        "none": {},
    }[kind]

    def listed(optimizer):
        return [unit.names for unit in optimizer._hvd_reducer._units]

    optimizer = wrap(hvd, model, **options)
    new = listed(optimizer)
    for seed in range(2):
        step(optimizer, model, hvd.rank(), seed=seed)
    assert (listed(optimizer) == new) is (kind == "groups")
    engine.start_over()
    step(optimizer, model, hvd.rank())
    engine.start_over()
    assert not optimizer._hvd_reducer.is_in_flight
    assert listed(optimizer) == new


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_moved_to_float64_has_gradients_of_float64(hvd, rank, dtype):
    model = Many().to(dtype)
    optimizer = wrap(hvd, model)
    step(optimizer, model, rank)
    step(optimizer, model, rank)  # in buckets
    model.double()
    optimizer.state.clear()
    alone = copy.deepcopy(model)
    torch.manual_seed(100 + rank)
    alone(torch.randn(2, 3).double()).square().mean().backward()
    expected = [hvd.allreduce(each.grad) for each in alone.parameters()]
    for grad, mean in zip(step(optimizer, model, rank, seed=1), expected, strict=True):
        assert grad.dtype is torch.float64
        torch.testing.assert_close(grad, mean, rtol=1e-12, atol=1e-15)


@pytest.mark.usefixtures("sizes")
def test_a_parameter_that_changed_its_shape_is_named(hvd, rank):
    from hvdtrain.errors import HvdTrainError

    model = torch.nn.Linear(3, 3)
    optimizer = wrap(hvd, model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.weight.data = torch.zeros(4, 3)
    model.bias.data = torch.zeros(4)

    def take_step():
        model(torch.ones(1, 3)).sum().backward()  # where a bucket is sent that carries no flags
        optimizer.step()

    with pytest.raises(HvdTrainError, match=r"bias changed its shape.*\(4,\), was \(3,\)"):
        take_step()


@pytest.mark.parametrize(
    ("kilobytes", "expected"),
    [
        ([10, 10, 10, 1000], [[10, 10, 10]]),
        ([100, 200, 1, 300], [[1, 200], [100]]),
        ([1, 1, 200, 400], [[200], [1, 1]]),
        ([100, 1000], []),
    ],
)
def test_little_is_left_for_the_last_bucket(kilobytes, expected):
    from hvdtrain.torch.ops import pack

    params = [torch.nn.Parameter(torch.zeros(250 * kb)) for kb in kilobytes]
    assert [[p.nbytes // 1000 for p in members] for members in pack.buckets(params)] == expected


@pytest.mark.parametrize("kilobytes", [[300, 100, 1], [1, 1, 1], [100, 400]])
def test_gradients_of_a_tiny_model_travel_as_one(kilobytes):
    from hvdtrain.torch.ops import pack

    params = [torch.nn.Parameter(torch.zeros(250 * kb)) for kb in kilobytes]
    assert [[p.nbytes // 1000 for p in members] for members in pack.buckets(params)] == [kilobytes[::-1]]


@pytest.fixture
def waited(hvd, sent, monkeypatch):
    """The names of gradients in the order in which a rank waits for them, each once."""
    from horovod.torch import mpi_ops

    from hvdtrain.torch.ops import engine

    native, names, order = engine.native(), {}, []
    send, synchronize = native.allreduce_async_, native.synchronize

    def noting(tensor, name=None, **options):
        handle = send(tensor, name=name, **options)
        names[handle] = name
        return handle

    def waiting(handle):
        if handle in mpi_ops._handle_map and handle in names:  # else it was waited for already
            order.append(names[handle])
        return synchronize(handle)

    monkeypatch.setattr(native, "allreduce_async_", noting)
    monkeypatch.setattr(native, "synchronize", waiting)
    return order


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_a_rank_waits_for_gradients_in_the_order_in_which_it_has_sent_them(hvd, rank, sent, waited, compression):
    """The first to be sent is the first to arrive: it is put in its place while others are still in flight."""
    model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(4)], torch.nn.Linear(300, 2))
    optimizer = wrap(hvd, model, compression=getattr(hvd.Compression, compression))
    for number in range(3):
        sent.clear()
        waited.clear()
        optimizer.zero_grad()
        layers = model if number < 2 or rank else model[1:]  # in the last step rank 0 lacks two gradients
        layers(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        flags = "4.bias.bucket" if number and compression == "none" else "gradients.present"
        assert waited == [flags, *(name for name in sent if name != flags)]
        assert len(waited) >= 5
