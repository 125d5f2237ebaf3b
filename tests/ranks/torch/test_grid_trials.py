"""What people do with divided models that other tests of a Grid leave out: what goes between stages, what is drawn."""

from __future__ import annotations

import copy
import io
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

import hvdtrain
import hvdtrain.torch
from hvdtrain.callbacks import Checkpoint
from hvdtrain.errors import DesyncError, HvdTrainError

pytestmark = pytest.mark.world_size(2)


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, value):
        return self.function(value)


BETWEEN = {
    "an expanded tensor": (lambda x: x[:, :1].expand(-1, 4), lambda x: x),
    "a tuple of one tensor": (lambda x: (x,), lambda value: value[0]),
    "a transposed tensor": (lambda x: x.view(-1, 2, 2).transpose(1, 2), lambda x: x.flatten(1)),
    "a tensor twice": (lambda x: (x, x), lambda value: value[0] * value[1]),
    "a mask beside a tensor": (lambda x: (x, x > 0), lambda value: value[0] * value[1]),
}


@pytest.mark.parametrize("kind", BETWEEN)
def test_what_goes_between_stages_has_the_gradients_of_one_process(grid_of, kind):
    grid = grid_of(stages=2)
    first, then = BETWEEN[kind]
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), Call(first), Call(then), nn.Linear(4, 2))
    inputs = torch.randn(7, 4)
    stage = grid.pipeline(copy.deepcopy(layers), micro_batches=3, at=["2"])
    expected = layers(inputs)
    expected.square().mean().backward()
    stage.forward_backward(inputs, lambda outputs, rows: outputs.square().sum() / expected.numel())
    for name, each in stage.named_parameters():
        torch.testing.assert_close(each.grad, layers.get_parameter(name).grad)
    torch.testing.assert_close(stage.shared(stage.outputs(inputs)), expected.detach())


def test_layers_that_freeze_and_thaw_train_as_in_one_process(grid_of):
    grid = grid_of(stages=2)
    torch.manual_seed(0)
    layers, inputs = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), torch.randn(12, 4)
    stage = grid.pipeline(copy.deepcopy(layers), micro_batches=3, at=["1"])
    for frozen in ("0", None, "0", "2"):
        layers.zero_grad()
        stage.zero_grad()
        for net in (layers, stage):
            for name, each in net.named_parameters():
                each.requires_grad_(name[0] != frozen)
        layers(inputs).square().mean().backward()
        stage.forward_backward(inputs, lambda outputs, rows: outputs.square().sum() / 24)
        for name, each in stage.named_parameters():
            torch.testing.assert_close(each.grad, layers.get_parameter(name).grad)


def test_a_first_layer_that_works_in_place_computes_each_micro_batch_once(grid_of):
    grid = grid_of(stages=2)
    torch.manual_seed(0)
    layers = nn.Sequential(Call(lambda x: x.mul_(2).add_(1)), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    inputs = torch.randn(12, 4)
    expected = layers(inputs.clone())
    expected.square().mean().backward()
    gradients = {name: each.grad.clone() for name, each in layers.named_parameters()}
    layers.zero_grad()
    stage = grid.pipeline(layers, micro_batches=3, at=["3"])
    torch.testing.assert_close(stage.shared(stage.outputs(inputs.clone())), expected.detach())
    stage.forward_backward(inputs.clone(), lambda outputs, rows: outputs.square().sum() / expected.numel())
    for name, each in stage.named_parameters():
        torch.testing.assert_close(each.grad, gradients[name])


def test_a_second_context_of_a_stage_gives_other_types_between_stages(grid_of):
    grid = grid_of(stages=2)
    torch.manual_seed(0)
    layers, inputs = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(12, 4)
    expected = layers(inputs).detach()
    stage = grid.pipeline(layers, micro_batches=3, at=["2"])
    stage.within = lambda samples: torch.autocast("cpu", torch.bfloat16)
    assert stage.shared(stage.outputs(inputs)).dtype == torch.bfloat16
    stage.within = lambda samples: nullcontext()
    torch.testing.assert_close(stage.shared(stage.outputs(inputs)), expected)


def test_a_stage_that_computes_in_another_type_than_before_sends_that_type(grid_of):
    grid = grid_of(stages=2)
    torch.manual_seed(0)
    layers, ids = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 2)), torch.arange(5)
    stage = grid.pipeline(copy.deepcopy(layers), micro_batches=2, at=["2"])
    with torch.autocast("cpu", torch.bfloat16):  # the script's own
        assert stage.shared(stage.outputs(ids)).dtype == torch.bfloat16
    torch.testing.assert_close(stage.shared(stage.outputs(ids)), layers(ids).detach())
    torch.testing.assert_close(stage.double().shared(stage.outputs(ids)), layers.double()(ids).detach())


