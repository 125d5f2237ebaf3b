"""Memory and time of a small transformer with and without `checkpoint_activations`: python -m benchmarks.activations.

Each training is a process of its own. Its memory is the largest resident size of its steps after the first, less what
was resident after a step of one sample, which has imported, made gradients and optimizer state: so it is activations,
for the most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.memory import reset_peak, resident

LAYERS, WIDTH, HEADS, LENGTH, BATCH, STEPS, SKIPPED = 8, 256, 4, 128, 16, 7, 2
BACKENDS = ("torch", "keras-torch", "keras-tensorflow", "keras-jax")


def torch_model() -> tuple[Any, dict[str, Any]]:
    """Return the model, and what trains it."""
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    model = nn.Sequential(nn.Linear(32, WIDTH), body, nn.Linear(WIDTH, 32))
    return model, {"optimizer": torch.optim.Adam(model.parameters()), "loss": nn.MSELoss()}


def keras_model() -> tuple[Any, dict[str, Any]]:
    """Return the same in Keras."""
    import keras
    from keras import layers

    class Block(layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.drop = (
                layers.LayerNormalization(),
                layers.LayerNormalization(),
                layers.Dropout(0.1),
            )
            self.attend = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=0.1)
            self.up, self.down = layers.Dense(4 * WIDTH, activation="relu"), layers.Dense(WIDTH)

        def call(self, x: Any) -> Any:
            hidden = self.first(x)
            x = x + self.drop(self.attend(hidden, hidden))
            return x + self.drop(self.down(self.drop(self.up(self.second(x)))))

    inputs = keras.Input((LENGTH, 32))
    body = [layers.Dense(WIDTH), *(Block() for _ in range(LAYERS)), layers.Dense(32)]
    return keras.Sequential([inputs, *body]), {"optimizer": "adam", "loss": "mse"}


def train(backend: str, rule: Any) -> dict[str, float]:
    """Train in this process."""
    import numpy as np

    import hvdtrain
    from hvdtrain.callbacks import Callback

    class Clock(Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, trainer: Any, step: int) -> None:
            self.ends.append(time.perf_counter())
            if len(self.ends) == 1:  # the largest size while the step was compiled does not count
                reset_peak()

    model, options = torch_model() if backend == "torch" else keras_model()
    trainer = hvdtrain.Trainer(model, checkpoint_activations=rule, **options)
    data = np.random.default_rng(0).normal(size=(2, BATCH * STEPS, LENGTH, 32)).astype(np.float32)
    trainer.fit(tuple(data[:, :1]), batch_size=1, progress=False, run_dir=None)
    before = resident("VmRSS")
    trainer.fit(tuple(data), batch_size=BATCH, progress=False, run_dir=None, callbacks=[clock := Clock()])
    steps = np.diff(clock.ends)[SKIPPED:]
    return {"mib": resident("VmHWM") - before, "ms": 1000 * statistics.median(steps.tolist())}


def measure(backend: str, rule: Any) -> dict[str, float]:
    """Train in a process of its own."""
    environment = {**os.environ, "HVDTRAIN_SOLO": "1", "OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
    if backend != "torch":
        environment["KERAS_BACKEND"] = backend.removeprefix("keras-")
    command = [sys.executable, "-m", "benchmarks.activations", "--train", backend, "--rule", json.dumps(rule)]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def compare(backend: str, rounds: int) -> str:
    """Return a row of the table: medians of processes that take turns, and of their ratios."""
    turns = [(measure(backend, False), measure(backend, "blocks")) for _ in range(rounds)]

    def of(name: str, kind: int) -> float:
        return statistics.median(turn[kind][name] for turn in turns)

    def ratios(name: str) -> str:
        found = sorted(again[name] / plain[name] for plain, again in turns)
        return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"

    sizes = f"{of('mib', 0):.0f} | {of('ms', 0):.0f} | {of('mib', 1):.0f} | {of('ms', 1):.0f}"
    return f"| {backend} | {sizes} | {ratios('mib')} | {ratios('ms')} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind [3]")
    parser.add_argument("--train", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--rule", type=json.loads, default=False, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        print(json.dumps(train(options.train, options.rule)))
        return
    print('| | plain, MiB | ms a step | `"blocks"`, MiB | ms a step | memory | time |\n|---|---|---|---|---|---|---|')
    for backend in options.backend:
        print(compare(backend, options.rounds), flush=True)


if __name__ == "__main__":
    main()
