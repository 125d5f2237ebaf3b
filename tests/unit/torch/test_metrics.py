"""Metrics with state over several ranks equal one process's; ranks are threads here."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torchmetrics
from thread_ranks import Threads, on_ranks
from torchmetrics import classification, regression, wrappers

from hvdtrain.distributed import rank_state
from hvdtrain.distributed.world import SoloWorld
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.reduction.loss_weights import Counted
from hvdtrain.torch.steps.metrics import Totals, named_metrics

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CPU, CLASSES = torch.device("cpu"), 3


def data(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, CLASSES, generator=generator), torch.randint(0, CLASSES, (count,), generator=generator)


class CountsInAttributes(torchmetrics.Metric):
    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), "sum")
        self.count = 0

    def update(self, outputs, targets):
        self.total += outputs.sum()
        self.count += len(outputs)

    def compute(self):
        return self.total / self.count


class OneNumberABatch(torchmetrics.MeanMetric):
    def update(self, outputs, targets):
        super().update(outputs.max(), weight=len(outputs))


class Custom(torchmetrics.Metric):
    """Every kind of state: sums that begin at 1, largest, smallest, a list, a tensor that grows, a function's."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.ones(2), "sum")
        self.add_state("whole", torch.tensor(0), "sum")  # floats are added to it
        self.add_state("largest", torch.tensor(0.5), "max")
        self.add_state("smallest", torch.tensor(0.5), "min")
        self.add_state("seen", [], "cat")
        self.add_state("each", [])
        self.add_state("grows", torch.zeros(0), "cat")
        self.add_state("product", torch.tensor(1.0), lambda stacked: stacked.prod(0))
        self.add_state("setting", torch.tensor(3.0), "mean")

    def update(self, outputs, targets):
        self.total += outputs.double().sum(0)[:2].float()
        self.whole = self.whole + outputs.abs().mean(1).sum()
        self.largest, self.smallest = (
            torch.maximum(self.largest, outputs.max()), torch.minimum(self.smallest, outputs.min())
        )  # fmt: skip
        self.seen.append(targets)
        self.each.extend(outputs[:, :1])
        self.grows = torch.cat([self.grows, outputs[:, 2]])
        self.product = self.product * (targets + 1.0).prod()

    def compute(self):
        seen, each = torch.cat(self.seen), torch.cat(self.each)
        assert not seen.is_floating_point()  # as on one process, also where a rank has none
        sums = torch.stack([seen.sum(), each.sum(), self.grows.square().sum(), self.product.log(), self.setting])
        return {"states": torch.stack([*self.total, self.whole, self.largest, self.smallest]), "others": sums}


def metrics():
    each = {"num_classes": CLASSES}
    return [
        classification.MulticlassAUROC(**each),
        torchmetrics.MetricCollection(
            {
                "f1": classification.MulticlassF1Score(**each, average="macro"),
                # Equal to f1 on some batches: no reason to share a state.
                "top2": classification.MulticlassF1Score(**each, average="macro", top_k=2),
                "ap": classification.MulticlassAveragePrecision(**each, thresholds=None),
            },
            prefix="m_",
        ),
        wrappers.ClasswiseWrapper(classification.MulticlassRecall(**each, average=None), ["a", "b", "c"]),
        classification.MulticlassConfusionMatrix(**each),
        Custom(),
        "accuracy",
    ]


def regressions():
    return {"pearson": regression.PearsonCorrCoef(), "r2": regression.R2Score(), "mse": regression.MeanSquaredError()}


def add(totals, outputs, targets, size=4):
    for begin in range(0, len(targets), size):
        rows = slice(begin, begin + size)
        count = len(targets[rows])
        totals.add(outputs[rows], targets[rows], torch.tensor(0.0), Counted(count, count, count, True))


def make(metrics, world):
    return Totals(named_metrics(metrics, torch.nn.CrossEntropyLoss()), CPU, world)


