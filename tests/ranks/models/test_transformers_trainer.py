"""hvdtrain.transformers: N ranks train the weights of transformers' own Trainer in one process."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers_kit import (
    CLASSES,
    IGNORED,
    alone,
    assert_equal,
    assert_same_logs,
    bert,
    for_language,
    for_tags,
    gpt2,
    padded,
    tagger,
    trainer,
)

import hvdtrain.transformers
from hvdtrain.distributed.world import SoloWorld, use

pytestmark = pytest.mark.world_size(2, 3)


PAGE = Path(__file__).parents[3] / "docs/pages/transformers-trainer.md"


def both(world, make, folder, **options):
    """Train on the ranks and in one process, in float64; return both Trainers and what train() returned."""
    ours = trainer(make(seed=world.rank).double(), folder, **options)
    result = ours.train()
    theirs = alone(make().double(), folder / "alone", world.size, **options)
    expected = theirs.train()
    return ours, theirs, result, expected


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (bert, {}),
        (gpt2, {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"}),
        (bert, {"gradient_accumulation_steps": 2, "dataloader_drop_last": True}),
        (bert, {"label_smoothing_factor": 0.1, "max_grad_norm": 0.0}),
        (gpt2, {"label_smoothing_factor": 0.1}),
        (gpt2, {"samples": 25, "max_steps": 5, "logging_steps": 2}),
        (bert, {"samples": 1, "validation": 1}),  # fewer samples than ranks
        (gpt2, {"samples": 1, "validation": 1, "include_num_input_tokens_seen": "non_padding"}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "-".join(value) or "plain",
)
def test_ranks_train_as_one_process(world, make, options, shared_tmp_path):
    ours, theirs, result, expected = both(world, make, shared_tmp_path, eval_strategy="epoch", **options)
    assert ours.state.global_step == theirs.state.global_step > 0
    assert_equal(ours.model, theirs.model)
    assert_same_logs(ours.state.log_history, theirs.state.log_history)
    assert result.training_loss == pytest.approx(expected.training_loss, abs=1e-6)


def test_a_loss_that_ignores_the_count_of_labels_is_not_multiplied_by_ranks(world, shared_tmp_path):
    # Its signature promises to divide by num_items_in_batch, as most models' do; mean squared errors do not.
    def make(seed=0):
        return bert(seed, problem_type="regression")

    def collate(samples):
        labels = torch.tensor([[each["label"]] * 3 for each in samples], dtype=torch.float64)
        return {**padded(samples), "labels": labels}

    ours, theirs, *_ = both(world, make, shared_tmp_path, collate=collate, gradient_accumulation_steps=2)
    assert_equal(ours.model, theirs.model)
    assert_same_logs(ours.state.log_history, theirs.state.log_history)


@pytest.mark.parametrize("divides", [True, False])
def test_a_loss_of_the_users_own_counts_as_in_one_process(world, divides, shared_tmp_path):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        how = "sum" if divides else "mean"
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction=how)
        loss = loss / num_items_in_batch * self.accelerator.num_processes if divides else loss
        return (loss, outputs) if return_outputs else loss

    def cls(base):
        return type("Mine", (base,), {"compute_loss": compute_loss})

    options = {"gradient_accumulation_steps": 2}
    ours = trainer(bert(world.rank).double(), shared_tmp_path, cls=cls(hvdtrain.transformers.Trainer), **options)
    ours.train()
    theirs = alone(bert().double(), shared_tmp_path / "alone", world.size, cls=cls(transformers.Trainer), **options)
    theirs.train()
    assert_equal(ours.model, theirs.model)


def test_a_mean_over_samples_counts_samples_and_not_labels(world, shared_tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        each = torch.nn.functional.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="none")
        return (each.sum(1) / (labels != IGNORED).sum(1)).mean()

    def collate(samples):  # texts of uneven lengths: a label for each token
        batch = for_language(samples)
        return {**batch, "labels": batch["labels"].where(batch["labels"] == IGNORED, batch["labels"] % CLASSES)}

    for passes in (1, 2):
        ours, theirs, *_ = both(
            world, tagger, shared_tmp_path, collate=collate, compute_loss_func=loss, eval_strategy="epoch",
            gradient_accumulation_steps=passes,
        )  # fmt: skip
        assert_equal(ours.model, theirs.model)
        assert_same_logs(ours.state.log_history, theirs.state.log_history)


@pytest.mark.world_size(2)
def test_a_rank_whose_batch_has_no_label_does_not_count(world, shared_tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):  # of no label it is not a number
        return torch.nn.functional.cross_entropy(outputs.logits.transpose(1, 2), labels)

    def cls(base):
        def in_order(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        return type("InOrder", (base,), {"_get_train_sampler": in_order})

    options = {"collate": for_tags, "samples": 24, "compute_loss_func": loss, "eval_strategy": "epoch"}
    ours = trainer(tagger(world.rank).double(), shared_tmp_path, cls=cls(hvdtrain.transformers.Trainer), **options)
    ours.train()
    theirs = alone(tagger().double(), shared_tmp_path / "alone", world.size, cls=cls(transformers.Trainer), **options)
    theirs.train()
    assert_equal(ours.model, theirs.model)
    assert_same_logs(ours.state.log_history, theirs.state.log_history)


def test_compute_loss_func_counts_as_in_one_process(world, shared_tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch

    ours, theirs, *_ = both(world, bert, shared_tmp_path, compute_loss_func=loss, gradient_accumulation_steps=2)
    assert_equal(ours.model, theirs.model)


def test_metrics_see_each_sample_once_and_predictions_are_in_order(world, shared_tmp_path):
    seen = []

    def metrics(predictions):
        seen.append(predictions)
        return {"accuracy": float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())}

    model = bert(world.rank).double()
    ours = trainer(model, shared_tmp_path, compute_metrics=metrics)
    found = ours.evaluate()
    predicted = ours.predict(ours.eval_dataset)
    expected = alone(model, shared_tmp_path / "alone", world.size, compute_metrics=metrics).evaluate()
    np.testing.assert_allclose(seen[0].predictions, seen[2].predictions, atol=1e-12)
    np.testing.assert_array_equal(seen[0].label_ids, [each["label"] for each in ours.eval_dataset])
    np.testing.assert_array_equal(predicted.predictions, seen[0].predictions)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-9)
    assert found["eval_accuracy"] == expected["eval_accuracy"]


@pytest.mark.world_size(2)
def test_evaluation_with_other_options_equals_one_process(world, shared_tmp_path):
    def metrics(found):
        inputs, losses = (
            0 if each is None else float(np.asarray(each).clip(0).sum()) for each in (found.inputs, found.losses)
        )
        return {"samples": len(found.predictions), "inputs": inputs, "losses": losses}

    model = bert(world.rank).double()
    for options in (
        {"eval_use_gather_object": True},
        {"include_for_metrics": ["inputs", "loss"], "eval_accumulation_steps": 1},
    ):
        ours = trainer(model, shared_tmp_path, compute_metrics=metrics, **options).evaluate()
        theirs = alone(model, shared_tmp_path / "alone", world.size, compute_metrics=metrics, **options).evaluate()
        for name in ("loss", "samples", "inputs", "losses"):
            assert ours[f"eval_{name}"] == pytest.approx(theirs[f"eval_{name}"], abs=1e-9)


@pytest.mark.world_size(2)
def test_an_evaluation_without_the_count_takes_the_loss_for_a_mean(world, shared_tmp_path):
    def prediction_step(self, model, inputs, *args, **kwargs):  # as in older versions of transformers
        with torch.no_grad():
            loss, outputs = self.compute_loss(model, self._prepare_inputs(inputs), return_outputs=True)
        return loss.detach(), outputs.logits, inputs["labels"]

    class Older(transformers.Trainer):
        pass

    class Mine(hvdtrain.transformers.TrainerOnRanks, Older):
        pass

    Older.prediction_step = prediction_step
    ours = trainer(gpt2(world.rank).double(), shared_tmp_path, cls=Mine, eval_strategy="epoch")
    ours.train()  # with the count, the same loss is a sum
    theirs = alone(gpt2().double(), shared_tmp_path / "alone", world.size, cls=Older, eval_strategy="epoch")
    theirs.train()
    assert_same_logs(ours.state.log_history, theirs.state.log_history)


def test_a_loop_of_the_users_own_gathers_each_sample_once(world, shared_tmp_path):
    ours = trainer(bert(), shared_tmp_path, per_device_eval_batch_size=1, validation=world.size + 1)
    numbers = [ours.accelerator.gather_for_metrics(batch["labels"]) for batch in ours.get_eval_dataloader()]
    assert torch.cat(numbers).tolist() == [each["label"] for each in ours.eval_dataset]


@pytest.mark.parametrize("options", [{"batch_eval_metrics": True}, {"eval_do_concat_batches": False}], ids=str)
def test_metrics_by_batch_see_each_sample_once(world, options, shared_tmp_path):
    numbers, results = [], []

    def metrics(predictions, compute_result=True):
        labels = predictions.label_ids
        numbers.append(sum(map(len, labels)) if isinstance(labels, list) else len(labels))
        results.append(compute_result)
        return {"samples": sum(numbers)}

    ours = trainer(bert(), shared_tmp_path, compute_metrics=metrics, **options)
    assert ours.evaluate()["eval_samples"] == len(ours.eval_dataset)
    assert sum(results) == 1


def test_arguments_know_the_ranks(world, shared_tmp_path):
    ours = trainer(bert(), shared_tmp_path)
    args = ours.args
    assert (args.world_size, args.process_index, args.local_process_index) == (world.size, world.rank, world.local_rank)
    assert args.should_save == args.should_log == ours.is_world_process_zero() == world.is_root
    assert ours.get_total_train_batch_size(args) == 4 * world.size
    assert torch.distributed.get_world_size() == world.size
    with args.main_process_first():
        if world.is_root:
            (shared_tmp_path / "first").touch()
        assert (shared_tmp_path / "first").exists()


def test_one_process_trains_as_transformers_does(world, shared_tmp_path):
    use(SoloWorld())
    try:
        ours = trainer(gpt2(), shared_tmp_path / f"ours-{world.rank}", gradient_accumulation_steps=2)
        ours.train()
        assert ours.args.world_size == 1
    finally:
        use(world)
    theirs = alone(gpt2(), shared_tmp_path / f"theirs-{world.rank}", 1, gradient_accumulation_steps=2)
    theirs.train()
    assert_equal(ours.model, theirs.model, tolerance=0)
    assert_same_logs(ours.state.log_history, theirs.state.log_history, tolerance=0)


@pytest.mark.parametrize("precision", ["bf16", "recomputed"])
def test_bf16_and_recomputed_activations_train_as_in_one_process(world, precision, shared_tmp_path):
    # In bf16 a sum over ranks is not rounded as the sum of one process: losses agree, weights nearly.
    is_new = hasattr(
        transformers.TrainingArguments, "activation_checkpointing"
    )  # in older versions it has another name
    word = "activation_checkpointing" if is_new else "gradient_checkpointing"
    options = {"bf16" if precision == "bf16" else word: True, "use_cpu": True, "optim": "sgd", "learning_rate": 0.1}
    ours, theirs, *_ = both(world, bert, shared_tmp_path, **options)
    assert_equal(ours.model, theirs.model, tolerance=1e-2 if precision == "bf16" else 1e-6)
    assert getattr(ours.model, f"is_{word}") == (precision == "recomputed")
    assert ours.accelerator.mixed_precision == ("bf16" if precision == "bf16" else "no")


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")  # of torch, without a GPU
def test_the_script_of_the_page_trains(world, shared_tmp_path, tmp_path, monkeypatch):
    script = tmp_path / "train_language_model.py"
    script.write_text(PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0])
    monkeypatch.chdir(shared_tmp_path)
    ours = runpy.run_path(str(script))["trainer"]
    losses = [each["eval_loss"] for each in ours.state.log_history if "eval_loss" in each]
    assert losses[1] < losses[0]
    assert ours.state.global_step == 2 * -(-200 // (8 * world.size))
    world.barrier()
    saved = transformers.GPT2LMHeadModel.from_pretrained("language_model/best").state_dict()
    assert all(torch.equal(saved[name], each) for name, each in ours.model.state_dict().items())
