"""The learning rate at scale: only when asked, step by step, then let go."""

from __future__ import annotations

import pytest

from hvdtrain.training.learning_rate import LearningRate


def test_nothing_is_touched_unasked():
    assert LearningRate([0.1], scaling="none", size=64, warmup_epochs=0).at(0, steps_per_epoch=10) is None


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_scaling_is_by_ranks(scaling, factor):
    rates = LearningRate([0.1, 0.2], scaling=scaling, size=4, warmup_epochs=0)
    assert rates.at(0, steps_per_epoch=10) == pytest.approx([0.1 * factor, 0.2 * factor])
    assert rates.at(1, steps_per_epoch=10) is None


def test_warmup_ramps_from_the_base_rate_to_the_scaled_one():
    rates = LearningRate([0.1], scaling="linear", size=3, warmup_epochs=2)
    ramp = [rates.at(step, steps_per_epoch=2)[0] for step in range(4)]
    assert ramp == pytest.approx([0.15, 0.2, 0.25, 0.3])
    assert rates.at(4, steps_per_epoch=2) is None


def test_warmup_without_scaling_ramps_from_zero():
    rates = LearningRate([0.1], scaling="none", size=1, warmup_epochs=1)
    assert [rates.at(step, steps_per_epoch=4)[0] for step in range(4)] == pytest.approx([0.025, 0.05, 0.075, 0.1])


def test_words_say_what_changed_and_how_to_ask():
    scaled = LearningRate([0.1], scaling="linear", size=4, warmup_epochs=0).describe(
        batch_size=32, accumulate=2, rates=[0.4]
    )
    assert scaled == ["effective batch 256 samples (32 x 4 ranks x 2 accumulated)", "lr 0.1 -> 0.4 (linear, 4 ranks)"]
    plain = LearningRate([0.1], scaling="none", size=4, warmup_epochs=0)
    [batch, rate] = plain.describe(batch_size=32, accumulate=1, rates=[0.1])
    assert batch == "effective batch 128 samples (32 x 4 ranks)"
    assert rate == 'lr 0.1, not scaled; lr_scaling="linear" or "sqrt" scales it to 4 ranks'
    assert plain.describe(batch_size=None, accumulate=1, rates=[0.1]) == [rate]  # data that can only be iterated
    assert (
        LearningRate([0.1], scaling="none", size=1, warmup_epochs=0).describe(batch_size=32, accumulate=1, rates=[0.1])
        == []
    )


def test_a_rate_that_a_schedule_changes_is_the_present_one_without_advice():
    for base, ranks, expected in (
        ([0.1], 4, ["lr 0.001, which a schedule changes; not scaled to 4 ranks"]),
        ([0.1], 1, []),
    ):
        rates = LearningRate(base, scaling="none", size=ranks, warmup_epochs=0)
        assert rates.describe(batch_size=None, accumulate=1, rates=[0.001], scheduled=True) == expected