def finish(totals, world, *, live=False):
    return totals.results(lambda vector: world.allreduce(vector), live=live)


def one_process(metrics, outputs, targets):
    totals = make(metrics, SoloWorld())
    add(totals, outputs, targets)
    return finish(totals, SoloWorld())


def assert_close(results, expected):
    assert list(results) == list(expected)
    np.testing.assert_allclose(list(results.values()), list(expected.values()), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(("size", "count"), [(1, 11), (2, 11), (3, 11), (3, 2), (3, 1)])
def test_metrics_with_state_equal_one_processs(size, count):
    outputs, targets = data(count)

    def rank(world):
        totals = make(metrics(), world)
        with torch.inference_mode():  # as evaluate does
            add(totals, outputs[world.rank :: size], targets[world.rank :: size])
        first = finish(totals, world)
        totals.clear()
        add(totals, outputs[world.rank :: size], targets[world.rank :: size])
        assert finish(totals, world) == first
        return first

    ranks = on_ranks(size, rank)
    assert all(each == ranks[0] for each in ranks)
    assert_close(ranks[0], one_process(metrics(), outputs, targets))
    assert {"MulticlassAUROC", "m_f1", "m_ap", "multiclassrecall_a", "MulticlassConfusionMatrix/8"} <= set(ranks[0])


@pytest.mark.parametrize(("size", "holders"), [(2, 2), (3, 3), (3, 2), (3, 1)])
def test_states_that_a_metric_combines_itself_equal_one_processs(size, holders):
    outputs, targets = data(23)[0].T[:2]

    def rank(world):
        totals = make(regressions(), world)
        if world.rank < holders:
            add(totals, outputs[world.rank :: holders], targets[world.rank :: holders])
        return finish(totals, world)

    assert_close(on_ranks(size, rank)[-1], one_process(regressions(), outputs, targets))


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (3, 2), (3, 1), (1, 2)])
@pytest.mark.parametrize("holders", [2, 1])
def test_sums_that_take_another_shape_equal_one_processs(before, after, holders):
    outputs, targets = data(17)[0], data(17, seed=1)[0]
    kinds = lambda: [regression.ExplainedVariance(), regression.MeanSquaredError(), regression.R2Score()]  # noqa: E731

    def interrupted(world):
        totals = make(kinds(), world)
        if world.rank < holders:
            mine = slice(world.rank, 10, min(before, holders))
            add(totals, outputs[mine].contiguous(), targets[mine].contiguous())
        live = finish(totals, world, live=True)
        assert set(live) >= {"loss", "MeanSquaredError"}
        return totals.arrays()

    saved = on_ranks(before, interrupted)

    def resumed(world):
        totals = make(kinds(), world)
        totals.load(rank_state.combine(saved, rank=world.rank, size=world.size))
        if world.rank == after - 1:
            add(totals, outputs[10:], targets[10:])
        return finish(totals, world)

    results = on_ranks(after, resumed)
    assert all(each == results[0] for each in results)
    assert_close(results[0], one_process(kinds(), outputs, targets))


@pytest.mark.parametrize("metric", [CountsInAttributes, OneNumberABatch])
def test_a_metric_that_parts_of_a_batch_change_is_refused_on_several_ranks(metric):
    def rank(world):
        totals = make([metric()], world)
        add(totals, data(1)[0][world.rank :], data(1)[1][world.rank :])  # a single sample has no parts
        with pytest.raises(ValueError, match=rf"{metric.__name__}, which gives .* rank {world.rank}.*add_state"):
            add(totals, *data(4, seed=world.rank))

    on_ranks(2, rank)
    alone = make([metric()], SoloWorld())
    add(alone, *data(8))
    assert np.isfinite(finish(alone, SoloWorld())[metric.__name__])


