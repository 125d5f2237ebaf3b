"""The state that a rank of a Keras run holds alone; its GPU is faked here."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras")
torch = pytest.importorskip("torch")

from hvdtrain.keras import training_state  # noqa: E402


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="it is torch's generator")
def test_kerass_torch_backend_keeps_the_gpus_generator(monkeypatch):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    state = [torch.tensor([7], dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: state[0])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda new: state.__setitem__(0, new))
    held = training_state.rank_state(model, metrics=False)
    assert held["random.cuda"].tolist() == [7], sorted(held)
    state[0] = torch.tensor([8], dtype=torch.uint8)
    training_state.set_rank_state(held, model)
    assert state[0].tolist() == [7]


def compiled(k):
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4)])
    metric = keras.metrics.SparseTopKCategoricalAccuracy(k=k, name=f"top_{k}_accuracy")
    model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=[metric])
    model.train_on_batch(np.ones((3, 2), np.float32), np.zeros(3, np.int64))
    return model


def test_metrics_whose_names_differ_in_a_number_are_not_taken_for_each_other():
    held = training_state.rank_state(compiled(3), metrics=True)
    training_state.set_metrics(held, compiled(3))
    with pytest.raises(ValueError, match=r"counted loss, .*top_3_accuracy\. Received: loss, .*top_2_accuracy"):
        training_state.set_metrics(held, compiled(2))
