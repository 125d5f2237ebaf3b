"""The reasons for which a run ends, and the actions that wait for equal weights."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from hvdtrain.distributed.world import SoloWorld
from hvdtrain.training import preemption
from hvdtrain.training.due import Due
from hvdtrain.training.progress import Budget, History, RunProgress
from hvdtrain.training.run_end import RunEnd


@pytest.fixture(autouse=True)
def _no_signal(monkeypatch):
    """A test that a signal has ended leaves the request behind."""
    monkeypatch.setattr(preemption, "requested", lambda: None)


def end_of(*, part=None, **limits):
    """Return the end of a run in its third epoch, after 7 steps and 10 s."""
    progress = RunProgress(epoch=2, step=1, global_step=7, seconds=4.0)
    state = SimpleNamespace(progress=progress, history=History({"seconds": [6.0]}), part=part)
    return RunEnd(Budget(**limits), state, SoloWorld())


def report(spent_s):
    return SimpleNamespace(spent_s=spent_s)


@pytest.mark.parametrize("limits", [{"epochs": 2}, {"steps": 7}, {"seconds": 10.0}])
def test_a_spent_budget_ends_the_run_and_a_larger_one_does_not(limits):
    end, larger = end_of(**limits), end_of(**{name: value + 1 for name, value in limits.items()})
    end.check_budget()
    larger.check_budget()
    assert (end.why, larger.why) == ("budget", None)


def test_nothing_is_left_once_the_part_of_the_last_epoch_is_reported():
    assert not end_of(steps=7).is_over
    assert end_of(steps=7, part={"loss": 1.0}).is_over
    assert not end_of(steps=8, part={"loss": 1.0}).is_over


def test_a_callback_ends_the_run_when_ranks_agree_or_with_the_next_heartbeat():
    end = end_of(epochs=3)
    end.agree()
    assert end.why is None
    assert end.spent_s(5.0) == 11.0
    end.request(within_epoch=False)
    assert end.spent_s(5.0) == 11.0
    end.request(within_epoch=True)
    end.request(within_epoch=False)
    end.learn(report(end.spent_s(5.0)))
    assert end.why == "callback"


def test_a_run_whose_seconds_are_spent_stays_ended_after_a_validation_without_a_stop():
    end = end_of(seconds=11.0)
    assert not math.isinf(end.limit_s)
    end.learn(report(12.0))
    end.agree()
    assert end.why == "budget"


def test_a_signal_ends_the_run_where_it_is_heeded(monkeypatch):
    monkeypatch.setattr(preemption, "requested", lambda: 15)
    end = end_of(epochs=3)
    end.agree(heed_signals=False)
    assert end.why is None
    end.agree()
    assert end.why == "signal"


def test_a_checkpoint_is_due_once_in_each_folder_until_it_is_saved_there():
    due, one, other = Due(), object(), object()
    for each in (one, other, one):
        due.add(each)
    assert due.checkpoints == [one, other]
    due.saved(one)
    due.saved(one)
    assert due.checkpoints == [other]
    assert due
    due.saved(other)
    assert not due
    due.stop = due.validation = True
    due.clear()
    assert not due