class Twice(nn.Linear):
    """A layer with a second output in training alone, as auxiliary losses need."""

    def forward(self, x):
        y = super().forward(x)
        return (y, 2 * y) if self.training else y


def test_a_stage_sends_in_evaluation_what_its_layers_return_there(grid_of):
    grid = grid_of(stages=2)
    torch.manual_seed(0)
    layers = nn.Sequential(Twice(4, 4), Call(lambda x: sum(x) if isinstance(x, tuple) else x), nn.Linear(4, 2))
    stage, inputs = grid.pipeline(copy.deepcopy(layers), micro_batches=2, at=["1"]), torch.randn(6, 4)
    for training in (True, False):
        expected = layers.train(training)(inputs).detach()
        torch.testing.assert_close(stage.train(training).shared(stage.outputs(inputs)), expected)


@pytest.mark.world_size(4)
def test_stages_of_shards_in_a_scripts_own_autocast_have_the_gradients_of_one_process(grid_of):
    grid = grid_of(stages=2, shard=2)
    torch.manual_seed(0)
    layers, inputs = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.randn(12, 4)
    stage = grid.pipeline(copy.deepcopy(layers), micro_batches=3)
    for layer in (*stage.children(), stage):
        fully_shard(layer, mesh=grid.mesh("shard"))
    with torch.autocast("cpu", torch.bfloat16):
        layers(inputs).float().square().mean().backward()
        stage.forward_backward(inputs, lambda outputs, rows: outputs.float().square().sum() / 48)
    for name, each in stage.named_parameters():
        torch.testing.assert_close(each.grad.full_tensor(), layers.get_parameter(name).grad, rtol=0.05, atol=1e-3)


def test_torchs_scaler_of_shards_skips_a_step_of_all_stages(grid_of):
    grid = grid_of(stages=2)
    stage = grid.pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), micro_batches=2)
    scaler = ShardedGradScaler("cpu", init_scale=8.0, process_group=grid.group("stage"))
    scaler.scale(torch.zeros(()))  # the first stage has no loss
    optimizer, weight = torch.optim.SGD(stage.parameters(), lr=0.1), next(stage.parameters())
    for overflows in (True, False):
        before = weight.detach().clone()
        stage.zero_grad()
        stage.forward_backward(torch.ones(4, 4), lambda outputs, rows: scaler.scale(outputs.sum()))
        if overflows and stage.is_last:
            weight.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight, before) == overflows
        assert scaler.get_scale() == 4.0


def test_sparse_gradients_are_clipped_by_the_norm_of_all_stages(grid_of):
    grid = grid_of(stages=2)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), nn.Linear(4, 2))
    inputs = torch.randint(0, 5, (9, 3))
    staged = copy.deepcopy(layers)
    staged[0].sparse = True
    stage = grid.pipeline(staged, micro_batches=3)
    layers(inputs).square().sum().backward()
    stage.forward_backward(inputs, lambda outputs, rows: outputs.square().sum())
    norm = nn.utils.clip_grad_norm_(layers.parameters(), 0.1)
    assert grid.clip_grad_norm_(stage.parameters(), 0.1) == pytest.approx(float(norm), rel=1e-5)
    for name, each in stage.named_parameters():
        torch.testing.assert_close(each.grad.to_dense(), layers.get_parameter(name).grad)


