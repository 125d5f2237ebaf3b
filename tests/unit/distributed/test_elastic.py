"""An elastic run goes back to its last commit, and meets the others until all of them have come."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hvdtrain.distributed import elastic

HorovodInternalError = type("HorovodInternalError", (RuntimeError,), {})
HostsUpdatedInterrupt = type("HostsUpdatedInterrupt", (Exception,), {})
UnknownError = type("UnknownError", (Exception,), {})


def one_state(**attributes):
    return elastic.ObjectState(bcast_object=lambda value: value, get_rank=lambda: 0, **attributes)


def test_what_was_changed_in_place_goes_back_too():
    state = one_state(losses=[1.0], epoch=2)
    state.losses.append(0.5)
    state.save()
    state.losses.append(0.25)
    state.epoch = 3
    for _ in range(2):
        state.restore()
        assert (state.losses, state.epoch) == ([1.0, 0.5], 2)
        state.losses.clear()


def test_sync_sends_what_the_attributes_are_now():
    state = one_state(epoch=0)
    state.epoch = 5  # read from a checkpoint of the user's own
    state.sync()
    assert state.epoch == 5
    state.epoch = 6
    state.restore()
    assert state.epoch == 5


@pytest.mark.parametrize(
    ("error", "others"),
    [
        (HorovodInternalError("anything at all"), True),
        (HorovodInternalError("Mismatched allreduce tensor shapes: one rank has [3], another [4]"), False),
        (UnknownError("Horovod has been shut down. [[{{node adam/DistributedAdam_0}}]]"), True),
        (UnknownError("out of memory"), False),
        (ValueError("bad sample"), False),
    ],
)
def test_only_what_other_ranks_have_caused_is_tried_again(error, others):
    assert elastic.is_failure_of_others(error) is others


def test_ranks_try_again_to_join_while_others_die():
    errors = [
        ValueError("Horovod initialization failed. Please check log messages above"),
        HorovodInternalError("gone"),
    ]
    tries = []

    def reset():
        tries.append(1)
        if errors:
            raise errors.pop()

    elastic._join_ranks(reset)
    assert len(tries) == 3


def test_ranks_that_never_join_end_with_the_reason():
    def reset():
        raise ValueError("Horovod initialization failed. Please check log messages above")

    with pytest.raises(ValueError, match="initialization failed"):
        elastic._join_ranks(reset)


def test_an_error_of_ones_own_is_no_reason_to_try_again():
    tries = []

    def reset():
        tries.append(1)
        raise ValueError("HVDTRAIN_STALL_S must be a number")

    with pytest.raises(ValueError, match="HVDTRAIN_STALL_S"):
        elastic._join_ranks(reset)
    assert len(tries) == 1


def test_a_rank_whose_host_was_removed_ends_in_order(monkeypatch):
    monkeypatch.setattr(elastic, "_is_removed", lambda: True)

    def reset():
        raise ValueError("Horovod initialization failed")

    with pytest.raises(SystemExit) as ended:
        elastic._join_ranks(reset)
    assert ended.value.code == 0


@pytest.mark.skipif(elastic._horovod is None, reason="only Horovod's driver tells of hosts")
def test_a_host_that_joins_between_rounds_is_reported_in_the_next_round(monkeypatch):
    listeners = set()
    manager = SimpleNamespace(init=lambda: None, register_listener=listeners.add, remove_listener=listeners.remove)
    monkeypatch.setattr(elastic, "_horovod", SimpleNamespace(notification_manager=manager))
    told, resets = [], []

    def tell(timestamp):
        for each in listeners:
            each.on_hosts_updated(timestamp, 2)

    def one_round(state):
        told.append(state._host_messages.qsize())
        if len(told) == 1:
            tell(1)
            raise HostsUpdatedInterrupt
        if len(told) == 2:
            raise HorovodInternalError("gone")

    def reset():
        if len(told) == 1:
            tell(2)

    state = one_state()
    state.register_reset_callbacks([lambda: resets.append(len(told))])
    elastic.run_fn(one_round, reset)(state)
    assert told == [0, 1, 0], "in the second round of the host that came in between, and of no earlier one"
    assert resets == [1, 2]
