"""What can be sharded: the classes of optimizers, and the memory of weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# Their update of a number depends on no other number of the weight, nor on other weights.
ELEMENT_WISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip


def check_class(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless the optimizer's class is known to be element-wise."""
    plain = getattr(type(optimizer), "_hvd_plain_class", type(optimizer))
    if plain not in ELEMENT_WISE:
        names = ", ".join(each.__name__ for each in ELEMENT_WISE)
        raise ValueError(
            "With a sharded state, each rank updates a part of each weight, so the update of a number must not depend "
            f"on others. Known to be so: torch.optim's {names}. Received: {plain.__module__}.{plain.__qualname__}. Use "
            "one of these, or no shards."
        )


def check_memory(parameters: Iterable[Tensor]) -> None:
    """Raise ValueError if a weight has gaps in memory, where a part of it has no view of one dimension."""
    for parameter in parameters:
        if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            raise ValueError(
                "A weight whose state is sharded must be dense in memory. Received: shape "
                f"{tuple(parameter.shape)} with strides {parameter.stride()}. Use parameter.contiguous()."
            )
