"""A sampler that shares what is left of an epoch among the ranks that are left."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch.utils.data

from hvdtrain.torch.ops import engine


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Yield this rank's share of the samples that no rank has processed in this epoch.

    All ranks get equally many indices, so that they take equally many steps: where the rest does not divide evenly,
    some samples are given to two ranks. `dataset` must keep its length; `seed` must be equal on all ranks.

    Put it into a `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of each epoch.
    """

    _recorded: int  # samples of this rank's share since the last reset

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.set_epoch(0)

    @property
    def processed_num(self) -> int:
        """Number of samples processed in this epoch, by all ranks."""
        return len(self.processed_indices)

    def set_epoch(self, epoch: int) -> None:
        """Forget what was processed and go to `epoch`; to be called when an epoch ends, not when it begins."""
        self.epoch = epoch
        self.processed_indices: set[int] = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed its next `batch_size` samples; `batch_idx` is not needed.

        Ranks step together, so each knows the indices of all: none is lost with a rank that dies later.
        """
        end = min(self._recorded + batch_size, self.num_samples)
        self.processed_indices.update(self._padded[self._recorded * self.num_replicas : end * self.num_replicas])
        self._recorded = end

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the indices processed in it."""
        return {"epoch": self.epoch, "processed_indices": sorted(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; Horovod's form, with a count, is accepted too."""
        self.epoch = state_dict["epoch"]
        if "processed_indices" in state_dict:
            self.processed_indices = set(state_dict["processed_indices"])
        else:
            self.processed_indices = set(self._order()[: state_dict["processed_num"]])
        self.reset()

    def reset(self) -> None:
        """Share what is left among the ranks there are now."""
        self.num_replicas, self.rank = engine.native().size(), engine.native().rank()
        self.remaining_indices = [i for i in self._order() if i not in self.processed_indices]
        self.num_samples: int = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        # Several times over, where fewer samples are left than half the ranks.
        self._padded = list(islice(cycle(self.remaining_indices), self.total_size))
        self._recorded = 0

    def _order(self) -> list[int]:
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        return indices

    def __iter__(self) -> Iterator[int]:
        return iter(self._padded[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
