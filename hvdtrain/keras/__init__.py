"""Horovod for Keras 3: `import hvdtrain.keras as hvd` in place of horovod.keras or horovod.tensorflow.keras."""
from hvdtrain.keras.basics import *  # noqa
from hvdtrain.keras.basics import Average, Sum, Adasum
from hvdtrain.keras.wrapping import DistributedOptimizer, PartialDistributedOptimizer
from hvdtrain.keras.compression import Compression
from hvdtrain.keras.broadcast import broadcast_variables
