"""Checkpoints on disk: what one holds (`files`), a run's folder of them (`store`), writing behind training (`writer`).

Knows nothing of frameworks or ranks: arrays by name plus JSON, never pickle.
"""

from __future__ import annotations

from hvdtrain.checkpoint.files import Arrays, Contents, read, read_meta, write

# The functions of before, until nobody calls them any more.
from hvdtrain.checkpoint.legacy import epoch_directory, load, newest_first, save, set_aside
from hvdtrain.checkpoint.store import Store
from hvdtrain.checkpoint.writer import Writer

__all__ = [
    "Arrays",
    "Contents",
    "Store",
    "Writer",
    "epoch_directory",
    "load",
    "newest_first",
    "read",
    "read_meta",
    "save",
    "set_aside",
    "write",
]
