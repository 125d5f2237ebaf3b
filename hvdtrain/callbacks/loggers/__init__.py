"""Send a run's configuration and metrics to the tools with which people compare runs.

`Logger` decides what is logged, when and on which rank; a sink, one a tool, only writes it down.
"""

from hvdtrain.callbacks.loggers.logger import Logger as Logger
from hvdtrain.callbacks.loggers.tools import CSVLogger as CSVLogger
from hvdtrain.callbacks.loggers.tools import MLflowLogger as MLflowLogger
from hvdtrain.callbacks.loggers.tools import TensorBoardLogger as TensorBoardLogger
from hvdtrain.callbacks.loggers.tools import WandbLogger as WandbLogger

__all__ = ["CSVLogger", "Logger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"]
