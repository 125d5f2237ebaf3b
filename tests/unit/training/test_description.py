"""What a run's configuration says of the script's choices, so that a report shows what differs."""

from __future__ import annotations

import functools
import json
import sys

import numpy as np
import pytest
import torch

from hvdtrain.tools.report.numbers import differences
from hvdtrain.training.description import name_of, script_arguments

X, Y = np.ones((4, 4), np.float32), np.zeros(4, int)


def test_runs_with_another_rate_loss_or_argument_differ_by_these_alone(make, net, tmp_path, monkeypatch):
    configs = []
    losses = (torch.nn.CrossEntropyLoss(), functools.partial(torch.nn.functional.cross_entropy, label_smoothing=0.1))
    for lr, loss in zip((0.01, 0.1), losses, strict=True):
        monkeypatch.setattr(sys, "argv", ["train.py", "--lr", str(lr), "--api-key=hunter2hunter2"])
        model = net()
        trainer = make(model, optimizer=torch.optim.SGD(model.parameters(), lr=lr), loss=loss)
        trainer.fit((X, Y), run_dir=tmp_path / str(lr), progress=False)
        configs.append(json.loads((tmp_path / str(lr) / "config.json").read_text()))
    found = {name: values for name, *values in differences(*configs)}
    assert found.keys() == {"loss", "optimizer_settings.lr", "arguments.lr"}
    assert found["loss"] == ["CrossEntropyLoss", "cross_entropy(label_smoothing=0.1)"]
    assert found["arguments.lr"] == ["0.01", "0.1"]
    assert configs[0]["optimizer"] == "SGD"
    assert "hunter2" not in json.dumps(configs)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["data", "-x", "-1.5", "--sizes", "1", "2", "--fast"], {"1": "data", "x": "-1.5", "sizes": "1 2", "fast": ""}),
        (["--token", "abcdefgh12"], {"token": "(hidden)"}),
    ],
)
def test_the_scripts_arguments_are_named_by_their_options(monkeypatch, words, found):
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    assert script_arguments() == found


def test_several_optimizers_and_names_stay_what_they_are():
    adam = torch.optim.Adam([torch.zeros(1)])
    assert name_of({"g": adam, "d": "sgd", "none": None}) == {"g": "Adam", "d": "sgd", "none": None}
    assert name_of([torch.nn.functional.mse_loss]) == ["mse_loss"]
