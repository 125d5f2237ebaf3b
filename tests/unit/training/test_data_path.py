"""How many functions the data passes through on its way from `fit` to a framework's step."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import hvdtrain
from hvdtrain.data.sources import Batch, IndexedSource
from hvdtrain.torch.adapter import TorchAdapter

PACKAGE = str(Path(hvdtrain.__file__).parent)


def test_arrays_pass_through_ten_functions_to_the_first_step(make):
    train = (torch.zeros(12, 4), torch.zeros(12, dtype=torch.long))
    step = TorchAdapter.train_step.__code__
    passed: dict[str, None] = {}

    def is_data(value):
        """Whether this is the user's data, its source, its batches or an iterator of them."""
        if isinstance(value, list):
            value = value[0] if value else None
        return value is train or isinstance(value, Batch | IndexedSource | map)

    def name_of(code):
        return code.co_qualname if hasattr(code, "co_qualname") else code.co_name

    def profile(frame, event, value):
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        count = code.co_argcount + code.co_kwonlyargcount
        given = [frame.f_locals.get(name) for name in code.co_varnames[:count] if name != "self"]
        if (event == "call" and any(map(is_data, given))) or (event == "return" and is_data(value)):
            passed[name_of(code)] = None
        if event == "call" and code is step:
            passed[name_of(frame.f_back.f_code)] = None  # it has read the batches from an iterator
            sys.setprofile(None)

    trainer = make()
    sys.setprofile(profile)
    try:
        trainer.fit(train, epochs=1, batch_size=4, progress=False, run_dir=None)
    finally:
        sys.setprofile(None)
    names = [name.rpartition(".")[2] for name in passed]
    assert sorted(names) == sorted(
        [
            "fit",
            "_fit_round",
            "as_source",
            "_make_steps",
            "_read",
            "__init__",
            "epoch",
            "_batch",
            "_take_steps",
            "train_step",
        ]
    )
