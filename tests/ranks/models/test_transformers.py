"""Models of Hugging Face's transformers, as their users train them: N ranks train the weights of one process."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import hvdtrain

pytestmark = pytest.mark.world_size(2, 3)

BATCH, SAMPLES, WORDS, CLASSES = 4, 22, 50, 3
IGNORED = -100  # of labels, as transformers has it


def texts(seed=0):
    """Return samples of 2 to 9 tokens, each with a class, as a tokenizer would make them."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(2, 10, SAMPLES)
    return [
        {"input_ids": generator.integers(1, WORDS, length).tolist(), "label": int(generator.integers(CLASSES))}
        for length in lengths
    ]


def padded(samples):
    """Return a dict batch, padded to its longest text: input_ids and attention_mask (batch, length)."""
    length = max(len(each["input_ids"]) for each in samples)
    ids = torch.zeros(len(samples), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, each in enumerate(samples):
        ids[row, : len(each["input_ids"])] = torch.tensor(each["input_ids"])
        mask[row, : len(each["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask}


def for_classes(samples):
    return {**padded(samples), "labels": torch.tensor([each["label"] for each in samples])}


def for_language(samples):
    batch = padded(samples)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)}


def bert(seed=0):
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def gpt2(seed=0):
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def optimizer_of(model):
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1, momentum=0.9)


def classify(model, batch):
    out = model(**batch)
    return hvdtrain.Loss(out.loss, outputs=out.logits, targets=batch["labels"])


def predict_words(model, batch):
    out = model(**batch)
    return hvdtrain.Loss(out.loss, count=(batch["labels"][:, 1:] != IGNORED).sum())


def train_alone(model, collate, *, size, accumulate=1, epochs=2):
    """Train in plain PyTorch: one step over the samples of all ranks."""
    optimizer, samples = optimizer_of(model), texts()
    per_step = BATCH * size * accumulate
    for _ in range(epochs):
        for begin in range(0, SAMPLES, per_step):
            optimizer.zero_grad()
            model(**collate(samples[begin : begin + per_step])).loss.backward()
            optimizer.step()


def fit(model, collate, step, *, accumulate=1, epochs=2, callbacks=(), **options):
    trainer = hvdtrain.Trainer(model, optimizer=optimizer_of(model), step=step, accumulate=accumulate, **options)
    data = DataLoader(texts(), batch_size=BATCH, collate_fn=collate)
    history = trainer.fit(data, epochs=epochs, callbacks=callbacks, run_dir=None, progress=False)
    return trainer, history


def assert_equal(ours, alone):
    for (name, mine), theirs in zip(ours.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_bert_takes_dict_batches(world, accumulate):
    ours, alone = bert(seed=world.rank), bert()
    trainer, _ = fit(ours, for_classes, classify, accumulate=accumulate, metrics=["accuracy"])
    train_alone(alone, for_classes, size=world.size, accumulate=accumulate)
    assert_equal(ours, alone)
    # 22 samples: ranks hold unequal shares, and the loss is exact.
    found = trainer.evaluate(DataLoader(texts(1), batch_size=BATCH, collate_fn=for_classes))
    with torch.no_grad():
        whole = for_classes(texts(1))
        out = alone.eval()(**whole)
    assert found["loss"] == pytest.approx(float(out.loss), abs=1e-5)
    assert found["accuracy"] == pytest.approx(float((out.logits.argmax(1) == whole["labels"]).float().mean()), abs=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_token_has_the_same_weight_in_gpt2(world, accumulate):
    ours, alone = gpt2(seed=world.rank), gpt2()
    fit(ours, for_language, predict_words, accumulate=accumulate)
    train_alone(alone, for_language, size=world.size, accumulate=accumulate)
    assert_equal(ours, alone)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers so
def test_a_lora_adapter_of_peft_is_trained_and_the_frozen_weights_stay(world, shared_tmp_path):
    from peft import LoraConfig, get_peft_model

    def adapted(seed=0):
        model = gpt2()
        torch.manual_seed(seed)
        return get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))

    before, ours, alone = gpt2(), adapted(seed=world.rank), adapted()
    saved = hvdtrain.callbacks.Checkpoint(shared_tmp_path, frozen=False)
    fit(ours, for_language, predict_words, callbacks=[saved])
    train_alone(alone, for_language, size=world.size)
    assert_equal(ours, alone)
    held = load_file(shared_tmp_path / "epoch-000002" / "model.safetensors")
    assert held
    assert all("lora_" in name for name in held)
    optimizer = optimizer_of(again := adapted())
    hvdtrain.Trainer.load(str(shared_tmp_path / "epoch-000002"), again, optimizer=optimizer, step=predict_words)
    assert_equal(again, ours)
    frozen = dict(before.named_parameters())
    same = [name for name, each in ours.unload().named_parameters() if torch.equal(each, frozen[name])]
    assert same == list(frozen)


def test_the_script_of_the_page_trains(world, shared_tmp_path, tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs/pages/hugging-face.md").read_text(encoding="utf-8")
    script = tmp_path / "fine_tune.py"
    script.write_text(page.partition("```python\n")[2].partition("```")[0])
    monkeypatch.chdir(shared_tmp_path)
    names = runpy.run_path(str(script))
    losses = names["trainer"].history["loss"]
    assert losses[1] < losses[0]
    world.barrier()
    trained = GPT2LMHeadModel.from_pretrained("fine_tuned").state_dict()
    assert all(torch.equal(trained[name], each) for name, each in names["model"].state_dict().items())
