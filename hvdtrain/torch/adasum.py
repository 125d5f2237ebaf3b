"""Adasum: each rank takes its own step, and the steps are added up adaptively."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from hvdtrain.torch import engine
from hvdtrain.torch.engine import Adasum
from hvdtrain.torch.reduce_ops import Reduction, submit


class AdasumMixin(torch.optim.Optimizer):
    """Stands before `DistributedMixin`: gradients stay local, and what is reduced is each parameter's change."""

    _hvd_reducer: Any
    _hvd_plain_class: Any

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the user's optimizer's step on this rank's gradients, then combine the changes of all ranks."""
        self._reducer()  # type: ignore[attr-defined]
        reducer = self._hvd_reducer
        params = [param for param in reducer.parameters if param.requires_grad]
        before = [param.detach().clone() for param in params]
        reducer.scale_gradients()
        result = self._hvd_plain_class.step(self, *args, **kwargs)
        how = Reduction(Adasum, process_set=engine.global_set())
        compression = reducer.options.compression
        in_flight = []
        for param, start in zip(params, before, strict=True):
            compressed, context = compression.compress(param.detach() - start)
            name = f"adasum.{reducer.name_of(param)}"
            in_flight.append((submit([compressed], how, name=name, in_place=True), context))
        for param, start, (handle, context) in zip(params, before, in_flight, strict=True):
            (change,) = handle.wait()
            param.detach().copy_(start + compression.decompress(change, context))
        return result

    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self, *, weight: float | None = None, expected: float = 0.0) -> None:
        """Do nothing: gradients are not reduced, and so cannot be weighed."""
        if weight is not None:
            raise ValueError(f"Adasum has no mean that could be weighed. Received: weight={weight}")

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Raise AssertionError: with Adasum a step without reduction has no meaning."""
        raise AssertionError("skip_synchronize() is not possible with Adasum, which reduces after the step.")
