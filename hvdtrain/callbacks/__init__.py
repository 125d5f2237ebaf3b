"""Callbacks for the Trainer, framework-neutral, one concern a file."""

from hvdtrain.callbacks.base import Callback as Callback
from hvdtrain.callbacks.base import RunContext as RunContext
from hvdtrain.callbacks.checkpoint import Checkpoint as Checkpoint
from hvdtrain.callbacks.early_stopping import EarlyStopping as EarlyStopping
from hvdtrain.callbacks.ema import EMA as EMA
from hvdtrain.callbacks.loggers import CSVLogger as CSVLogger
from hvdtrain.callbacks.loggers import Logger as Logger
from hvdtrain.callbacks.loggers import MLflowLogger as MLflowLogger
from hvdtrain.callbacks.loggers import TensorBoardLogger as TensorBoardLogger
from hvdtrain.callbacks.loggers import WandbLogger as WandbLogger
from hvdtrain.callbacks.profiler import Profiler as Profiler
from hvdtrain.callbacks.progress import Progress as Progress
from hvdtrain.callbacks.run_folder import RunFolder as RunFolder
from hvdtrain.callbacks.schedule import Schedule as Schedule
from hvdtrain.callbacks.stragglers import Stragglers as Stragglers
from hvdtrain.callbacks.sync_check import SyncCheck as SyncCheck

__all__ = [
    "EMA", "CSVLogger", "Callback", "Checkpoint", "EarlyStopping", "Logger", "MLflowLogger", "Profiler", "Progress",
    "RunContext", "RunFolder", "Schedule", "Stragglers", "SyncCheck", "TensorBoardLogger", "WandbLogger",
]  # fmt: skip
