"""Checkpoints on disk: what one holds (`files`), and a run's folder of them (`store`), with one writer (`lock`).

Knows nothing of frameworks or ranks: arrays by name plus JSON, never pickle.
"""

from __future__ import annotations

from hvdtrain.checkpoint.array_file import Kind, StoredArray, StoredArrays, kind_of
from hvdtrain.checkpoint.files import Arrays, Contents, Draft, digest, read, read_meta, scan, write
from hvdtrain.checkpoint.store import Store, Writer

__all__ = [
    "Arrays",
    "Contents",
    "Draft",
    "Kind",
    "Store",
    "StoredArray",
    "StoredArrays",
    "Writer",
    "digest",
    "kind_of",
    "read",
    "read_meta",
    "scan",
    "write",
]
