"""Distributed training with Horovod for PyTorch and Keras 3."""

__version__ = "0.1.0.dev0"
