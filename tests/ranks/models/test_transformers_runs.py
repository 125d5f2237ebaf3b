"""hvdtrain.transformers: checkpoints, stops, and what several ranks refuse."""

from __future__ import annotations

import copy
import json
import re
import sys

import pytest
import torch
import transformers
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader, IterableDataset
from transformers_kit import alone, assert_equal, assert_same_logs, bert, for_language, gpt2, padded, texts, trainer

import hvdtrain.transformers
from hvdtrain.errors import DesyncError, HvdTrainError, OtherRankError
from hvdtrain.transformers.arguments import check_accelerator

pytestmark = pytest.mark.world_size(2, 3)

SAVING = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 3}


def weights(model):
    return {name: each.clone() for name, each in model.state_dict().items()}


def assert_same_bits(one, other):
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("options", [{}, {"train_sampling_strategy": "group_by_length"}], ids=str)
def test_a_resumed_run_equals_one_that_never_stopped(world, options, shared_tmp_path):
    # 40 samples, 4 a rank, 2 batches a step: checkpoints are within epochs. Dropout draws on each rank.
    options = {"samples": 41, **SAVING, **options}
    whole = trainer(gpt2(world.rank, dropout=0.2), shared_tmp_path, **options)
    whole.train()
    world.barrier()
    steps = sorted(int(each.name.partition("-")[2]) for each in shared_tmp_path.glob("checkpoint-*"))
    for step in steps[:-1]:
        again = trainer(gpt2(7, dropout=0.2), shared_tmp_path / f"again-{step}", **options)
        torch.rand(9)  # the states of a checkpoint must replace what a restarted script has drawn
        again.train(resume_from_checkpoint=str(shared_tmp_path / f"checkpoint-{step}"))
        assert_same_bits(weights(again.model), weights(whole.model))
        assert_same_logs(again.state.log_history, whole.state.log_history[:-1] + again.state.log_history[-1:], 0)


