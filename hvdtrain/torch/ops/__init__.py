"""Collectives of tensors, as horovod.torch names them, and what all of the other folders need of them."""
