"""What a rank of a Keras run holds of its own, on a GPU that is faked here."""

from __future__ import annotations

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