def test_a_result_that_so_few_samples_do_not_have_is_nan_until_the_epochs_end():
    def rank(world):
        totals = make([regression.R2Score()], world)
        if world.rank == 0:
            add(totals, torch.ones(1), torch.ones(1))
        live = finish(totals, world, live=True)
        local = totals.results(lambda vector: vector, live=True)
        add(totals, torch.arange(2.0), torch.arange(2.0))
        return live["R2Score"], local["R2Score"], finish(totals, world)["R2Score"]

    for live, local, final in on_ranks(2, rank):
        assert np.isnan(live)
        assert np.isnan(local)
        assert final == 1.0
    totals = make([regression.R2Score()], SoloWorld())
    add(totals, torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match="at least two samples"):
        finish(totals, SoloWorld())


@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 1), (1, 3), (3, 2)])
def test_counts_of_a_resumed_epoch_go_on_at_any_number_of_ranks(before, after):
    outputs, targets = data(21)

    def first(world):
        totals = make(metrics(), world)
        add(totals, outputs[world.rank : 10 : before], targets[world.rank : 10 : before])
        return totals.arrays()

    held = on_ranks(before, first)

    def second(world):
        totals = make(metrics(), world)
        mine = rank_state.combine(held, rank=world.rank, size=after)
        assert totals.load(mine)
        add(totals, outputs[10 + world.rank :: after], targets[10 + world.rank :: after])
        again = make(metrics(), world)  # what was resumed can be saved again
        assert again.load(totals.arrays())
        results = finish(totals, world)
        assert finish(again, world) == results
        return results

    assert_close(on_ranks(after, second)[0], one_process(metrics(), outputs, targets))


@pytest.mark.parametrize("others", [["mae"], ["mse", "mae"], [], {"other": torchmetrics.MeanSquaredError()}])
def test_an_epoch_does_not_resume_with_other_metrics(others):
    saved, resumed = (Totals(named_metrics(each, torch.nn.MSELoss()), CPU, SoloWorld()) for each in (["mse"], others))
    with pytest.raises(ValueError, match=r"within an epoch that counted loss, mse\. Received: loss.*epoch's end"):
        resumed.load(saved.arrays())
    assert not resumed.load({})
    assert saved.load({"sum.totals": np.ones(4)})  # an older checkpoint's
    assert saved.results(lambda vector: vector) == {"loss": 1.0, "mse": 1.0}


