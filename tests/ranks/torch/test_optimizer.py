"""DistributedOptimizer keeps what is the user's, and reduces what torch's optimizers can be given."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

pytestmark = [pytest.mark.world_size(2, 3), pytest.mark.on_gpus]


def test_it_is_the_users_optimizer_with_its_state(hvd, task):
    model = task.model()
    plain = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.8, 0.9), weight_decay=0.5)
    model(torch.ones(2, 6)).sum().backward()
    plain.step()
    moment = plain.state[model[0].weight]["exp_avg"]
    distributed = hvd.DistributedOptimizer(plain, model.named_parameters())
    assert isinstance(distributed, torch.optim.AdamW)
    assert type(distributed).__name__ == "AdamW"
    assert distributed.state[model[0].weight]["exp_avg"] is moment
    assert distributed.param_groups is plain.param_groups
    assert distributed.defaults["betas"] == (0.8, 0.9)
    distributed.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert distributed.param_groups[-1]["lr"] == 3e-3
    distributed.load_state_dict(distributed.state_dict())
    assert plain.param_groups is distributed.param_groups


@pytest.mark.parametrize("through", ["the distributed", "the plain"])
def test_parameters_added_later_are_reduced(hvd, task, through, difference):
    def head_later(model, make):
        plain = torch.optim.SGD(model[0].parameters(), lr=0.1)
        optimizer = make(plain)
        task_steps = task.train if optimizer is not plain else task.train_alone
        task_steps(model, optimizer, 2)
        target = plain if through == "the plain" else optimizer
        target.add_param_group({"params": list(model[2].parameters()), "lr": 0.2})
        optimizer.zero_grad()
        model[2].zero_grad()
        task_steps(model, optimizer, 3)

    ours, alone = task.model(), task.model()
    head_later(ours, lambda plain: hvd.DistributedOptimizer(plain, ours.named_parameters()))
    head_later(alone, lambda plain: plain)
    assert difference(ours, alone) < 1e-6


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_takes_set_to_none(hvd, task, difference, to_none):
    ours, alone = task.model(), task.model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours.named_parameters())
    for batch in task.batches(3):
        optimizer.zero_grad(set_to_none=to_none)
        assert all((p.grad is None) if to_none else (p.grad is None or not p.grad.any()) for p in ours.parameters())
        task.loss(ours, task.mine(batch)).backward()
        optimizer.step()
    task.train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), 3)
    assert difference(ours, alone) < 1e-6


def test_zero_grad_refuses_while_gradients_are_in_flight(hvd, task):
    model = task.model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    task.loss(model, task.mine(task.batches(1)[0])).backward()
    with pytest.raises(AssertionError, match="before step"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def test_one_backward_too_many_is_refused(hvd, task):
    model = task.model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    batch = task.mine(task.batches(1)[0])
    task.loss(model, batch).backward()
    with pytest.raises(AssertionError, match=r"backward_passes_per_step=1"):
        task.loss(model, batch).backward()
    optimizer.step()


@pytest.mark.parametrize("average", [False, True])
def test_accumulation_sums_by_default_and_averages_by_choice(hvd, task, difference, average):
    ours, alone = task.model(), task.model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9),
        ours.named_parameters(),
        backward_passes_per_step=2,
        average_aggregated_gradients=average,
    )
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    batches = task.batches(6)
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        for model, opt, share in ((ours, optimizer, task.mine), (alone, reference, lambda batch: batch)):
            opt.zero_grad()
            for batch in (first, second):
                loss = task.loss(model, share(batch))
                (loss / 2 if average and opt is reference else loss).backward()
            opt.step()
    assert difference(ours, alone) < 1e-6


def test_passes_per_step_can_change(hvd, task, difference):
    ours, alone = task.model(), task.model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours.named_parameters())
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    batches = iter(task.batches(6))
    for passes in (1, 3, 2):
        optimizer.set_backward_passes_per_step(passes)
        assert optimizer.backward_passes_per_step == passes
        optimizer.zero_grad()
        reference.zero_grad()
        for _ in range(passes):
            batch = next(batches)
            task.loss(ours, task.mine(batch)).backward()
            task.loss(alone, batch).backward()
        optimizer.step()
        reference.step()
    assert difference(ours, alone) < 1e-6


def test_clipping_between_synchronize_and_step(hvd, task, difference):
    ours, alone = task.model(), task.model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.5), ours.named_parameters())
    reference = torch.optim.SGD(alone.parameters(), lr=0.5)
    for batch in task.batches(4):
        optimizer.zero_grad()
        task.loss(ours, task.mine(batch)).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(ours.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        reference.zero_grad()
        task.loss(alone, batch).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        reference.step()
    assert difference(ours, alone) < 1e-6


def test_step_after_synchronize_does_not_reduce_twice(hvd, task, size):
    model = task.model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), op=hvd.Sum
    )
    model(torch.ones(1, 6)).sum().backward()
    optimizer.synchronize()
    optimizer.step()
    torch.testing.assert_close(model[2].bias.grad, torch.full((3,), float(size)))


@pytest.mark.parametrize("kind", ["lbfgs", "lbfgs with line search", "sgd"])
def test_closures_follow_one_process(hvd, task, difference, assert_same_on_all_ranks, kind):
    def run(model, wrap, share):
        search = "strong_wolfe" if "search" in kind else None
        if kind == "sgd":
            optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
        else:
            optimizer = wrap(torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=search), model)
        losses = []
        for batch in task.batches(3):

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = task.loss(model, share(batch))
                loss.backward()
                return loss

            losses.append(float(optimizer.step(closure).detach()))
        return losses

    ours, alone = task.model(), task.model()
    got = run(ours, lambda o, m: hvd.DistributedOptimizer(o, m.named_parameters()), task.mine)
    expected = run(alone, lambda o, _: o, lambda batch: batch)
    assert got == pytest.approx(expected, abs=1e-4)
    assert difference(ours, alone) < 1e-3
    assert_same_on_all_ranks(*ours.parameters(), torch.tensor(got))


@pytest.mark.parametrize("explicit", [True, False])
def test_grad_scaler_skips_on_all_ranks_where_one_overflows(
    hvd, task, rank, assert_same_on_all_ranks, explicit, difference
):
    model = task.model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=2.0**10)
    alone = task.model()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step, batch in enumerate(task.batches(4)):
        optimizer.zero_grad()
        loss = task.loss(model, task.mine(batch))
        if step == 1 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if explicit:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        if step != 1:
            reference.zero_grad()
            task.loss(alone, batch).backward()
            reference.step()
    assert scaler.get_scale() == 2.0**9
    assert difference(model, alone) < 1e-6
    assert_same_on_all_ranks(*model.parameters())


def test_schedulers_made_before_and_after_work_without_a_warning(hvd, task):
    for before in (True, False):
        model = task.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if before:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        if not before:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer.load_state_dict(optimizer.state_dict())  # replaces the groups; the scheduler must follow
        task.train(model, optimizer, 1)
        scheduler.step()  # a warning would fail this test
        assert optimizer.param_groups[0]["lr"] == 0.5


def test_step_hooks_run_once_and_see_reduced_gradients(hvd, task, assert_same_on_all_ranks):
    model = task.model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    plain.register_step_pre_hook(lambda *_: seen.append(model[0].weight.grad.clone()))
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    optimizer.load_state_dict(optimizer.state_dict())  # torch patches classes here
    task.train(model, optimizer, 2)
    assert len(seen) == 2
    assert_same_on_all_ranks(*seen)


def test_copies_and_files_hold_the_plain_optimizer(hvd, task):
    model = task.model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    task.train(model, optimizer, 1)
    unpickled = pickle.loads(pickle.dumps(optimizer))  # noqa: S301
    for twin in (copy.deepcopy(optimizer), unpickled):
        assert type(twin) is torch.optim.SGD
        momentum = twin.state[twin.param_groups[0]["params"][0]]["momentum_buffer"]
        assert torch.equal(momentum, optimizer.state[model[0].weight]["momentum_buffer"])
        twin.step()
    for thing in (model, optimizer.state_dict()):
        file = io.BytesIO()
        torch.save(thing, file)
        assert b"hvdtrain" not in file.getvalue()
    copy.deepcopy(model)(torch.ones(1, 6)).sum().backward()  # a copy's gradients are nobody's business


def test_wrapping_again_replaces_the_first_wrapping(hvd, task, difference):
    ours, alone = task.model(), task.model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours.named_parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, ours.named_parameters(), groups=1)
    task.train(ours, optimizer, 2)
    task.train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), 2)
    assert difference(ours, alone) < 1e-6


def test_state_loaded_in_mid_step_drops_the_step(hvd, task, difference):
    ours, alone = task.model(), task.model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9), ours.named_parameters()
    )
    task.loss(ours, task.mine(task.batches(1)[0])).backward()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    task.train(ours, optimizer, 2)
    task.train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), 2)
    assert difference(ours, alone) < 1e-6


def test_a_process_set_reduces_among_its_own(hvd, task, rank, size, difference):
    members = [0] if size == 2 else [0, 2]
    process_set = hvd.add_process_set(members)
    try:
        model = task.model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), process_set=process_set
        )
        start = model[2].bias.detach().clone()
        (model(torch.ones(1, 6)).sum() * (rank + 1)).backward()
        optimizer.step()
        expected = sum(r + 1 for r in members) / len(members) if rank in members else rank + 1
        torch.testing.assert_close(start - model[2].bias, torch.full((3,), float(expected)))
    finally:
        hvd.remove_process_set(process_set)


@pytest.mark.over_gloo
@pytest.mark.on_cpus
@pytest.mark.world_size(2)
def test_adasum_averages_equal_steps_and_adds_orthogonal_ones(hvd, rank):
    param = torch.nn.Parameter(torch.zeros(2))
    if hvd.gloo_enabled():  # Horovod has none there
        with pytest.raises(ValueError, match=r"Adasum needs MPI.*--mpi"):
            hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("p", param)], op=hvd.Adasum)
        with pytest.raises(ValueError, match="Adasum needs MPI"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)
        return
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("p", param)], op=hvd.Adasum)
    param.grad = torch.tensor([2.0, 4.0])
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.tensor([-2.0, -4.0]))
    optimizer.zero_grad()
    param.grad = torch.tensor([1.0, 0.0]) if rank == 0 else torch.tensor([0.0, 3.0])
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.tensor([-3.0, -7.0]))
    with pytest.raises(AssertionError, match="Adasum"):
        optimizer.skip_synchronize()


@pytest.mark.over_gloo
@pytest.mark.parametrize("options", [
    {"groups": 2}, {"groups": "by layer"}, {"gradient_predivide_factor": 2.0},
    {"compression": "fp16"}, {"compression": "bf16"}, {"compression": "bf16", "groups": 2},
    {"compression": "own"},
])  # fmt: skip
def test_options_change_the_way_not_the_result(hvd, task, difference, assert_same_on_all_ranks, options):
    ours, alone = task.model(), task.model()
    options = dict(options)
    exact = "compression" not in options
    if "compression" in options:
        options["compression"] = getattr(hvd.Compression, options["compression"], OwnCompressor)
    if options.get("groups") == "by layer":
        options["groups"] = [list(ours[0].parameters())]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9), ours.named_parameters(), **options
    )
    task.train(ours, optimizer, 5)
    task.train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), 5)
    assert difference(ours, alone) < (1e-6 if exact else 5e-3)
    assert_same_on_all_ranks(*ours.parameters())


class OwnCompressor:
    @staticmethod
    def compress(tensor):
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx)


@pytest.mark.on_cpus
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_steps_are_fused_and_leave_groups_as_they_were(hvd, task, kind, monkeypatch):
    name = f"_fused_{kind.__name__.lower()}_"
    kernel, calls = getattr(torch, name), []
    monkeypatch.setattr(torch, name, lambda *args, **options: (calls.append(1), kernel(*args, **options))[1])
    model = task.model()
    optimizer = hvd.DistributedOptimizer(kind(model.parameters(), lr=0.01), model.named_parameters())
    task.train(model, optimizer, 3)
    assert len(calls) == 3
    assert optimizer.state_dict()["param_groups"][0]["fused"] is None


def test_a_step_with_a_closure_is_the_users(hvd, task, monkeypatch):
    monkeypatch.setattr(torch, "_fused_sgd_", None)
    model = task.model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
