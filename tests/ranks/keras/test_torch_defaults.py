"""Keras on torch: the user's default type and device of torch's change nothing."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdtrain

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.world_size(2),
    pytest.mark.skipif(keras.backend.backend() != "torch", reason="other backends have no default of torch's"),
]
SAMPLES, BATCH = 23, 4


def fit(kit, **options):
    """Return weights, losses and predictions of a run; a rank has no samples in the last step."""
    generator = np.random.default_rng(0)
    data = generator.normal(size=(SAMPLES, 5)).astype("float32"), generator.normal(size=(SAMPLES, 3)).astype("float32")
    net = kit.model()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=None if "shard" in options else 1.0)
    trainer = hvdtrain.Trainer(net, optimizer=optimizer, loss="mse", metrics=["mae"], **options)
    history = trainer.fit(data, validation=data, epochs=2, batch_size=BATCH, progress=False, run_dir=None)
    losses = [history["loss"], history["val_mae"]]
    return [*net.get_weights(), np.array(losses), np.asarray(trainer.predict(data[0]))]


@pytest.mark.parametrize("wanted", ["meta", torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"nan_policy": "skip"}, {"sync": hvdtrain.Delayed()}, {"compression": "powersgd:2"}, {"shard": "optimizer"}],
    ids=str,
)
def test_a_run_is_the_same_under_another_default(kit, options, wanted):
    expected = fit(kit, **options)
    before = torch.get_default_dtype()
    try:
        if wanted == "meta":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(wanted)
        found = fit(kit, **options)
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