def test_a_model_of_which_fully_shard_has_left_weights_out_is_refused(grid_of):
    grid = grid_of(shard=2)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(net[0], mesh=grid.mesh("shard"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises((ValueError, HvdTrainError), match=r"divide the model itself too.* not divided over the shards"):
        hvdtrain.Trainer(net, optimizer=optimizer, loss=nn.MSELoss())
    with pytest.raises(ValueError, match=r"would differ from rank to rank. Received: 2 such weights.*fully_shard\("):
        grid.average_gradients(net.parameters())
    net[1].requires_grad_(False)  # weights that nobody trains stay equal
    hvdtrain.Trainer(net, optimizer=optimizer, loss=nn.MSELoss())


def of_numpy():
    return np.random.rand(4)  # noqa: NPY002 - its global generator, which users draw from


GENERATORS = {"torch": lambda: torch.rand(4), "python": lambda: [random.random() for _ in "four"], "numpy": of_numpy}


class Drawn(Dataset):
    """Samples that are drawn when they are read; each is its own target."""

    def __init__(self, generator="torch"):
        self.draw = GENERATORS[generator]

    def __len__(self):
        return 24

    def __getitem__(self, index):
        drawn = torch.as_tensor(self.draw(), dtype=torch.float32)
        return drawn, drawn.clone()


def scale_by_chance(x):
    return x * float(random.random() + of_numpy().sum())


class Seen(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.rows = []

    def forward(self, x):
        if self.training:
            self.rows += x.detach().tolist()
        return super().forward(x)


PLAN = {"2": ColwiseParallel(), "3": RowwiseParallel()}


def fit_drawn(grid, data=None, **options):
    """Train on samples that are drawn; return those that the first layer and the loss have seen, and the model."""
    torch.manual_seed(0)
    chance = nn.Sequential(nn.Dropout(0.5), Call(scale_by_chance))
    net = nn.Sequential(Seen(), chance, nn.Linear(4, 8), nn.Linear(8, 4))
    first, targets = net[0], []
    if grid.stages > 1:
        net = grid.pipeline(net, micro_batches=2)
    elif grid.tensors > 1:
        net = parallelize_module(net, grid.mesh("tensor"), PLAN)
    else:
        net = fully_shard(net, mesh=grid.mesh("shard"))

    def mse(outputs, wanted):
        if torch.is_grad_enabled():
            targets.extend(wanted.tolist())
        return F.mse_loss(outputs, wanted)

    trainer = hvdtrain.Trainer(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss=mse)
    how = {"batch_size": 12 // grid.data_size, "run_dir": None, "progress": False}
    trainer.fit(data or Drawn(), **how, **options)
    return first.rows, targets, net


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("lengths", [{"stages": 2}, {"tensor": 2}], ids=str)
def test_ranks_of_a_replica_draw_the_same_samples(grid_of, hvd, lengths, generator):
    rows, targets, net = fit_drawn(grid_of(**lengths), Drawn(generator), epochs=2)
    everyones = hvd.allgather_object((rows, targets))
    if "stages" in lengths:
        (rows, _), (_, targets) = everyones
        rows = rows[-48:]  # a stage has computed some before, to learn the shapes
    assert len(targets) == 48
    assert rows == targets
    if "tensor" in lengths:  # weights that are not divided stay equal, although they are before a dropout
        assert everyones[0] == everyones[1]
        first, second = hvd.allgather_object(net[0].weight.detach().numpy())
        np.testing.assert_array_equal(first, second)


def test_a_run_of_another_grid_does_not_leave_its_random_numbers_to_the_stages(grid_of, hvd, shared_tmp_path):
    folder = str(shared_tmp_path)
    grid = grid_of(shard=2)
    fit_drawn(grid, epochs=1, callbacks=[Checkpoint(folder)])
    grid.close()
    rows, targets, _ = fit_drawn(grid_of(stages=2), epochs=2, callbacks=[Checkpoint(folder)])
    (rows, _), (_, targets) = hvd.allgather_object((rows, targets))
    assert len(targets) == 24
    assert rows[-24:] == targets


def test_stages_drop_other_units(grid_of, hvd):
    grid = grid_of(stages=2)
    torch.manual_seed(0)
    stage = grid.pipeline(
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5)), micro_batches=1, at=["2"]
    )
    masks = []
    next(each for each in stage.modules() if isinstance(each, nn.Dropout)).register_forward_hook(
        lambda module, args, output: masks.append((output != 0).tolist())
    )
    stage.forward_backward(torch.randn(6, 8), lambda outputs, rows: outputs.sum())
    first, second = hvd.allgather_object(masks[-1])
    assert first != second
    left = hvd.allgather_object(torch.rand(1).item())
    assert left[0] == left[1]


def test_a_stage_loads_its_layers_of_the_whole_models_state(grid_of):
    grid = grid_of(stages=2)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    stage = grid.pipeline(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), micro_batches=2)
    stage.load_state_dict(layers.state_dict())
    for name, each in stage.state_dict().items():
        torch.testing.assert_close(each, layers.state_dict()[name])
    with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
        stage.load_state_dict(layers.state_dict() | {"other.weight": torch.zeros(1)})


def test_torchs_averaged_model_of_a_stage_computes_with_the_averages(grid_of):
    grid = grid_of(stages=2)
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    stage, inputs = grid.pipeline(copy.deepcopy(layers), micro_batches=2), torch.randn(6, 4)
    expected = layers(inputs).detach()
    stage.outputs(inputs)  # makes a schedule, which computes the stage's own layers
    averages = AveragedModel(stage, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    averages.update_parameters(stage)
    averaged = averages.module
    with torch.no_grad():
        for each in stage.parameters():
            each.zero_()
    torch.testing.assert_close(averaged.shared(averaged.outputs(inputs)), expected)
    torch.testing.assert_close(stage.shared(stage.outputs(inputs)), torch.zeros(6, 4))
    with pytest.raises(TypeError, match=r"Write stage.state_dict\(\), and not the stage"):
        torch.save(stage, io.BytesIO())


@pytest.mark.parametrize("frozen", [0, 1])
def test_the_optimizer_of_a_frozen_stage_may_have_an_empty_group(grid_of, frozen):
    grid = grid_of(stages=2)
    torch.manual_seed(0)
    stage = grid.pipeline(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), micro_batches=2, at=["2"])
    stage.requires_grad_(grid.stage != frozen)
    before = {name: each.clone() for name, each in stage.state_dict().items()}
    trained = [each for each in stage.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained}], lr=0.01)
    trainer = hvdtrain.Trainer(stage, optimizer=optimizer, loss=nn.MSELoss(), clip_norm=1.0)
    data = torch.rand(13, 4), torch.rand(13, 1)
    trainer.fit(data, batch_size=4, epochs=2, run_dir=None, progress=False)
    assert len(trainer.state().meta["layout"][1][0]) == 2
    for name, each in stage.state_dict().items():
        assert torch.equal(each, before[name]) == (grid.stage == frozen)


