"""Strategies say what they need, adapters what they refuse, and one checker compares them."""

import pytest

import hvdtrain
from hvdtrain.adapter import Needs, Options, Refusal
from hvdtrain.distributed.world import SoloWorld
from hvdtrain.sync.synchronizer import Synchronizer


class FakeAdapter:
    fault = None
    step_taken = True

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args: self.calls.append(name)


def test_a_refusal_of_what_is_needed_is_an_error_with_the_reason():
    refusals = [Refusal(("open steps",), "BatchNorm", "use LayerNorm"), Refusal(("delay",), "a model", "leave it out")]
    with pytest.raises(ValueError, match=r"^With sync=X, ranks wait. Received: a model: leave it out\.$"):
        Needs("sync=X", "ranks wait", ("weights", "delay")).check(refusals)


def test_a_refusal_of_what_is_not_needed_changes_nothing():
    Needs("sync=X", "ranks wait", ("weights",)).check([Refusal(("delay", "open steps"), "a model", "leave it out")])


@pytest.mark.parametrize(
    ("strategy", "needs"),
    [
        (hvdtrain.LocalSGD(2), ("weights", "lone steps")),
        (hvdtrain.LocalSGD(2, within="host"), ("weights", "lone steps", "host steps")),
        (hvdtrain.DiLoCo(2), ("weights", "lone steps")),
        (hvdtrain.DiLoCo(4, fragments=2), ("weights", "lone steps", "weights in flight")),
        (hvdtrain.DiLoCo(4, overlap=1), ("weights", "lone steps", "weights in flight")),
        (hvdtrain.Delayed(), ("weights", "delay")),
    ],
    ids=str,
)
def test_a_strategy_declares_what_its_options_need(strategy, needs):
    assert strategy.needs.needs == needs
    assert strategy.needs.option == f"sync={type(strategy).__name__}"


def test_without_a_strategy_ranks_are_equal_after_each_step():
    adapter = FakeAdapter()
    sync = Synchronizer(adapter, SoloWorld())
    sync.before_step()
    assert sync.after_step([]) is None
    assert sync.in_sync
    assert not sync.in_flight
    assert adapter.calls == []
    sync.make_equal()
    assert adapter.calls == ["average_buffers"]


def test_a_delayed_adapter_calls_what_the_loop_sets_later():
    called, adapter = [], FakeAdapter()
    adapter.delay = called.append
    sync = hvdtrain.Delayed().synchronizer(adapter, Options(), SoloWorld())
    sync.between_exchanges = lambda: called.append("exchange")
    (hook,) = called
    hook()
    assert called[-1] == "exchange"
