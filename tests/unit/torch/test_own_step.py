"""A step of the user's own: batches of any form, what it returns, and errors, on one process."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import hvdtrain
from hvdtrain.data.sources import Batch
from hvdtrain.data.trees import num_rows
from hvdtrain.torch.steps.compute import describe, move

X = torch.arange(40, dtype=torch.float32).reshape(10, 4) / 40
Y = torch.arange(10) % 3
QUIET = {"progress": False, "run_dir": None}


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor

    def __len__(self):
        return len(self.x)


class Rows(IterableDataset):
    """Batches as they come."""

    def __init__(self, *batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def loader(*batches):
    return DataLoader(Rows(*batches), batch_size=None, collate_fn=lambda batch: batch)


def loss_of(outputs, targets, **options):
    mean = torch.nn.functional.cross_entropy(outputs, targets)
    return hvdtrain.Loss(mean, outputs=outputs, targets=targets, **options)


def pass_on(model, batch):
    return hvdtrain.Loss(model(X).mean(), outputs=batch[0], targets=batch[1])


def dict_step(model, batch):
    return loss_of(model(batch["x"]), batch["y"])


def pairs():
    return [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]


@pytest.fixture
def own(make):
    """Return what makes a Trainer with a step."""

    def trainer(step, model=None, **options):
        torch.manual_seed(0)
        return make(model, loss=None, step=step, **options)

    return trainer


@pytest.mark.parametrize(
    "data",
    [pairs(), DataLoader(pairs(), batch_size=4), {"x": X, "y": Y}, DataLoader(pairs(), batch_sampler=[[0, 1], [2]])],
    ids=["dataset", "loader", "arrays", "batch sampler"],
)
def test_a_step_takes_dicts(own, data):
    trainer = own(dict_step, metrics=["accuracy"])
    history = trainer.fit(data, validation=data, epochs=2, batch_size=4, **QUIET)
    assert history["loss"][1] < history["loss"][0]
    assert set(trainer.evaluate(data)) == {"loss", "accuracy"}


@pytest.mark.parametrize(
    ("batch", "split"),
    [
        (Pair(X, Y), lambda b: (b.x, b.y)),
        (collections.UserDict(x=X, y=Y), lambda b: (b.data["x"], b["y"])),
        ((X, Y, X, X), lambda b: (b[0] + 0 * b[3], b[1])),
        ({"in": (X, [X]), "y": Y, "names": ["a"] * 10}, lambda b: (b["in"][1][0], b["y"])),
        (X, lambda b: (b, b.argmax(1) % 3)),
    ],
    ids=["dataclass", "mapping", "tuple of 4", "nested", "no targets"],
)
def test_a_batch_keeps_its_form(own, batch, split):
    kinds = []

    def step(model, given):
        kinds.append(type(given))
        return loss_of(model(split(given)[0]), split(given)[1])

    trainer = own(step)
    trainer.fit(loader(batch, batch), epochs=2, **QUIET)
    assert set(kinds) == {type(batch)}


def test_the_default_step_and_an_own_one_take_the_same_steps(own, make):
    trained = []
    for options in ({"step": lambda model, batch: loss_of(model(batch[0]), batch[1])}, {"step": None}):
        torch.manual_seed(0)
        loss = None if options["step"] else torch.nn.CrossEntropyLoss()
        trainer = make(loss=loss, metrics=["accuracy"], clip_norm=0.5, **options)
        history = trainer.fit((X, Y), epochs=3, batch_size=4, **QUIET)
        trained.append((history["loss"], history["accuracy"], *trainer.model.parameters()))
    assert trained[0][:2] == trained[1][:2]
    assert all(torch.equal(one, other) for one, other in zip(trained[0][2:], trained[1][2:], strict=True))


def test_counts_weigh_the_batches_of_a_step(own):
    counts = iter([1.0, 5.0, 0.5])

    def step(model, batch):
        return hvdtrain.Loss(model(batch).mean(), next(counts))

    model = torch.nn.Linear(4, 1, bias=False)
    start = model.weight.detach().clone()
    trainer = own(step, model, accumulate=3)
    history = trainer.fit(loader(*X.split([1, 4, 5])), **QUIET)
    expected = sum(c * part.mean(0) for c, part in zip([1.0, 5.0, 0.5], X.split([1, 4, 5]), strict=True)) / 6.5
    torch.testing.assert_close(model.weight, start - 0.1 * expected[None])
    assert history["loss"][0] == pytest.approx(float((start @ expected).detach()))


def test_metrics_take_the_samples_of_batches_with_count_0(own):
    parts = X.split([4, 4, 2])
    counts = {len(part): 0 for part in parts[:2]} | {2: 2}

    def step(model, batch):
        count = counts[len(batch)]
        mean = model(batch).mean() * (1.0 if count else float("nan"))
        return hvdtrain.Loss(mean, count, outputs=batch, targets=batch)

    def last(outputs, _):
        return outputs[:, 3]

    trainer = own(step, accumulate=3, metrics=[last])
    history = trainer.fit(loader(*parts), validation=loader(*parts), **QUIET)
    for name in ("last", "val_last"):
        assert history[name][0] == pytest.approx(float(X[:, 3].mean()))
    assert np.isfinite([history["loss"][0], history["val_loss"][0]]).all()


def test_predict_calls_the_model_by_name(own):
    class Named(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, x, y=None):
            return {"loss": torch.tensor(1.0), "logits": self.layer(x), "cache": object()}

    model = Named()
    trainer = own(lambda model, batch: loss_of(model(**batch)["logits"], batch["y"]), model)
    torch.testing.assert_close(torch.from_numpy(trainer.predict(pairs(), batch_size=4)["logits"]), model.layer(X))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            torch.ones(2),
            r"must return a hvdtrain.Loss. Received: \(2,\) float32 on rank 0(.|\n)*def step\(model, batch\)",
        ),
        (None, "must return a hvdtrain.Loss. Received: a NoneType on rank 0"),
        (
            hvdtrain.Loss(torch.ones(2)),
            r"Loss.mean must be a tensor of one element.*Received: \(2,\) float32 on rank 0",
        ),
        (hvdtrain.Loss(1.0), "Loss.mean must be a tensor of one element.*Received: a float"),
        (hvdtrain.Loss(torch.ones(()), -1), r"Loss.count must be .* >= 0. Received: count=-1 on rank 0"),
        (hvdtrain.Loss(torch.ones(()), float("nan")), "Loss.count must be .*count=nan"),
    ],
)
def test_what_a_step_must_return(own, returned, message):
    with pytest.raises((TypeError, ValueError), match=message):
        own(lambda model, batch: returned).fit((X, Y), **QUIET)


def test_nothing_counts_in_a_step(own):
    with pytest.raises(ValueError, match=r"Nothing counts in this step.*Received: 10 samples"):
        own(lambda model, batch: loss_of(model(batch[0]), batch[1], count=0)).fit((X, Y), **QUIET)


def test_metrics_need_outputs_and_targets(own):
    def step(model, batch):
        return hvdtrain.Loss(model(batch[0]).mean(), outputs=model(batch[0]))

    own(step).fit((X, Y), **QUIET)
    with pytest.raises(ValueError, match=r"Metrics take outputs and targets from step: return hvdtrain.Loss"):
        own(step, metrics=["accuracy"]).fit((X, Y), **QUIET)


def test_a_loss_or_a_step(make):
    with pytest.raises(ValueError, match="loss= or step=, not both"):
        make(step=dict_step)
    with pytest.raises(TypeError, match="or give step="):
        make(loss=None)
    with pytest.raises(TypeError, match="step must be a callable"):
        make(loss=None, step=3)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"input_ids": X, "labels": Y},
            r"a dict of input_ids \(10, 4\) float32, labels \(10,\) int64(.|\n)*model\(\*\*batch\)",
        ),
        (
            {"input_ids": X, "labels": Y[:, None].repeat(4, 1)},
            r"hvdtrain\.Loss\(out\.loss, count=\(batch\['labels'\] != -100\)\.sum\(\), \*\*metrics\)",
        ),
        ({"x": X, "y": Y}, r"a dict of x (.|\n)*model\(batch\['x'\]\), batch\['y'\]"),
        ((X, Y, X, X), r"a tuple of 4: \(10, 4\) float32, (.|\n)*part0, part1, part2, part3 = batch"),
        ((X, Y, X), r"weigh samples in your own loss(.|\n)*x, y, weight = batch"),
        (X, r"Received: \(10, 4\) float32 on rank 0(.|\n)*my_loss\(model, batch\)"),
    ],
    ids=["labels", "tokens", "dict", "tuple", "weight", "no targets"],
)
def test_a_batch_that_the_default_step_cannot_take_is_shown_a_step(make, batch, message):
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        make().fit(loader(batch), **QUIET)
    assert "def step(model, batch):" in str(caught.value)


def test_an_error_of_a_model_of_plain_batches_stays_as_it_is(make):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        make(torch.nn.Linear(7, 3)).fit((X, Y), **QUIET)


def test_move_leaves_the_batch_as_it_was_and_lets_packed_sequences_move_themselves():
    packed = torch.nn.utils.rnn.pack_sequence([X[0], X[1]])
    batch = {"x": X, "packed": packed, "n": 3}
    moved = move(lambda leaf: leaf * 2 if isinstance(leaf, torch.Tensor) else leaf, batch)
    assert moved["x"] is not X
    assert batch["x"] is X
    assert moved["packed"] is packed
    assert moved["n"] == 3


def test_samples_are_counted_in_containers_of_any_kind():
    assert num_rows(collections.UserDict(x=X)) == 10
    assert num_rows(Pair(X, Y)) == 10
    assert num_rows((np.float32(1), X)) == 10
    with pytest.raises(TypeError, match="give it a __len__"):
        num_rows(object())


def test_describe_names_what_is_in_a_batch():
    assert describe([X, {"a": [X]}, 3]) == "a list of 3: (10, 4) float32, a dict of a a list, a int"
    assert describe(dict.fromkeys(range(10), Y)).endswith("7 (10,) int64 and 2 more")


def test_an_own_step_reads_no_batch_before_it_runs(own):
    """Ranks may hold batches that have nothing in common with arrays."""
    batch = Pair("words", ["more"] * 10)
    seen = []

    def step(model, given):
        seen.append(given)
        return hvdtrain.Loss(model(X).mean())

    own(step).fit(loader(batch), **QUIET)
    assert seen == [batch]


@pytest.mark.parametrize("shape", [(6, 5, 3), (6, 3, 5), (6, 3)])
def test_accuracy_finds_the_classes_of_an_own_step(own, shape):
    outputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    axis = 2 if shape[-1] == 3 and len(shape) == 3 else 1
    targets = outputs.argmax(axis)
    targets[0], targets[1] = -100, (targets[1] + 1) % 3
    trainer = own(
        lambda model, batch: hvdtrain.Loss(model(X).mean(), outputs=batch[0], targets=batch[1]), metrics="accuracy"
    )
    assert trainer.evaluate((outputs, targets))["accuracy"] == pytest.approx(0.8)


def test_accuracy_remembers_the_axis_of_classes_where_a_batch_does_not_show_it(own):
    trainer = own(pass_on, metrics="accuracy")
    outputs = [torch.eye(3)[torch.randint(3, (6, tokens))] for tokens in (5, 3)]
    batches = [(each, each.argmax(-1)) for each in outputs]
    assert trainer.evaluate(loader(*batches))["accuracy"] == 1.0


def test_a_step_may_compute_a_gradient_that_its_loss_needs(own):
    def step(model, batch):
        with torch.enable_grad():
            x = batch["x"].clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            return hvdtrain.Loss((slope**2).mean())

    history = own(step).fit({"x": X, "y": Y}, validation={"x": X, "y": Y}, **QUIET)
    assert history["val_loss"][-1] > 0


def test_validation_sets_like_the_training_data_are_sets(own):
    given = {"clean": {"x": X, "y": Y}, "noisy": {"x": X[:4], "y": Y[:4]}}
    history = own(dict_step).fit({"x": X, "y": Y}, validation=given, **QUIET)
    assert {"val_clean_loss", "val_noisy_loss"} < history.keys()


def test_accuracy_does_not_guess_the_axis_of_classes(own):
    trainer = own(
        lambda model, batch: hvdtrain.Loss(model(X).mean(), outputs=batch[0], targets=batch[1]), metrics="accuracy"
    )
    for outputs, targets in (((6, 3, 3), (6, 3)), ((6, 3), (6, 2))):
        with pytest.raises(ValueError, match="reshape"):
            trainer.evaluate((torch.zeros(outputs), torch.zeros(targets, dtype=torch.long)))


@pytest.mark.usefixtures("alone")
def test_a_loss_of_no_rows_must_be_finite_where_other_ranks_wait_for_its_backward():
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, step=lambda model, x: hvdtrain.Loss(model(x).mean()))
    with pytest.raises(ValueError, match="must be finite also on a rank where nothing counts"):
        trainer._adapter._run_empty(Batch(item=X))
