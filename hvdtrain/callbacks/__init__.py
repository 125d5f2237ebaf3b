"""Callbacks for the Trainer, framework-neutral, one concern a file."""

from hvdtrain.callbacks.base import Callback, RunContext
from hvdtrain.callbacks.checkpoint import Checkpoint
from hvdtrain.callbacks.early_stopping import EarlyStopping
from hvdtrain.callbacks.ema import EMA
from hvdtrain.callbacks.loggers import CSVLogger, Logger, MLflowLogger, TensorBoardLogger, WandbLogger
from hvdtrain.callbacks.profiler import Profiler
from hvdtrain.callbacks.progress import Progress
from hvdtrain.callbacks.run_folder import RunFolder
from hvdtrain.callbacks.schedule import Schedule
from hvdtrain.callbacks.stragglers import Stragglers
from hvdtrain.callbacks.sync_check import SyncCheck

__all__ = [
    "EMA", "CSVLogger", "Callback", "Checkpoint", "EarlyStopping", "Logger", "MLflowLogger", "Profiler", "Progress",
    "RunContext", "RunFolder", "Schedule", "Stragglers", "SyncCheck", "TensorBoardLogger", "WandbLogger",
]  # fmt: skip
