"""Elastic training with a tape: states that survive ranks that come and go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvdtrain.distributed.elastic import ObjectState, State
from hvdtrain.keras import basics, ops
from hvdtrain.keras.elastic import KerasState, VariablesPart, run
from hvdtrain.keras.shards import shards_of
from hvdtrain.tensorflow.ops import refuse_session
from hvdtrain.tensorflow.variables import broadcast_variables

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]


class TensorFlowKerasState(KerasState):
    """A Keras model, its optimizer and further values, which an elastic run saves, restores and synchronizes.

    Args:
        model: built keras.Model; one that is not is a ValueError.
        optimizer: None means the one it was compiled with. Built here if it is not yet.
        backend: must be None; Horovod's is for TensorFlow 1.
        attributes: values to synchronize, such as epoch=0 and batch=0; they become attributes.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **attributes: Any) -> None:
        if backend is not None:
            raise ValueError(f"backend is for TensorFlow 1 sessions. Received: backend={backend!r}")
        super().__init__(model, optimizer, **attributes)


class TensorFlowState(ObjectState):
    """Variables and further values, which an elastic run saves, restores and synchronizes.

    Args:
        variables: tf.Variables or Keras variables, the same on all ranks and in the same order.
        session: must be None; Horovod's is for TensorFlow 1.
        attributes: values to synchronize, such as epoch=0 and batch=0; they become attributes.
    """

    def __init__(self, variables: Iterable[Any] | None = None, session: Any = None, **attributes: Any) -> None:
        refuse_session(session)
        if variables is None:
            raise ValueError("TensorFlow 2 has no global variables. Pass those to save: TensorFlowState(variables=...)")
        self.variables = list(variables)
        if shards_of(self.variables):
            raise ValueError(
                "TensorFlowState gives all ranks the same values, and of a state in shards each rank holds a part. "
                "Received: variables of such an optimizer. Use TensorFlowKerasState(model, optimizer)."
            )
        self._parts = [VariablesPart(lambda: self.variables, lambda: broadcast_variables(self.variables, root_rank=0))]
        super().__init__(bcast_object=ops.broadcast_object, get_rank=basics.rank, **attributes)
