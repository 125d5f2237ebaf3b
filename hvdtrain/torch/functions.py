"""Send parameters and Python objects from one rank to the others."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from hvdtrain.torch import engine
from hvdtrain.torch.gather_ops import broadcast_async_
from hvdtrain.torch.objects import allgather_object, broadcast_object
from hvdtrain.torch.optimizer_state import broadcast_optimizer_state

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """Overwrite tensors with the root's, in place, and touch nothing else.

    Takes tensors of any type, layout and shape, 0-dimensional and boolean ones included. Entries that are not tensors
    are left alone, with a warning that names them.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, `model.parameters()`, or any dict or iterable of
            tensors or (name, tensor). Names and order must be equal on all ranks.
        root_rank: rank whose tensors everybody gets.

    Raises:
        ValueError: `params` is something else.
    """
    if isinstance(params, Mapping):
        items: list[tuple[Any, Any]] = sorted(params.items(), key=lambda item: str(item[0]))
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, Tensor)):
        items = [p if isinstance(p, tuple) and p[0] is not None else (i, p) for i, p in enumerate(params)]
        items = [(name, p[1] if isinstance(p, tuple) else p) for name, p in items]
    else:
        raise ValueError(
            "params must be a dict, or an iterable of tensors or of (name, tensor), such as model.state_dict() or "
            f"model.named_parameters(). Received: {type(params).__name__}"
        )
    skipped = [str(name) for name, p in items if not isinstance(p, Tensor)]
    if skipped:
        warnings.warn(
            f"broadcast_parameters left these alone, since they are not tensors: {', '.join(skipped)}. "
            "Send them with hvd.broadcast_object.",
            stacklevel=2,
        )
    if engine.native().size() == 1:
        return
    handles = [broadcast_async_(p, root_rank, f"parameter.{name}") for name, p in items if isinstance(p, Tensor)]
    for handle in handles:
        handle.wait()