def test_a_metric_that_takes_a_mean_over_processes_is_refused_on_every_rank():
    class OfBatch(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("value", torch.tensor(0.0), "mean")

        def update(self, outputs, targets):
            self.value = outputs.mean()

        def compute(self):
            return self.value

    def rank(world):
        totals = make([OfBatch()], world)
        add(totals, *data(4, seed=world.rank))
        with pytest.raises(ValueError, match=r"OfBatch takes the mean of its state value.*add_state"):
            finish(totals, world)
        return True

    assert on_ranks(2, rank) == [True, True]


def test_a_state_that_cannot_travel_is_named_on_every_rank():
    class Words(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("words", [])

        def update(self, outputs, targets):
            self.words.append("word")

        def compute(self):
            return len(self.words)

    def rank(world):
        totals = make([Words()], world)
        if world.rank:
            add(totals, *data(2))
        with pytest.raises(TypeError if world.rank else HvdTrainError, match=r"must be tensors.*words of Words"):
            finish(totals, world)
        return True

    assert on_ranks(2, rank) == [True, True]


class Own:
    """A metric with state that names no reduction."""

    def __init__(self):
        self.largest = []

    def update(self, outputs, targets):
        self.largest.append(float(outputs.max()))

    def compute(self):
        return max(self.largest)

    def reset(self):
        self.largest = []


class Macro(torchmetrics.Metric):
    """A metric whose states name no reduction: add_state's default."""

    def __init__(self):
        super().__init__()
        self.add_state("correct", torch.zeros(CLASSES))
        self.add_state("total", torch.zeros(CLASSES))

    def update(self, outputs, targets):
        hits = torch.nn.functional.one_hot(targets, CLASSES)
        self.total += hits.sum(0)
        self.correct += hits[outputs.argmax(1) == targets].sum(0)

    def compute(self):
        return (self.correct / self.total).mean()  # of the states of all ranks, stacked, another number


def test_a_state_that_names_no_reduction_is_refused_on_several_ranks():
    make([Macro()], SoloWorld())
    make(regressions(), Threads(1, 2))  # torchmetrics' own combine stacked states themselves
    for metric in (Macro(), torchmetrics.MetricCollection([Macro()])):
        with pytest.raises(ValueError, match=r"no dist_reduce_fx for correct of Macro, on 2 rank"):
            make([metric], Threads(1, 2))


@pytest.mark.parametrize("metric", [Own(), wrappers.Running(regression.MeanSquaredError(), 2)])
def test_a_metric_without_a_known_reduction_is_refused_on_several_ranks(metric):
    with pytest.raises(ValueError, match=rf"{type(metric).__name__}.*on 2 rank\(s\).*one value per sample"):
        make([metric], Threads(1, 2))


def test_a_metric_without_a_known_reduction_works_on_one_process(caplog):
    outputs, targets = data(7)
    own = Own()
    totals = make([own], SoloWorld())
    add(totals, outputs, targets)
    assert finish(totals, SoloWorld())["Own"] == float(outputs.max())
    assert own.largest == []  # the user's object stays as it is
    totals.stateful.load(totals.stateful.arrays())
    add(totals, outputs, targets)
    assert np.isnan(finish(totals, SoloWorld())["Own"])
    assert "cannot be restored" in caplog.text
    totals.clear()
    add(totals, outputs, targets)
    assert finish(totals, SoloWorld())["Own"] == float(outputs.max())


def test_the_users_object_does_not_change():
    outputs, targets = data(8)
    own = torchmetrics.MetricCollection([classification.MulticlassF1Score(CLASSES), regression.MeanSquaredError()])
    own.update(targets, targets)
    before, settings = own.compute(), [dict(vars(each)) for each in own.modules()]
    totals = make([own["MulticlassF1Score"]], SoloWorld())
    add(totals, outputs, targets)
    finish(totals, SoloWorld())
    assert own.compute() == before
    for each, earlier in zip(own.modules(), settings, strict=True):
        assert {name: vars(each)[name] for name in ("distributed_available_fn",) if name in earlier} == {
            name: earlier[name] for name in ("distributed_available_fn",) if name in earlier
        }


def test_a_step_that_is_undone_leaves_no_counts():
    outputs, targets = data(12)
    totals = make(metrics(), SoloWorld())
    add(totals, outputs[:6], targets[:6])
    undo = totals.stateful.snapshot()
    numbers, counts = totals.sums.clone(), list(totals.counts)
    add(totals, *data(4, seed=9))
    undo()
    totals.sums.copy_(numbers)
    totals.counts = counts
    add(totals, outputs[6:], targets[6:])
    assert_close(finish(totals, SoloWorld()), one_process(metrics(), outputs, targets))


def test_only_sums_are_reported_during_an_epoch():
    def rank(world):
        totals = make(metrics(), world)
        add(totals, *data(6, seed=world.rank))
        live = finish(totals, world, live=True)
        return live, finish(totals, world)

    (live, final), _ = on_ranks(2, rank)
    assert {"loss", "accuracy", "multiclassrecall_a", "MulticlassConfusionMatrix/0"} <= set(live)
    assert not {"MulticlassAUROC", "m_ap", "others/0"} & set(live)
    assert live == {name: final[name] for name in live}


def test_batches_that_reuse_memory_are_counted_as_they_were():
    outputs, targets = data(8)
    totals, buffers = make([classification.MulticlassAUROC(CLASSES)], SoloWorld()), (outputs[:4] * 0, targets[:4] * 0)
    for begin in (0, 4):
        for buffer, each in zip(buffers, (outputs, targets), strict=True):
            buffer.copy_(each[begin : begin + 4])
        add(totals, *buffers)
    assert_close(finish(totals, SoloWorld()), one_process([classification.MulticlassAUROC(CLASSES)], outputs, targets))


@pytest.mark.parametrize("size", [1, 2])
def test_one_number_a_batch_is_refused(size):
    def scaled(outputs, targets):
        return (outputs.argmax(1) == targets).float().mean()

    totals = make([scaled], Threads(0, size) if size > 1 else SoloWorld())
    with pytest.raises(ValueError, match=r"one number for a batch of 4 from scaled, on rank 0.*before the mean.*F1Sc"):
        add(totals, *data(4))
    alone = make([scaled], SoloWorld())
    add(alone, *data(1))  # a mean over one sample is its value
    assert finish(alone, SoloWorld())["scaled"] in (0.0, 1.0)


@pytest.mark.parametrize(
    ("metric", "shape", "advice"),
    [
        (lambda outputs, targets: (outputs - targets).square(), (4, 4), "Give targets the shape of the outputs"),
        ("mse", (4, 4), "Give targets the shape of the outputs"),
        (lambda outputs, targets: (outputs[:, 0] - targets).abs().mean(0, keepdim=True), (1,), "before the mean"),
        (lambda outputs, targets: (outputs[:, 0] - targets)[:3], (3,), "before the mean"),
    ],
)
def test_values_that_are_not_one_per_sample_or_element_are_refused(metric, shape, advice):
    totals = make({"off": metric}, SoloWorld())
    with pytest.raises(
        ValueError, match=re.escape(f"shape {shape} from off, for outputs and targets of (4, 1) and (4,)")
    ):
        add(totals, torch.arange(4.0)[:, None], torch.arange(4.0))
    with pytest.raises(ValueError, match=advice):
        add(totals, torch.arange(4.0)[:, None], torch.arange(4.0))


@pytest.mark.parametrize("values", [lambda o, t: (o - t)[:, 0], lambda o, t: o - t, lambda o, t: (o - t).reshape(-1)])
def test_values_of_samples_and_of_elements_are_taken(values):
    totals = make({"error": values}, SoloWorld())
    add(totals, torch.ones(4, 3), torch.zeros(4, 3))
    assert finish(totals, SoloWorld())["error"] == 1.0


def test_metrics_are_named_by_a_dict_or_by_themselves():
    def hits(outputs, targets):
        return outputs.argmax(1) == targets

    own = classification.MulticlassF1Score(CLASSES)
    assert list(named_metrics({"a": own, "b": "accuracy", "c": hits}, None)) == ["a", "b", "c"]
    assert list(named_metrics([own, hits, "mse"], None)) == ["MulticlassF1Score", "hits", "mse"]
    assert list(named_metrics(own, None)) == ["MulticlassF1Score"]
    for twice in ([own, own.clone()], [hits, hits], {"loss": hits}):
        with pytest.raises(ValueError, match="name of its own"):
            named_metrics(twice, None)
    with pytest.raises(TypeError, match="Received: <class"):
        named_metrics([classification.MulticlassF1Score], None)
    collections = [torchmetrics.MetricCollection([own]), torchmetrics.MetricCollection([own])]
    totals = make(dict(zip("ab", collections, strict=True)), SoloWorld())
    add(totals, *data(4))
    with pytest.raises(ValueError, match="Two metrics are named MulticlassF1Score"):
        finish(totals, SoloWorld())


def test_a_curve_is_refused():
    totals = make([classification.MulticlassROC(CLASSES)], SoloWorld())
    add(totals, *data(6))
    with pytest.raises(TypeError, match="a tuple of 3 from MulticlassROC"):
        finish(totals, SoloWorld())


def test_no_samples_at_all_give_nan():
    def rank(world):
        return finish(make(metrics()[:2], world), world)

    assert list(on_ranks(2, rank)[0]) == ["loss", "MulticlassAUROC", "m_ap", "m_f1", "m_top2"]
