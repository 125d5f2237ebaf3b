"""What strategies take, and what they refuse, in one process."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")

import hvdtrain  # noqa: E402
import hvdtrain.torch as hvd  # noqa: E402
from hvdtrain.sync import as_strategy  # noqa: E402

pytestmark = pytest.mark.usefixtures("alone")


def trainer(net=None, **options):
    net = net or torch.nn.Linear(2, 3)
    options.setdefault("optimizer", torch.optim.SGD(net.parameters(), lr=0.1))
    options.setdefault("loss", torch.nn.CrossEntropyLoss())
    return hvdtrain.Trainer(net, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hvdtrain.LocalSGD(0), "LocalSGD: every must be an int >= 1. Received: every=0"),
        (lambda: hvdtrain.LocalSGD(2.5), "LocalSGD: every must be an int >= 1. Received: every=2.5"),
        (lambda: hvdtrain.LocalSGD(True), "LocalSGD: every must be an int >= 1. Received: every=True"),
        (lambda: hvdtrain.LocalSGD(8, after_steps=-1), "LocalSGD: after_steps must be an int >= 0. Received"),
        (lambda: hvdtrain.LocalSGD(8, within="rack"), 'LocalSGD: within must be None or "host". Received: within='),
        (lambda: hvdtrain.DiLoCo(every=0), "DiLoCo: every must be an int >= 1. Received: every=0"),
        (lambda: hvdtrain.DiLoCo(lr=0.0), "DiLoCo: lr must be > 0, and momentum in [0, 1). Received: lr=0.0"),
        (lambda: hvdtrain.DiLoCo(lr="0.7"), "DiLoCo: lr must be > 0"),
        (lambda: hvdtrain.DiLoCo(10, fragments=0), "DiLoCo: fragments must be an int >= 1. Received: fragments=0"),
        (lambda: hvdtrain.DiLoCo(10, overlap=10), "overlap < every / fragments. Received: every=10, fragments=1, ov"),
        (lambda: hvdtrain.DiLoCo(10, fragments=4, overlap=2), "Received: every=10, fragments=4, overlap=2"),
        (lambda: hvdtrain.DiLoCo(2, fragments=3), "Received: every=2, fragments=3, overlap=0"),
        (lambda: hvdtrain.DiLoCo(momentum=1.0), "Received: lr=0.7, momentum=1.0"),
    ],
)
def test_an_option_outside_its_range_is_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("given", ["LocalSGD", 8, {"strategy": "Unknown"}, hvdtrain.LocalSGD])
def test_what_is_no_strategy_is_refused_with_an_example(given):
    with pytest.raises(TypeError, match=r"sync must be None or a strategy, such as hvdtrain\.LocalSGD\(every=16\)"):
        trainer(sync=given)


@pytest.mark.parametrize("strategy", [hvdtrain.LocalSGD(8, after_steps=3), hvdtrain.DiLoCo(20, lr=0.5, momentum=0.0)])
def test_a_strategy_comes_back_from_the_options_of_a_checkpoint(strategy):
    assert as_strategy(strategy.config) == strategy


def test_diloco_on_one_rank_is_refused():
    with pytest.raises(ValueError, match=r"DiLoCo averages over ranks\. Received: .*every=100.* on one rank\. Launch"):
        trainer(sync=hvdtrain.DiLoCo())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch": "auto"}, "With sync=LocalSGD, ranks step alone. Received: micro_batch='auto'"),
        ({"net": torch.nn.Sequential(torch.nn.Linear(2, 3), hvd.SyncBatchNorm(3))}, "Received: SyncBatchNorm: "),
    ],
)
def test_what_ranks_do_together_in_every_step_is_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        trainer(sync=hvdtrain.LocalSGD(4), **options)


def test_an_optimizer_with_a_closure_is_refused():
    net = torch.nn.Linear(2, 3)
    with pytest.raises(ValueError, match="an optimizer that needs a closure: ranks search along one line together"):
        trainer(net, optimizer=torch.optim.LBFGS(net.parameters()), sync=hvdtrain.LocalSGD(4))


def test_several_optimizers_are_refused():
    nets = {"a": torch.nn.Linear(2, 3), "b": torch.nn.Linear(2, 3)}
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}
    with pytest.raises(ValueError, match="the optimizers a, b: ranks agree on the optimizer at each yield"):
        hvdtrain.Trainer(nets, optimizer=optimizers, step=lambda models, batch: None, sync=hvdtrain.LocalSGD(4))


def test_local_sgd_on_one_rank_is_plain_training():
    data = torch.arange(20.0).reshape(10, 2) / 10, torch.arange(10) % 3
    found = []
    for sync in (None, hvdtrain.LocalSGD(4)):
        torch.manual_seed(0)
        net = torch.nn.Linear(2, 3)
        trainer(net, sync=sync).fit(data, epochs=2, batch_size=2, progress=False, run_dir=None)
        found.append(net.weight.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("strategy", [hvdtrain.LocalSGD(every=8), hvdtrain.DiLoCo(every=8)])
def test_a_period_longer_than_an_epoch_is_one_line(strategy):
    (line,) = strategy.describe(7)
    assert "(every=8) exceeds the 7 steps" in line
    assert strategy.describe(8) == strategy.describe(None) == hvdtrain.Delayed().describe(1) == []
