"""Compute batches in parts; when a rank runs out of memory, repeat the step in smaller parts on all ranks."""

from __future__ import annotations

import gc
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hvdtrain.adapter import Fault
from hvdtrain.data.sources import Batch
from hvdtrain.data.trees import unpack
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import World
from hvdtrain.errors import HvdTrainError
from hvdtrain.telemetry.memory import is_out_of_memory
from hvdtrain.torch.reduction.exchange import RankGaveUp
from hvdtrain.torch.steps.attempt import Attempt
from hvdtrain.torch.steps.compute import describe, move
from hvdtrain.torch.steps.loss_check import LossRefusedError
from hvdtrain.torch.steps.update import Update

log = logging.getLogger("hvdtrain")


class MicroBatches:
    """Splits batches alike on all ranks, so that they take part in the same collectives.

    `limit` is the largest number of samples that a rank computes at once. With "auto" it begins with whole batches, and
    is halved on all ranks when one runs out of memory. Without a limit, a batch is computed in `parts`.
    """

    def __init__(self, limit: int | str | None, model: nn.Module, world: World, *, parts: int = 1) -> None:
        self.adapts = limit == "auto"
        self.size = 0 if limit is None or limit == "auto" else int(limit)  # 0: whole batches
        self._parts_without_limit = parts
        self._world, self._device = world, torch.device(world.device)
        self._checked = False
        self._has_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
        self._has_norm_1d = any(isinstance(m, nn.BatchNorm1d) for m in model.modules())

    @property
    def rank_state(self) -> dict[str, NDArray[Any]]:
        """The size that "auto" has found, equal on all ranks."""
        return {"max.micro_batch": np.array([self.size])} if self.adapts else {}

    @rank_state.setter
    def rank_state(self, held: dict[str, NDArray[Any]]) -> None:
        if self.adapts and "max.micro_batch" in held:
            self.size = int(held["max.micro_batch"][0])

    def run(
        self,
        step: Callable[[Sequence[Batch]], Fault | None],
        batches: Sequence[Batch],
        update: Update,
        attempt: Attempt | None,
    ) -> Fault | None:
        """Take a step over parts of `batches`; with "auto", undo and repeat it while any rank runs out of memory.

        That rank takes part in the reduction with a weight that tells the others. `attempt` undoes what it changed.

        Raises:
            LossRefusedError: on every rank, if the check of the loss has raised it on one of them.
        """
        while True:
            failure = refusal = None
            try:
                return step(self._split(batches))
            except RankGaveUp:
                pass
            except LossRefusedError as error:
                if not update.can_give_up:  # other ranks do not wait for this one
                    raise
                refusal = str(error)
            except Exception as error:
                # If the rank was reducing, other ranks have reduced, and take the step.
                if not (is_out_of_memory(error) and self.adapts) or update.step.is_reducing:
                    raise
                failure = f"{type(error).__name__}: {error}".partition("\n")[0]
            if failure is not None:  # the frames that held the graph are gone with the exception
                gc.collect()
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()
            if failure is not None or refusal is not None:
                update.give_up()
            self._raise_refusal(refusal)
            if attempt is not None:
                attempt.repeat()
            self._shrink(batches, failure)

    def _raise_refusal(self, mine: str | None) -> None:
        """Raise on every rank what one rank's batch has shown of the loss; a collective after a step was given up."""
        for refusal in filter(None, self._world.allgather_object(mine, name="loss_refusals")):
            raise LossRefusedError(refusal)

    def _shrink(self, batches: Sequence[Batch], failure: str | None) -> None:
        """Halve the micro-batches after a `failure` on any rank; raise on every rank if they have one sample."""
        at_once = max(-(-self._largest(batch) // self._parts(batch)) for batch in batches)
        reports = self._world.allgather_object(failure and (socket.gethostname(), failure), name="out_of_memory")
        (rank, (host, text)), *others = [(rank, each) for rank, each in enumerate(reports) if each is not None]
        who = f"rank {rank} ({host})" + (f" and {len(others)} more ran" if others else " ran")
        if at_once <= 1:
            raise HvdTrainError(
                f"{who} out of memory with a single sample at once, so micro-batches cannot become smaller ({text}). "
                'Use shorter samples, a smaller model, or precision="bf16".'
            )
        self.size = at_once // 2
        if self._world.is_root:
            counts = f"{at_once} samples at once. Ranks repeat the step, and compute {self.size} at once from here on"
            log.warning("%s out of memory with %s.", who, counts)
            self._warn_of_norm(self.size)

    def _warn_of_norm(self, size: int) -> None:
        if self._has_norm_1d and size == 1 and self._world.is_root:
            log.warning(
                "BatchNorm1d cannot normalize a single sample: it takes its running statistics, and does not update "
                "them. Use LayerNorm or GroupNorm, or micro-batches of 2 samples or more."
            )
            self._has_norm_1d = self._has_norm = False
        if self._has_norm and self._world.is_root:
            log.warning(
                "BatchNorm normalizes each micro-batch of up to %d samples by itself, not the whole batch.", size
            )
            self._has_norm = False

    def _largest(self, batch: Batch) -> int:
        """Return the number of samples on the rank that has most."""
        return -(-batch.global_count // DataRanks(self._world).size) if batch.largest is None else batch.largest

    def _parts(self, batch: Batch) -> int:
        return max(1, -(-self._largest(batch) // self.size)) if self.size else self._parts_without_limit

    def _split(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the micro-batches, as many on every rank; those of a rank with fewer samples may be empty."""
        if self.adapts and not self._checked:  # refuse such data at the first step, not hours later
            self._cut(batches[0], 0, batches[0].local_count)
            self._checked = True
        if not self.size and self._parts_without_limit == 1:
            return batches
        return [part for batch in batches for part in self._micro_batches(batch, self._parts(batch))]

    def _micro_batches(self, batch: Batch, parts: int) -> list[Batch]:
        if parts == 1:
            return [batch]
        self._warn_of_norm(self.size or -(-self._largest(batch) // parts))
        local, whole = (
            [count * part // parts for part in range(parts + 1)] for count in (batch.local_count, batch.global_count)
        )
        return [
            replace(self._cut(batch, *rows), global_count=end - first)
            for rows, (first, end) in zip(pairwise(local), pairwise(whole), strict=True)
        ]

    def _cut(self, batch: Batch, first: int, end: int) -> Batch:
        """Return some of a batch's samples."""

        def rows(leaf: Any) -> Any:
            shape = getattr(leaf, "shape", None)
            if leaf is not None and (not shape or shape[0] != batch.local_count):
                raise TypeError(
                    "micro_batch splits batches whose tensors and arrays all have one row per sample. Received: "
                    f"{describe(leaf)} in {describe(batch.item)} of {batch.local_count} samples on rank "
                    f"{self._world.rank}. Compute other values in step, or use a smaller batch_size and accumulate."
                )
            return leaf if leaf is None else leaf[first:end]

        if first == end:  # its data shows the shapes to a layer that synchronizes with other ranks
            return replace(batch, local_count=0)
        item = move(rows, batch.item)
        return Batch(*unpack(item), local_count=end - first, item=item)
