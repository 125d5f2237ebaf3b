"""transformers' Trainer on Horovod's ranks: import Trainer and TrainingArguments from here."""

from __future__ import annotations

import importlib.util

from hvdtrain.errors import PackageMissingError

for _name in ("transformers", "accelerate"):
    if importlib.util.find_spec(_name) is None:
        raise PackageMissingError(f"{_name} is not installed. Run: pip install transformers accelerate")

from hvdtrain.transformers import host  # noqa: E402
from hvdtrain.transformers.arguments import (  # noqa: E402
    ArgumentsOnRanks,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)
from hvdtrain.transformers.trainer import Seq2SeqTrainer, Trainer, TrainerOnRanks  # noqa: E402

host.check()

__all__ = [
    "ArgumentsOnRanks",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainerOnRanks",
    "TrainingArguments",
]
