"""Small models of transformers with random weights, texts of uneven lengths, and Trainers for both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import hvdtrain.transformers

WORDS, CLASSES, IGNORED = 50, 3, -100


def texts(samples=22, seed=0):
    """Return samples of 2 to 9 tokens, each with a class and its number."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(2, 10, samples)
    return [
        {"input_ids": generator.integers(1, WORDS, n).tolist(), "label": int(generator.integers(CLASSES)), "number": i}
        for i, n in enumerate(lengths)
    ]


def padded(samples):
    length = max(len(each["input_ids"]) for each in samples)
    ids = torch.zeros(len(samples), length, dtype=torch.int64)
    for row, each in enumerate(samples):
        ids[row, : len(each["input_ids"])] = torch.tensor(each["input_ids"])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def for_classes(samples):
    return {**padded(samples), "labels": torch.tensor([each["label"] for each in samples])}


def for_language(samples):
    batch = padded(samples)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)}


def bert(seed=0, dropout=0.0, **options):
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=CLASSES, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, **options,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def tagger(seed=0):
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForTokenClassification(config)


def for_tags(samples):
    """A label for each token, and none in the second half of each 8 samples: of 2 ranks, one gets none."""
    batch = padded(samples)
    labels = (batch["input_ids"] % CLASSES).masked_fill(batch["attention_mask"] == 0, IGNORED)
    for row, each in enumerate(samples):
        if each["number"] % 8 >= 4:
            labels[row] = IGNORED
    return {**batch, "labels": labels}


def gpt2(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


COLLATE = {"BertForSequenceClassification": for_classes, "GPT2LMHeadModel": for_language}
DEFAULTS = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-3,  # transformers computes some losses in float32: smaller ones would show its rounding
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "warmup_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "dataloader_pin_memory": False,  # without a GPU torch warns of it
    "report_to": [],
    "disable_tqdm": True,
    "remove_unused_columns": False,
}


def trainer(model, folder, *, cls=None, samples=22, validation=13, data=None, collate=None, **options):
    """Return a Trainer of hvdtrain; options are those of Trainer and of its arguments."""
    cls = cls or hvdtrain.transformers.Trainer
    names = ("compute_metrics", "compute_loss_func", "callbacks", "optimizers", "eval_dataset", "model_init")
    given = {name: options.pop(name) for name in names if name in options}
    made = ours_or_theirs(cls)(output_dir=str(folder), **{**DEFAULTS, **options})
    collate = collate or COLLATE.get(type(model).__name__, for_language)
    given = {"eval_dataset": texts(validation, seed=1), **given}
    return cls(model=model, args=made, train_dataset=data or texts(samples), data_collator=collate, **given)


def ours_or_theirs(cls):
    is_ours = issubclass(cls, hvdtrain.transformers.TrainerOnRanks)
    return (hvdtrain.transformers if is_ours else transformers).TrainingArguments


def alone(model, folder, size, **options):
    """Return transformers' own Trainer of this process alone, which takes the batches of all ranks at once."""
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        options[name] = size * options.get(name, DEFAULTS[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)  # with use_cpu, accelerate would look for the others
        return trainer(model, folder, **{"cls": transformers.Trainer, **options})


def assert_equal(ours, theirs, tolerance=1e-6):
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            mine, other, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same_logs(ours, theirs, tolerance=1e-6):
    """All that both logged, but times and what counts padding."""
    left_out = ("runtime", "per_second", "flos", "preparation")
    assert [each["step"] for each in ours] == [each["step"] for each in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            if not any(words in name for words in left_out):
                assert abs(mine[name] - other[name]) <= tolerance * max(1, abs(other[name])), (name, mine, other)
