"""The gradient of one step, in flight on the JAX backend while the next step computes.

Gradients pass through an ordered host callback, which keeps a copy of them and returns those of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from hvdtrain.keras.backends.jax import buckets_of, flat_arrays, start
from hvdtrain.keras.delayed.handle import Handle
from hvdtrain.keras.reduction import GradientReduction, identity


class InFlight(Handle):
    """See `hvdtrain.keras.delayed`."""

    def swap(
        self, gradients: Sequence[Any], names: Sequence[str], variables: Sequence[Any], how: GradientReduction
    ) -> tuple[list[Any], Any]:
        """Keep the gradients; return the mean of those of the step before, and False if there are none."""
        if how.active():
            wires = [how.compression.compress(g)[0] for g in gradients]
            buckets = buckets_of(wires, variables, how)
            begin: Callable[..., Any] = partial(start, list(names), buckets, how)
        else:
            wires, buckets = list(gradients), [[i] for i in range(len(gradients))]
            begin = partial(_alone, how.factor)
        shapes = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in wires]
        # The callback holds no traced value but its arguments: JAX may run it long after this trace is gone.
        as_gradients = partial(_cast, begin, [g.dtype for g in gradients])
        on_host = partial(self._swap_on_host, list(variables), as_gradients, buckets)
        late, there = io_callback(on_host, (shapes, jax.ShapeDtypeStruct((), jnp.bool_)), *wires, ordered=True)
        return [r.astype(g.dtype) for r, g in zip(late, gradients, strict=True)], there

    def _swap_on_host(
        self, variables: list[Any], begin: Callable[..., Any], buckets: list[list[int]], *wires: Any
    ) -> tuple[list[Any], Any]:
        found = self.mean()
        self.put(None)
        flat = list(flat_arrays(buckets, wires))
        self.keep(variables, partial(begin, shapes=[w.shape for w in wires], flat=flat))
        means = {identity(v): mean for v, mean in found or ()}
        pairs = [(means.get(identity(v)), w) for v, w in zip(variables, wires, strict=True)]
        late = [np.zeros(w.shape, w.dtype) if m is None else np.asarray(m, w.dtype) for m, w in pairs]
        return late, np.bool_(found is not None)

    def launch(self) -> None:
        """Start to reduce what the step has kept."""
        jax.effects_barrier()  # the step's results may be there before its callback has returned
        super().launch()


def _cast(begin: Callable[..., Any], dtypes: list[Any], **given: Any) -> Callable[[], list[Any]]:
    """Start as `begin` does. The means have the gradients' types, in which checkpoints hold them."""
    wait = begin(**given)
    return lambda: [np.asarray(mean, dtype) for mean, dtype in zip(wait(), dtypes, strict=True)]


def _alone(factor: float, *, shapes: list[Any], flat: list[Any]) -> Callable[[], list[Any]]:
    """Return what `start` returns where there are no other ranks; each gradient is alone in its bucket."""
    return lambda: [
        array.reshape(shape) * np.asarray(factor, array.dtype) for array, shape in zip(flat, shapes, strict=True)
    ]
