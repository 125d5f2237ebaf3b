"""The contract of an exchange: how this rank's gradients become the gradients that its optimizer applies."""

from __future__ import annotations

from functools import partial
from typing import Any

from hvdtrain.keras.backends import backend_module

_backend = backend_module()


class Exchange:
    """Turns a step's gradients into the gradients that the optimizer applies. By default they are this rank's own."""

    reduces = False  # True if a step has collectives, for which ranks agree on the model before the first one

    def finish(self, part: Any, gradients: list[Any]) -> tuple[list[Any], Any]:
        """Return the gradients to apply, and whether there are any: a boolean scalar, or None if there always are.

        It is called where weights would change: after accumulation, before clipping. JAX calls it in other steps too,
        whose result it drops. In a graph it is traced.

        With sharded state, `are_parts` of the part's `_hvd_state` is set if the result is this rank's parts.

        Args:
            part: the `DistributedMixin`.
            gradients: of its current `variables`.
        """
        factor = part._hvd_how.factor
        return gradients if factor == 1.0 else [g * factor for g in gradients], None


class EveryStep(Exchange):
    """All ranks apply the mean of their gradients, in the step that has computed them."""

    reduces = True

    def finish(self, part: Any, gradients: list[Any]) -> tuple[list[Any], Any]:
        """Return the mean over ranks."""
        if not part._hvd_how.active():
            return super().finish(part, gradients)
        shards, state = part._hvd_shards, part._hvd_state
        if shards is None or not shards.reduces_parts(part):
            return _backend.on_update_step(part, part._hvd_reduce, list, gradients), None
        state.are_parts, variables = True, state.variables
        reduce = partial(shards.reduced_parts, names=part._hvd_names(variables), variables=variables)
        own = partial(shards.parts, variables=variables)
        return _backend.on_update_step(part, reduce, own, gradients), None


class Reduced(Exchange):
    """The gradients are the mean already."""

    def finish(self, part: Any, gradients: list[Any]) -> tuple[list[Any], Any]:
        """Return the gradients."""
        return gradients, None


EVERY_STEP, ALONE, REDUCED = EveryStep(), Exchange(), Reduced()
