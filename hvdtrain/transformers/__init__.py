"""transformers' Trainer on Horovod's ranks: import Trainer and TrainingArguments from here."""

from __future__ import annotations

try:
    import transformers as _transformers
except ImportError as _error:
    from hvdtrain.errors import PackageMissingError

    raise PackageMissingError('transformers is not installed. Run: pip install "hvdtrain[transformers]"') from _error

from hvdtrain.transformers.arguments import ArgumentsOnRanks, Seq2SeqTrainingArguments, TrainingArguments
from hvdtrain.transformers.trainer import Seq2SeqTrainer, Trainer, TrainerOnRanks

__all__ = [
    "ArgumentsOnRanks",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainerOnRanks",
    "TrainingArguments",
]
