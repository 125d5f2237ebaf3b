"""The numbers, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hvdtrain.tools.report.numbers import (
    chosen,
    comparison,
    differences,
    flat,
    labels,
    ratios,
    relative_own_time,
    sentences,
    settled_intervals,
    summarize,
    thin,
)
from hvdtrain.tools.report.reading import read_run


@pytest.fixture
def three(made, interval, epoch):
    """Return a run of three ranks; rank 2 computes longer, and the first interval connects."""
    usual = {"data": (0.01, 0.02, 0.03), "compute": (0.10, 0.10, 0.17)}
    lines = [
        interval(1, data=(9.0,) * 3, compute=(9.0,) * 3, rate=1.0),
        interval(2, **usual, rate=300.0),
        interval(3, **usual, rate=500.0),
        interval(60, **usual, rate=400.0),
        epoch(60, loss=0.5, val_loss=0.75, accuracy=None, samples_per_s=350.0, seconds=3.0),
    ]
    return read_run(made(lines, environment={"hosts": ["a", "a", "b"]}))


def test_a_summary_is_what_one_computes_by_hand(three):
    found = summarize(three)
    assert (found.ranks, found.hosts, found.starts, found.epochs, found.global_step) == (3, 2, 1, 1, 60)
    assert found.measured_s == pytest.approx(59 * 0.20)
    assert found.metrics == {"loss": 0.5, "val_loss": 0.75}
    assert found.samples_per_s == 400.0
    assert found.step_s == pytest.approx(0.20)
    # reduction: 0.09, 0.08 and 0.00
    assert found.parts_s == pytest.approx({"compute": 0.37 / 3, "data": 0.02, "reduction": 0.17 / 3, "other": 0.0})
    slowest = found.slowest
    assert (slowest.rank, slowest.host, slowest.cause) == (2, "b", "compute")
    assert (slowest.own_s, slowest.median_own_s) == pytest.approx((0.20, 0.12))
    assert slowest.above_median == pytest.approx(0.20 / 0.12 - 1)


def test_it_is_said_in_plain_words(three):
    assert sentences(summarize(three)) == [
        "3 ranks on 2 hosts; 1 epoch ended, 60 steps in 59 s.",
        "At the end of the last epoch: loss 0.5, val_loss 0.75.",
        "Median throughput: 400 samples/s over all ranks.",
        (
            "A typical step takes 200 ms: compute 123 ms (62 %), data 20 ms (10 %), reduction 56.7 ms (28 %), "
            "other 0 s (0 %). Most of it is computing."
        ),
        (
            "The slowest is rank 2 on host b, 67 % above the median, and the others wait for it: it takes on average "
            "200 ms a step by itself, the median rank 120 ms. It loses its time in computing."
        ),
    ]


def test_exchanges_of_weights_that_few_intervals_have_count_in_the_mean(made, interval, epoch):
    lines = [
        interval(10, data=(0.0,), compute=(0.1,)),
        *[interval(step, data=(0.0,), compute=(0.1,), rate=900.0) for step in (20, 30, 40)],
        interval(50, data=(0.0,), compute=(0.1,), reduction=(0.9,), rate=90.0),
        epoch(50, loss=0.5, samples_per_s=300.0, seconds=9.0),
    ]
    for line in lines[:-1]:
        parts = line["rank_s"]
        parts["step"] = [parts["compute"][0] + parts["reduction"][0]]
        for part in parts.values():
            part *= 2
    config = {"sync": {"strategy": "DiLoCo", "every": 50, "lr": 0.7}}
    found = summarize(read_run(made(lines, config=config)))
    assert found.step_s == pytest.approx((3 * 0.1 + 1.0) / 4)
    assert found.parts_s["reduction"] == pytest.approx(0.9 / 4)
    assert found.samples_per_s == 300.0
    said = " ".join(sentences(found))
    assert "Throughput: 300 samples/s" in said
    assert "A step takes 325 ms on average, exchanges of weights by DiLoCo(every=50) included: compute 100 ms" in said
    plain = summarize(read_run(made(lines, "plain", config={"sync": None})))
    assert (plain.step_s, plain.samples_per_s) == (pytest.approx(0.1), 900.0)


def test_a_rank_that_waits_for_data_is_told_from_one_that_computes(made, interval):
    run = read_run(made([interval(s, data=(0.01, 0.31), compute=(0.1, 0.11)) for s in (1, 100)]))
    assert summarize(run).slowest.cause == "data"
    assert sentences(summarize(run))[-1].endswith("It loses its time in waiting for data.")


def test_a_rank_that_is_slow_between_steps_is_told_from_one_that_computes(made, interval):
    lines = [interval(s, data=(0.01, 0.01), compute=(0.1, 0.11), other=(0.3, 0.0)) for s in (1, 100)]
    slowest = summarize(read_run(made(lines))).slowest
    assert (slowest.rank, slowest.cause, slowest.own_s) == (0, "other", pytest.approx(0.41))
    assert sentences(summarize(read_run(made(lines, name="again"))))[-1].endswith("in what it does between steps.")


def test_a_rank_that_was_slow_for_a_while_is_blamed_for_what_the_others_waited(made, interval):
    even = {"data": (0.01, 0.01), "compute": (0.10, 0.12)}
    lines = [interval(step, **even) for step in (1, 2, 12, 22, 32)]
    lines += [interval(step, data=(0.51, 0.01), compute=(0.10, 0.12)) for step in (42, 52)]
    slowest = summarize(read_run(made(lines))).slowest
    assert (slowest.rank, slowest.cause) == (0, "data")
    assert (slowest.own_s, slowest.median_own_s) == pytest.approx(((31 * 0.11 + 20 * 0.61) / 51, 0.13))


def test_two_runs_are_compared_in_a_sentence(made, interval):
    a, b, c = (
        summarize(read_run(made([interval(s, data=data, compute=(0.1, 0.1)) for s in (1, 201)], name=name)))
        for name, data in (("a", (0.0, 0.0)), ("b", (0.1, 0.1)), ("c", (0.001, 0.001)))
    )
    assert comparison(a, b) == (
        "A step of B takes 100 % longer than one of A (200 ms against 100 ms). "
        "Most of the difference, 100 ms, is waiting for data."
    )
    assert comparison(b, a).startswith("A step of B takes 50 % less than one of A (100 ms against 200 ms).")
    assert comparison(a, c) == "A step takes both about as long (101 ms against 100 ms)."
    assert comparison(a, replace(b, step_s=None)) == ""


def test_runs_that_were_measured_for_a_moment_are_not_compared_and_no_rank_is_blamed(made, interval):
    a, b = (
        summarize(read_run(made([interval(s, data=data, compute=(0.1, 0.1)) for s in (1, 15)], name=name)))
        for name, data in (("a", (0.0, 0.0)), ("b", (0.1, 0.0)))
    )
    assert comparison(a, b) == (
        "Their speeds are not compared: without the first steps, 1.4 s of A and 2.8 s of B were measured, and below "
        "10 s differences are chance."
    )
    assert [name for name, *_ in ratios(a, b)] == ["loss"]
    assert not any("rank 0" in each for each in sentences(b))


def test_what_differs_is_named_shortly_and_once(made, interval):
    configs = [
        {
            "optimizer": name,
            "optimizer_settings": {"lr": lr, **more},
            "batch_size": 8,
            "data": {"batch_size": 8, "first sample": name},
            "arguments": {"lr": str(lr), "depth": "4"} if lr == 0.1 else {},
        }
        for name, lr, more in (("SGD", 0.1, {"momentum": 0.9}), ("Adam", 0.01, {"eps": 1e-8}))
    ]
    environments = [{"ranks": 2}, {"ranks": 4}]
    runs = [
        read_run(made([interval(1)], name, config=config, environment=environment))
        for name, config, environment in zip("ab", configs, environments, strict=True)
    ]
    assert chosen(runs) == [
        {"optimizer": "SGD", "lr": "0.1", "depth": "4", "ranks": "2"},
        {"optimizer": "Adam", "lr": "0.01", "depth": "", "ranks": "4"},
    ]
    assert labels(runs) == ["a, optimizer SGD, lr 0.1, depth 4", "b, optimizer Adam, lr 0.01, depth none"]


def test_even_ranks_are_not_blamed(made, interval):
    run = read_run(made([interval(s, data=(0.01, 0.01), compute=(0.100, 0.101)) for s in (1, 200)]))
    assert sentences(summarize(run))[-1].startswith("All ranks are about equally fast: the slowest, rank 1 on host b,")


def test_one_rank_has_no_slowest_and_no_reduction(made, interval):
    found = summarize(read_run(made([interval(1), interval(2)])))
    assert found.slowest is None
    assert found.parts_s.keys() == {"compute", "data", "other"}


def test_a_run_without_an_epoch_has_the_metrics_of_its_last_interval(made, interval):
    found = summarize(read_run(made([interval(1), interval(4)])))
    assert (found.epochs, found.metrics) == (0, {"loss": 0.25})
    assert "So far, within the first epoch: loss 0.25." in sentences(found)


def test_a_run_that_kept_epochs_only_has_no_speed(made, epoch):
    found = summarize(read_run(made([epoch(10, loss=1.0)])))
    assert (found.samples_per_s, found.step_s, found.parts_s, found.slowest) == (None, None, {}, None)
    assert len(sentences(found)) == 2


def test_a_run_too_short_for_a_second_interval_is_not_judged_by_its_first_step(made, interval, epoch):
    speeds = [epoch(29, 0, samples_per_s=30.0), epoch(58, 1, samples_per_s=90.0), epoch(87, 2, samples_per_s=110.0)]
    found = summarize(read_run(made([interval(1, data=(9, 8), compute=(9, 8), rate=1.0), *speeds])))
    assert (found.settled, found.samples_per_s) == (False, 100.0)
    assert sentences(found)[-1].startswith("Only the first step was recorded, which also compiles and connects: 18 s")


def test_each_starts_first_interval_is_left_out(made, interval):
    run = read_run(made([interval(1), interval(5), interval(9), interval(3), interval(6)]))
    assert run.intervals.step.tolist() == [1, 3, 6]
    assert settled_intervals(run.intervals).tolist() == [False, False, True]
    alone = read_run(made([interval(1)], name="alone"))
    assert settled_intervals(alone.intervals).tolist() == [True]


def test_own_time_is_against_the_lower_median_of_the_ranks_that_are_there():
    data = np.array([[1.0, 3.0], [2.0, np.nan], [np.nan, np.nan]])
    found = relative_own_time({"data": data, "compute": data, "other": data})
    np.testing.assert_array_equal(found, [[1.0, 3.0], [1.0, np.nan], [np.nan, np.nan]])


def test_thinning_takes_the_mean_of_neighbours():
    np.testing.assert_array_equal(thin(np.array([1.0, 3.0, np.nan, 5.0, 7.0]), 3), [2.0, 5.0, 7.0])
    np.testing.assert_array_equal(thin(np.array([[1.0, np.nan], [3.0, np.nan]]), 1), [[2.0, np.nan]])
    assert thin(np.arange(100_000.0), 400).shape == (400,)


def test_settings_are_flat_and_only_what_differs_is_compared():
    a = {
        "seed": 0,
        "data": {"kind": "arrays", "n": 5},
        "hosts": ["x", "x", "y"],
        "command": ["t.py", "--x"],
        "only": None,
    }
    assert flat(a) == {
        "seed": "0", "data.kind": "arrays", "data.n": "5", "hosts": "x x 2, y", "command": "t.py --x", "only": "none"
    }  # fmt: skip
    b = {"seed": 1, "data": {"kind": "arrays", "n": 5}, "hosts": ["x", "x", "y"], "command": ["t.py", "--x"]}
    assert differences(a, b) == [("seed", "0", "1"), ("only", "none", "")]


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (
            {"weights": 4e6, "gradients": 4e6, "optimizer": 0, "buckets": 0, "activations": 9e6},
            ["Memory of rank 0 in a step, at most: activations 9 MB, weights 4 MB, gradients 4 MB."],
        ),
        ({"weights": 4e6, "activations": None}, ["Memory of rank 0 in a step, at most: weights 4 MB."]),
        ({"weights": "much"}, []),
        (None, []),
    ],
)
def test_the_last_epochs_memory_is_said(made, interval, epoch, memory, said):
    lines = [interval(1), epoch(1) | {"memory": {"weights": 1.0}}, interval(2), epoch(2, 1) | {"memory": memory}]
    found = sentences(summarize(read_run(made(lines))))
    assert [each for each in found if each.startswith("Memory")] == said
