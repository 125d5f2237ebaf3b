"""Checkpoints on disk: what one holds (`files`), a run's folder of them (`store`), writing behind training (`writer`).

Knows nothing of frameworks or ranks: arrays by name plus JSON, never pickle.
"""

from __future__ import annotations

from hvdtrain.checkpoint.files import Arrays, Contents, read, read_meta, write
from hvdtrain.checkpoint.store import Store
from hvdtrain.checkpoint.writer import Writer

__all__ = ["Arrays", "Contents", "Store", "Writer", "read", "read_meta", "write"]