class Drawing(nn.Module):
    """A layer whose tensors are drawn: a weight, a buffer that checkpoints hold, and one that they do not."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))
        self.register_buffer("saved", torch.rand(4))
        self.register_buffer("unsaved", torch.rand(4), persistent=False)

    def forward(self, x):
        return x * self.weight + self.saved + self.unsaved


@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize(
    "lengths", [pytest.param({"stages": 2}, marks=pytest.mark.world_size(4)), {"shard": 2}, {"tensor": 2}], ids=str
)
def test_ranks_that_the_script_seeds_apart_begin_with_equal_tensors(grid_of, hvd, rank, lengths):
    grid = grid_of(**lengths)
    torch.manual_seed(rank)
    net = nn.Sequential(Drawing(), nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4), Drawing())
    if grid.stages > 1:
        net = grid.pipeline(net, micro_batches=2)
    elif grid.tensors > 1:
        parallelize_module(net, grid.mesh("tensor"), PLAN)
    else:
        net[0].requires_grad_(False)
        for layer in (*net[1:], net):
            fully_shard(layer, mesh=grid.mesh("shard"), ignored_params=set(net[0].parameters()))
    hvdtrain.Trainer(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss=nn.MSELoss())
    found = [*net.named_parameters(), *net.named_buffers()]
    own = ".unsaved" if grid.tensors > 1 else "none"  # of a tensor part, such as slopes of its heads
    mine = {name: each.tolist() for name, each in found if not (hasattr(each, "device_mesh") or name.endswith(own))}
    assert mine
    unsaved = hvd.allgather_object([each.tolist() for name, each in found if name.endswith(own)])
    assert grid.tensors == 1 or unsaved[0] != unsaved[1]
    by_stage = {}
    for stage, held in hvd.allgather_object((grid.stage, mine)):
        assert by_stage.setdefault(stage, held) == held


def test_a_second_trainer_takes_shards_that_an_evaluation_has_gathered(grid_of):
    grid = grid_of(shard=2)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(net, mesh=grid.mesh("shard"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        trainer = hvdtrain.Trainer(net, optimizer=optimizer, loss=nn.MSELoss())
        trainer.evaluate((torch.ones(8, 4), torch.ones(8, 4)))


def test_settings_of_a_group_that_differ_by_stage_are_an_error_on_all(grid_of):
    grid = grid_of(stages=2)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    rates = {name: 0.1 / 2 ** int(name) for name in "0123"}
    stage = grid.pipeline(layers, micro_batches=2)
    optimizer = torch.optim.SGD([{"params": layer.parameters(), "lr": rates[n]} for n, layer in stage.named_children()])
    with pytest.raises(DesyncError, match=r"group may be empty. Received: lr=0.1 in group 0 of stage 0, and lr=0.025"):
        hvdtrain.Trainer(stage, optimizer=optimizer, loss=nn.MSELoss())
    held = dict(stage.named_children())
    groups = [{"params": [*held[n].parameters()] if n in held else [], "lr": rate} for n, rate in rates.items()]
    trainer = hvdtrain.Trainer(stage, optimizer=torch.optim.SGD(groups), loss=nn.MSELoss())
    trainer.fit((torch.ones(8, 4), torch.ones(8, 4)), run_dir=None, progress=False)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("has_state", [False, True])
def test_the_optimizer_state_of_divided_weights_arrives_at_other_replicas(grid_of, hvd, has_state):
    grid = grid_of(shard=2)
    torch.manual_seed(0)
    net = fully_shard(nn.Linear(4, 3), mesh=grid.mesh("shard"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    if grid.replica == 0 or has_state:  # the ranks of a shard group step together
        net(torch.full((2, 4), float(grid.replica + 1))).square().sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=grid.part_root, process_set=grid.process_set)
    state = [(name, each) for entries in optimizer.state_dict()["state"].values() for name, each in entries.items()]
    assert len(state) == 6
    assert all(hasattr(each, "device_mesh") == (name != "step") for name, each in state)
    mine = [getattr(each, "full_tensor", each.clone)().tolist() for _, each in state]
    assert all(others == mine for others in hvd.allgather_object(mine))
    optimizer.step()
