"""Checkpoints on disk: what one holds (`files`), and a run's folder of them (`store`), with one writer (`lock`).

Knows nothing of frameworks or ranks: arrays by name plus JSON, never pickle.
"""

from __future__ import annotations

from hvdtrain.checkpoint.files import Arrays, Contents, digest, read, read_meta, write
from hvdtrain.checkpoint.store import Store, Writer

__all__ = ["Arrays", "Contents", "Store", "Writer", "digest", "read", "read_meta", "write"]