def test_rank_0_alone_writes_and_the_best_model_is_loaded_on_all_ranks(world, shared_tmp_path):
    options = {**SAVING, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1, "samples": 60}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "steps", "greater_is_better": False}
    written = []

    def metrics(_):
        written.append(ours.state.global_step)
        return {"steps": len(written)}  # the first is the best

    ours = trainer(bert(world.rank), shared_tmp_path, compute_metrics=metrics, **options)
    saved = torch.save
    writers = []

    def save(what, file, **given):
        writers.append(str(file))
        saved(what, file, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", save)
        ours.train()
    world.barrier()
    assert ours.state.best_model_checkpoint.endswith("checkpoint-2")
    best = transformers.BertForSequenceClassification.from_pretrained(shared_tmp_path / "checkpoint-2")
    assert_same_bits(weights(ours.model), weights(best))
    own = [each for each in writers if re.search(r"rng_state_\d+\.pth$", each)]
    assert own
    assert all(each.endswith(f"rng_state_{world.rank}.pth") for each in own)
    assert world.is_root or own == writers
    names = sorted(each.name for each in (shared_tmp_path / "checkpoint-2").iterdir())
    assert [f"rng_state_{rank}.pth" for rank in range(world.size)] == [each for each in names if "rng" in each]
    # What it saved names classes of transformers: it can be read where there is no hvdtrain.
    assert b"hvdtrain.transformers" not in (shared_tmp_path / "checkpoint-2" / "training_args.bin").read_bytes()


def test_a_checkpoint_of_one_process_is_resumed_by_ranks(world, shared_tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2}
    theirs = alone(gpt2().double(), shared_tmp_path / f"theirs-{world.rank}", world.size, **options)
    theirs.train()
    ours = trainer(gpt2(world.rank).double(), shared_tmp_path / "ours", **options)
    ours.train(resume_from_checkpoint=str(shared_tmp_path / "theirs-0" / "checkpoint-2"))
    assert_equal(ours.model, theirs.model)
    world.barrier()
    saved = json.loads((shared_tmp_path / "ours" / "checkpoint-4" / "trainer_state.json").read_text())
    assert saved["global_step"] == 4


def test_a_callback_that_stops_one_rank_stops_all(world, shared_tmp_path):
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2 and args.process_index == 1

        def on_log(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step == 1 and args.process_index == 0

    ours = trainer(bert(), shared_tmp_path, callbacks=[Stop()])
    ours.train()
    assert ours.state.global_step == 2
    assert ours.state.epoch > 1  # the first epoch was cut after its first step


def test_each_sample_is_seen_once_an_epoch(world, shared_tmp_path):
    seen = []

    def collate(samples):
        seen.extend(each["number"] for each in samples)
        return for_language(samples)

    for options in ({}, {"train_sampling_strategy": "group_by_length"}):
        ours = trainer(gpt2(), shared_tmp_path, collate=collate, num_train_epochs=1, samples=24, **options)
        ours.train()
        loader = ours.get_train_dataloader()  # which reads a few samples, for ranks to compare
        seen.clear()
        batches = list(loader)
        numbers = sorted(number for each in world.allgather_object(seen) for number in each)
        assert numbers == list(range(24))
        assert len(batches) == -(-24 // (4 * world.size))


def test_workers_read_the_same_batches(world, shared_tmp_path):
    losses = []
    for workers in (0, 2):
        ours = trainer(bert(), shared_tmp_path, dataloader_num_workers=workers, num_train_epochs=1)
        ours.train()
        losses.append([each["loss"] for each in ours.state.log_history if "loss" in each])
    assert losses[0] == losses[1]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers so
def test_a_lora_adapter_of_peft_trains_as_in_one_process(world, shared_tmp_path):
    from peft import LoraConfig, get_peft_model

    from hvdtrain.torch.reduction.reducer import Reducer

    def adapted(seed=0):
        model = gpt2()
        torch.manual_seed(seed)
        return get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)).double()

    options = {"save_strategy": "epoch", "collate": for_language}
    ours = trainer(adapted(world.rank), shared_tmp_path, **options)
    ours.train()
    reducer = ours.optimizer.optimizer._hvd_reducer
    assert isinstance(reducer, Reducer)
    sent = [name for parameter, name in reducer.names.items() if parameter in reducer.passes]
    assert sent
    assert all("lora_" in name for name in sent)
    theirs = alone(adapted(), shared_tmp_path / f"theirs-{world.rank}", world.size, **options)
    theirs.train()
    assert_equal(ours.model, theirs.model)
    world.barrier()
    again = trainer(adapted(world.rank + 5), shared_tmp_path / "again", **options)
    again.train(resume_from_checkpoint=str(sorted(shared_tmp_path.glob("checkpoint-*"))[0]))
    assert_same_bits(weights(again.model), weights(ours.model))


def test_seq2seq_generates_for_each_sample_once(world, shared_tmp_path):
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip

    def t5(seed=0):
        torch.manual_seed(seed)
        return transformers.T5ForConditionalGeneration(config).double()

    lengths = []

    def metrics(predictions):
        lengths.append((len(predictions.predictions), len(predictions.label_ids)))
        return {}

    args = {"output_dir": str(shared_tmp_path), "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    args |= {"predict_with_generate": True, "generation_max_length": 6, "remove_unused_columns": False}
    args |= {"num_train_epochs": 1, "dataloader_pin_memory": False, "optim": "sgd"}

    def fitted(cls, arguments, model, size):
        data = {"train_dataset": texts(22), "eval_dataset": texts(24, 1), "data_collator": for_language}
        made = arguments(per_device_train_batch_size=size, per_device_eval_batch_size=size, **args)
        found = cls(model=model, args=made, compute_metrics=metrics, **data)
        found.train()
        found.predict(texts(13, 1))
        return found, found.evaluate()  # of whole batches: one process counts a short last batch as a whole one

    ours, found = fitted(
        hvdtrain.transformers.Seq2SeqTrainer, hvdtrain.transformers.Seq2SeqTrainingArguments, t5(world.rank), 4
    )
    theirs, expected = fitted(transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments, t5(), 4 * world.size)
    assert_equal(ours.model, theirs.model)
    assert lengths == 2 * [(13, 13), (24, 24)]
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-6)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(texts())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
        ({"ddp_backend": "gloo"}, "ddp_backend"),
        ({"optim": "lomo"}, "LOMO"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_ranks_cannot_keep_are_refused(world, options, words, shared_tmp_path):
    with pytest.raises(ValueError, match=words):
        trainer(bert(), shared_tmp_path, **options)


@pytest.mark.world_size(2)
def test_what_brings_ranks_of_its_own_is_refused(world, shared_tmp_path):
    def changed(**values):
        def change(args):
            vars(args).update(values)
            return args

        return change

    cases = {
        "deepspeed, fsdp": changed(deepspeed={"zero_optimization": {"stage": 2}}),
        "fsdp or parallelism_config": changed(fsdp="full_shard"),
        "dataloader_in_order=False": changed(dataloader_in_order=False),
        "enable_jit_checkpoint": changed(enable_jit_checkpoint=True),
        'include_for_metrics="inputs"': changed(batch_eval_metrics=True, include_for_metrics=["inputs"]),
    }
    made = trainer(bert(), shared_tmp_path)
    for words, change in cases.items():
        args = change(copy.copy(made.args))
        with pytest.raises(ValueError, match=f"takes no .*{words}"):
            hvdtrain.transformers.Trainer(model=bert(), args=args, data_collator=made.data_collator)
    with pytest.raises(ValueError, match="there is no hyperparameter_search"):
        made.hyperparameter_search(lambda trial: {})
    made.accelerator.state.distributed_type = DistributedType.FSDP
    with pytest.raises(ValueError, match="Unset the variables that begin with ACCELERATE_"):
        check_accelerator(made.accelerator, world)


@pytest.mark.world_size(2)
def test_a_training_step_that_computes_its_loss_elsewhere_is_refused(world, shared_tmp_path):
    class Elsewhere(transformers.Trainer):
        def training_step(self, model, inputs, *args):
            loss = model(**self._prepare_inputs(inputs)).loss
            self.accelerator.backward(loss)
            return loss.detach()

    class Mine(hvdtrain.transformers.TrainerOnRanks, Elsewhere):
        pass

    with pytest.raises(HvdTrainError, match=r"training_step must compute its loss by self\.compute_loss"):
        trainer(bert(), shared_tmp_path, cls=Mine).train()


@pytest.mark.world_size(2)
def test_another_version_of_transformers_is_refused_with_what_it_lacks(world):
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(transformers.Trainer, "_track_num_input_tokens")
        with pytest.raises(HvdTrainError, match=r"without Trainer\._track_num_input_tokens"):
            hvdtrain.transformers.host.check()


@pytest.mark.world_size(2)
def test_trainings_one_after_the_other_average_once(world, shared_tmp_path):
    def collate(samples):  # with what is no tensor, where a rank's last batch stands for none
        return {**for_language(samples), "use_cache": False}

    mine, other = gpt2(world.rank).double(), gpt2().double()
    options = {"samples": 20, "collate": collate, "num_train_epochs": 1}
    for passes in (1, 2):  # two Trainers of one model
        ours = trainer(mine, shared_tmp_path, gradient_accumulation_steps=passes, **options)
        ours.train()
    ours.train()
    ours.end()
    for passes in (1, 2):
        theirs = alone(other, shared_tmp_path / "alone", world.size, gradient_accumulation_steps=passes, **options)
        theirs.train()
    theirs.train()
    assert_equal(mine, other)


def test_arguments_without_ranks_are_refused(world, shared_tmp_path):
    args = transformers.TrainingArguments(output_dir=str(shared_tmp_path), report_to=[])
    with pytest.raises(ValueError, match=r"each would train alone. Use hvdtrain.transformers.TrainingArguments"):
        hvdtrain.transformers.Trainer(model=bert(), args=args)


def test_data_that_ranks_cannot_share_are_refused(world, shared_tmp_path):
    with pytest.raises((ValueError, OtherRankError), match="Ranks cannot share an IterableDataset"):
        trainer(bert(), shared_tmp_path, data=Stream(), max_steps=2).train()
    with pytest.raises(DesyncError, match="samples is 20 on rank 0 but 21 on rank 1"):
        trainer(bert(), shared_tmp_path, data=texts(20 + world.rank)).train()
    with pytest.raises(DesyncError, match="Ranks disagree on the data"):
        trainer(bert(), shared_tmp_path, data=texts(20, seed=world.rank)).train()

    class Mine(hvdtrain.transformers.Trainer):
        def get_train_dataloader(self):
            return DataLoader(texts(), batch_size=4, collate_fn=self.data_collator)

    with pytest.raises(ValueError, match="get_train_dataloader returned a DataLoader with all of the data"):
        trainer(bert(), shared_tmp_path, cls=Mine).train()


def test_a_loss_of_which_a_part_is_divided_by_the_count_is_refused(world, shared_tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        return outputs.logits.square().mean() + outputs.logits.square().sum() / num_items_in_batch

    with pytest.raises(HvdTrainError, match="A part of the loss is divided by num_items_in_batch and another is not"):
        trainer(bert(), shared_tmp_path, compute_loss_func=loss).train()


def test_torch_distributed_is_horovods(world, shared_tmp_path):
    hook = sys.excepthook
    trainer(bert(), shared_tmp_path)
    assert sys.excepthook is hook
    assert hook.__name__ != "_distributed_excepthook"  # torch's would swallow what ours prints
    value = torch.tensor([world.rank + 1.0])
    torch.distributed.all_reduce(value)
    assert value.item() == sum(range(1, world.size + 1))
    found = [None] * world.size
    torch.distributed.all_gather_object(found, {"rank": world.rank})
    assert [each["rank"] for each in found] == list(range(world.size))
    sent = [world.rank]
    torch.distributed.broadcast_object_list(sent, src=1)
    assert sent == [1]


def test_a_model_with_weights_that_one_batch_does_not_use(world, shared_tmp_path):
    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.words = torch.nn.Embedding(50, 4)
            self.parts = torch.nn.ModuleList(torch.nn.Linear(4, 3) for _ in range(2))

        def forward(self, input_ids, attention_mask, labels):
            which = int(input_ids[0, 0]) % 2
            logits = self.parts[which](self.words(input_ids).mean(1))
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    def collate(samples):
        return {**padded(samples), "labels": torch.tensor([each["label"] for each in samples])}

    ours = trainer(Branches(), shared_tmp_path, collate=collate, gradient_accumulation_steps=3)
    ours.train()
    mine = [float(each.detach().double().sum()) for each in ours.model.parameters()]
    assert all(each == mine for each in world.allgather_object(mine))
