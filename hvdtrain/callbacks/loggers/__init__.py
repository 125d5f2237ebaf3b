"""Send a run's configuration and metrics to the tools with which people compare runs.

`Logger` decides what is logged, when and on which rank; a sink, one a tool, only writes it down.
"""

from hvdtrain.callbacks.loggers.logger import Logger
from hvdtrain.callbacks.loggers.tools import CSVLogger, MLflowLogger, TensorBoardLogger, WandbLogger

__all__ = ["CSVLogger", "Logger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"]
